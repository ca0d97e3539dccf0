"""Check labels before a launch: can the built-in graders compare a response with them at all?"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rewards.text import (
    label_letter,
    last_boxed,
    normalise_answer,
    normalise_final_answer,
    valid_choices,
)

#: A label for math is one answer. Longer text is a solution whose answer is not marked.
_MOST_WORDS = 40
_NOT_A_VALUE = frozenset({"nan", "none", "null", "n/a", "undefined label", "[invalid]"})


def check_label(rm_type: str | None, label: Any, metadata: dict[str, Any] | None = None) -> str | None:
    r"""Say why the built-in reward ``rm_type`` cannot grade a response against ``label``.

    The check takes microseconds and runs in the caller's process. Rewards that do not compare with a
    label (``remote_rm``, ``random``, ``ifbench``, names that are unknown) accept every label.

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
    check = _CHECKS.get((rm_type or "").removeprefix("boxed_"))
    if check is None:
        return None
    if label is None or (isinstance(label, float) and label != label):
        return f"is {label}"
    if isinstance(label, (list, dict)):
        return f"is a {type(label).__name__}, not text or a number"
    if isinstance(label, str) and not label.strip():
        return "is empty"
    return check(label, metadata or {})


def _check_math(label: Any, _: dict[str, Any]) -> str | None:
    text = str(label)
    answer = text.rsplit("####", 1)[-1].strip()
    if not answer:
        return "has nothing after ####"
    boxed = last_boxed(answer)
    if boxed is not None and not boxed.strip("$ "):
        return r"has an empty \boxed{}"
    answer = answer if boxed is None else boxed
    if answer.strip().lower() in _NOT_A_VALUE:
        return f"is {answer.strip()!r}"
    if not re.search(r"\w|\\(?:infty|emptyset|varnothing)|[∞∅√°%½⅓⅔¼¾]|\{\s*\\?\}", answer):
        return f"is {answer.strip()!r:.60}, which has neither a number nor a word"
    plain = answer.replace(r"\{", "").replace(r"\}", "")
    if plain.count("{") != plain.count("}"):
        return "has braces that do not match"
    words = len(answer.split())
    if boxed is None and words > _MOST_WORDS:
        return rf"is a text of {words} words in which neither #### nor \boxed{{}} marks the answer"
    return None


def _check_dapo(label: Any, _: dict[str, Any]) -> str | None:
    if str(label).strip().lower() in _NOT_A_VALUE:
        return f"is {str(label).strip()!r}"
    if not normalise_final_answer(str(label)):
        return f"is {str(label)!r:.60}, of which DAPO's normalisation leaves nothing"
    return None


def _check_f1(label: Any, _: dict[str, Any]) -> str | None:
    if not normalise_answer(str(label)):
        return f"is {str(label)!r:.60}, which has no word but articles and punctuation"
    return None


def _check_gpqa(label: Any, metadata: dict[str, Any]) -> str | None:
    letters, texts = valid_choices(metadata)
    if label_letter(label, letters, texts) is not None:
        return None
    among = f"none of the letters {letters[0]} to {letters[-1]}"
    return f"is {label!r:.60}, which is {among}" + (" and none of the choices" if texts else "")


_CHECKS = {
    "math": _check_math,
    "deepscaler": _check_math,
    "dapo": _check_dapo,
    "f1": _check_f1,
    "gpqa": _check_gpqa,
}
