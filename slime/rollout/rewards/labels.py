"""Check labels before a launch: can the built-in graders compare a response with them at all?

`check_label` finds labels that no response can match. `doubt_label` finds those that a response can
match and that are rarely meant.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from slime.errors import UserError, a_type
from slime.rollout.rewards.text import (
    answer_in_label,
    label_letter,
    normalise_answer,
    normalise_final_answer,
    valid_choices,
)

#: A label for math is one answer. Longer text is a solution whose answer is not marked.
_MAX_WORDS = 40
#: The finding for rows whose labels are whole solutions: usually the wrong column was named.
UNMARKED = "have a long text for a label, all of which a response would have to repeat"
#: Placeholders for a missing value; a response with the same text gives no answer.
_NOT_A_VALUE = frozenset({"nan", "null", "undefined label", "[invalid]"})
#: Text that may be a placeholder or an answer in words.
_PERHAPS_A_VALUE = frozenset({"none", "n/a", "na", "unknown", "tbd", "todo"})
#: Tags and entities of HTML, which graders do not read.
_HTML = re.compile(r"</?(?:su[bp]|i|b|br|p|span|em|strong)\s*/?>|&(?:[a-z]{2,8}\d{0,2}|#\d+);")

_HAS_VALUE = re.compile(r"\w|\\(?:infty|emptyset|varnothing)|[∞∅√°%½⅓⅔¼¾]|\{\s*\\?\}")
#: An empty LaTeX command, and characters that graders ignore.
_NOTHING = re.compile(r"\\(?:text|mathrm|mathbf|mbox)\s*\{\s*\}|[\s$.,;:?\\}]")


def check_label(
    rm_type: str | None, label: Any, metadata: dict[str, Any] | None = None
) -> str | None:
    r"""Say why the built-in reward ``rm_type`` cannot grade a response against ``label``.

    The check takes microseconds and runs in the caller's process. ``remote_rm`` accepts every label
    that JSON can write, ``random``, ``ifbench`` and unknown names accept every label.

    Args:
        rm_type: with or without the prefix ``boxed_``.
        metadata: of the row; ``gpqa`` reads ``choices`` and ``valid_letters``.

    Returns:
        The reason, to be read after "the label …"; None where the label is fine.

    Example:
        >>> check_label("math", r"\boxed{}")
        'has an empty \\boxed{}'
        >>> check_label("gpqa", "Paris")
        "is 'Paris', which is none of the letters A to J"
        >>> check_label("math", "1,2")
    """
    name = (rm_type or "").removeprefix("boxed_")
    if name == "remote_rm":
        return _check_remote(label)
    check = _CHECKS.get(name)
    if check is None:
        return None
    if label is None or (isinstance(label, float) and label != label):
        return f"is {label}"
    if isinstance(label, (list, dict)):
        return f"is {a_type(label)}, not text or a number"
    if isinstance(label, str) and not label.strip():
        return "is empty"
    return check(label, metadata or {})


def doubt_label(rm_type: str | None, label: Any) -> tuple[str, str] | None:
    r"""Say what is odd about a label that `check_label` accepts.

    Returns:
        What such rows have, to be read after "rows", and what is odd about this one, to be read
        after "the label …"; None where nothing is.

    Example:
        >>> doubt_label("math", "<")
        ('have a label that --rm-type math compares as text',
         "is '<', which has neither a number nor a word")
    """
    rm_type = rm_type or ""
    if rm_type.removeprefix("boxed_") == "f1":
        return _doubt_words(rm_type, str(label).strip())
    if rm_type.removeprefix("boxed_") not in ("math", "deepscaler"):
        return None
    answer, is_boxed = answer_in_label(str(label))
    words = len(answer.split())
    if not is_boxed and words > _MAX_WORDS:
        why = rf"is a text of {words} words in which neither #### nor \boxed{{}} marks the answer"
        return UNMARKED, why
    if answer.lower() in _PERHAPS_A_VALUE:
        why = f"is {answer!r}"
    elif not _HAS_VALUE.search(answer):
        why = f"is {answer!r:.60}, which has neither a number nor a word"
    elif _braces(answer) < 0:
        why = "has braces that do not match"
    elif _HTML.search(answer):
        why = f"is {answer!r:.60}, which has marks of HTML"
    elif re.search(r"[\x07\x08\x0b\x0c]|[\t\r][a-z]", str(label)):
        why = f"is {answer!r:.60}, which has control characters where LaTeX commands were"
    else:
        return None
    return f"have a label that --rm-type {rm_type} compares as text", why


def _doubt_words(rm_type: str, answer: str) -> tuple[str, str] | None:
    if answer.lower() in _NOT_A_VALUE | _PERHAPS_A_VALUE:
        why = f"is {answer!r}"
    elif kind := _literal_kind(answer):
        why = f"is {answer!r:.60}, the text of a {kind}"
    elif not normalise_answer(answer) and not re.search(r"\w", answer):
        why = f"is {answer!r:.60}, which has no word"
    else:
        return None
    return f"have a label that --rm-type {rm_type} compares word by word", why


def _braces(answer: str) -> int:
    """Return how many braces are opened and not closed; negative where more are closed."""
    plain = answer.replace(r"\{", "").replace(r"\}", "")
    return plain.count("{") - plain.count("}")


def _check_math(label: Any, _: dict[str, Any]) -> str | None:
    answer, is_boxed = answer_in_label(str(label))
    if is_boxed and not answer.strip("$ "):
        return r"has an empty \boxed{}"
    if not answer:
        return "has nothing after ####"
    if answer.lower() in _NOT_A_VALUE:
        return f"is {answer!r}"
    if kind := _literal_kind(answer):
        return f"is {answer!r:.60}, the text of a {kind}, which no response repeats"
    if not _HAS_VALUE.search(answer) and not re.sub(_NOTHING, "", answer):
        return f"is {answer!r:.60}, which has neither a number nor a word"
    if re.fullmatch(r"\\(?:text|mathrm|mathbf|mbox)\s*\{\s*\}", answer):
        return f"is {answer!r:.60}, which has neither a number nor a word"
    if _braces(answer) > 0:
        return "has braces that do not match"
    return None


def _literal_kind(answer: str) -> str | None:
    """Name the type of a label that is JSON or Python text with quotes: ``["34"]``, ``"34"``.

    Lists, tuples and sets of numbers are answers, and so are words in quotes.
    """
    is_number = re.fullmatch(r"""(["'])[^"']*\d[^"']*\1""", answer)
    if not is_number and not re.fullmatch(r"""[\[({].*["'].*[\])}]""", answer, re.S):
        return None
    try:
        value = ast.literal_eval(re.sub(r"\b(null|true|false)\b", "None", answer))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return type(value).__name__


def _check_dapo(label: Any, _: dict[str, Any]) -> str | None:
    if str(label).strip().lower() in _NOT_A_VALUE:
        return f"is {str(label).strip()!r}"
    if (kind := _literal_kind(str(label).strip())) and kind != "str":
        return f"is {str(label)!r:.60}, the text of a {kind}, which no response repeats"
    if not normalise_final_answer(str(label)):
        return f"is {str(label)!r:.60}, of which DAPO's normalisation leaves nothing"
    return None


def _check_gpqa(label: Any, metadata: dict[str, Any]) -> str | None:
    try:
        letters, texts = valid_choices(metadata)
    except UserError as error:
        return f"has choices in its metadata that cannot be read: {error.why}"
    if label_letter(label, letters, texts) is not None:
        words = str(label).strip()
        same = [letter for letter, text in texts.items() if str(text).strip() == words]
        if len(same) > 1 and words not in letters:
            return f"is {words!r:.60}, which is the text of the choices {' and '.join(same)}"
        return None
    among = f"none of the letters {letters[0]} to {letters[-1]}"
    return f"is {label!r:.60}, which is {among}" + (" and none of the choices" if texts else "")


def _check_remote(label: Any) -> str | None:
    try:
        json.dumps(label)
    except TypeError:
        return f"is {label!r:.60}, which cannot be sent as JSON"
    return None


_CHECKS = {
    "math": _check_math,
    "deepscaler": _check_math,
    "dapo": _check_dapo,
    "f1": lambda label, metadata: None,  # any text is fine
    "gpqa": _check_gpqa,
}
