"""Graders that compare text: quick, no process needed. All are functions of the response and the label."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` (or ``\fbox``) with balanced braces, None without one.

    Example:
        >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


def after_thinking(text: str) -> str | None:
    """What follows the reasoning (``</think>`` or ``###Response``); None when it was never closed."""
    for marker in ("</think>", "###Response"):
        if marker in text:
            return text.rsplit(marker, 1)[1]
    return None


# -- F1 --------------------------------------------------------------------------------------------------------------


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus blanks (SQuAD, arXiv:1606.05250)."""
    text = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def grade_f1(response: str, label: Any) -> float:
    """Token F1 of response and label after normalisation.

    Example (2 of 3 words are right, 2 of 2 are found):
        >>> grade_f1("The big red dog", "red dog")
        0.8
    """
    return f1_of_words(response, label)[0]


def f1_of_words(response: str, label: Any) -> tuple[float, float, float]:
    """`grade_f1` with the precision and the recall that it is made of."""
    predicted, wanted = normalise_answer(response).split(), normalise_answer(str(label)).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if not predicted or not wanted:
        same = float(predicted == wanted)
        return same, same, same
    return 2 * common / (len(predicted) + len(wanted)), common / len(predicted), common / len(wanted)


# -- DAPO ------------------------------------------------------------------------------------------------------------

#: Where DAPO's answers stand.
ANSWER_LINE = r"(?i)Answer\s*:\s*([^\n]+)"
_DAPO_UNITS = re.compile(
    r"\b(square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|"
    r"meters|meals|edges|students|childrentickets|multiples)\b"
)


def normalise_final_answer(answer: str) -> str:
    r"""An answer in the plain form of Minerva (arXiv:2206.14858, appendix D): no units, text, dollar signs, commas.

    Example:
        >>> normalise_final_answer(r"x = \$1,000 \text{ dollars}")
        '1000'
    """
    answer = answer.split("=")[-1]
    for old, new in ((r"\%", ""), ("%", ""), (r"\$", ""), (r"\ ", ""), (r"\!", ""), ("\\\\", "\\")):
        answer = answer.replace(old, new)
    math = re.search(r"\$(.*?)\$", answer)
    answer = math[1] if math else answer
    answer = re.sub(r"\\text\{\s*(?:and|or)?\s*\}", ",", answer)
    answer = re.sub(r"\\(?:text|mathrm|textbf)\{(.*?)\}", lambda m: _DAPO_UNITS.sub("", m[1]), answer)
    answer = re.sub(r"\\overline\{(.*?)\}", r"\1", answer)
    boxed = last_boxed(answer)
    answer = _DAPO_UNITS.sub("", answer if boxed is None else boxed)
    answer = re.sub(r"\\?frac([^{\s\\])([^{\s\\])", r"frac{\1}{\2}", answer.replace(r"\frac", "frac"))
    answer = re.sub(r"sqrt([^{\s\\])", r"sqrt{\1}", answer).replace("$", "").strip().rstrip(".")
    answer = re.sub(r"\s+", "", answer)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)


def grade_dapo(response: str, label: Any) -> dict[str, Any]:
    """Score ±1 by the last "Answer: …" line within the last 300 characters (DAPO, arXiv:2503.14476).

    Returns:
        ``{"score": 1.0 | -1.0, "acc": bool, "pred": str}``; train on it with ``--reward-key score``.

    Example:
        >>> grade_dapo("We get\\nAnswer: $42$", "42")
        {'score': 1.0, 'acc': True, 'pred': '42'}
    """
    right, predicted = final_answer(response[-300:], label)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": predicted}


def final_answer(response: str, label: Any, pattern: str = ANSWER_LINE) -> tuple[bool, str]:
    """Whether the last match of ``pattern`` is the label, both in Minerva's form, and what it is."""
    found = re.findall(pattern, response)
    predicted = normalise_final_answer(found[-1]) if found else "[INVALID]"
    return bool(found) and predicted == normalise_final_answer(str(label)), predicted


# -- multiple choice -------------------------------------------------------------------------------------------------

#: Where a row does not say which letters its choices have.
_LETTERS = "ABCDEFGHIJ"
#: Wrappers of LaTeX that change the font of a choice and nothing else.
_FONTS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textup|mathrm|mathbf|mathit|mathsf|mathtt|mathcal|mathbb|bm|"
    r"boldsymbol|bold|mbox|hbox|operatorname|emph|underline|displaystyle|rm|bf|it)\b\s*\*?"
)
#: What may stand around a letter: blanks, quotes, Markdown, dollars, brackets.
_AROUND = " \t\n$*_`'\"“”‘’"
_OPEN = r"[\s*_`$\"'“‘({\[\\]*"
#: "is B", "is therefore option B": the words between the phrase and the letter.
_FILLER = (
    r"(?:\s*(?:is|are|be|would|should|must|will|:|=|-+>|→|⇒|therefore|thus|hence|clearly|definitely|most|likely|probably|"
    r"simply|indeed|the|correct|right|best|final|answer|choice|option|letter|to|this|question|number)\b|\s*[:=→⇒])*"
)


def grade_gpqa(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1 if the letter chosen in the response is the right one.

    ``label`` is a letter, or the text or position of one of ``metadata["choices"]`` (a list, or a dict by letter);
    ``metadata["valid_letters"]`` limits the letters, A to J (or those of the choices) by default.

    Example:
        >>> grade_gpqa("Not A. The answer is (C).", "C")
        1.0
    """
    letters, texts = valid_choices(metadata)
    wanted = label_letter(label, letters, texts)
    return float(wanted is not None and _chosen_letter(response, letters, texts) == wanted)


def valid_choices(metadata: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Letters that may be chosen, and the texts of the choices by letter ({} where a row has none)."""
    metadata = metadata or {}
    choices = metadata.get("choices") or []
    texts = dict(choices) if isinstance(choices, dict) else dict(zip(string.ascii_uppercase, choices))
    texts = {str(letter).upper(): text for letter, text in texts.items()}
    letters = metadata.get("valid_letters") or texts or _LETTERS
    return [str(letter).upper() for letter in letters], texts


def label_letter(label: Any, letters: list[str], texts: dict[str, Any]) -> str | None:
    """The letter that a label means: itself, a position in ``letters``, or the choice with this text."""
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    return _letter_of(str(label), letters, texts)


def _letter_of(text: str, letters: list[str], texts: dict[str, Any]) -> str | None:
    text = text.strip()
    if text.strip("(). ").upper() in letters:
        return text.strip("(). ").upper()
    return next((k for k, choice in texts.items() if normalise_answer(str(choice)) == normalise_answer(text)), None)


def _chosen_letter(response: str, letters: list[str], texts: dict[str, Any]) -> str | None:
    text = after_thinking(response) or response
    boxed = last_boxed(text)
    if boxed is not None:
        inner = re.sub(r"\\(?:text|mathrm|textbf)\{(.*?)\}", r"\1", boxed)
        return _letter_of(inner, letters, texts)
    group = "([" + "".join(map(re.escape, letters)) + "])"
    for pattern in (rf"(?i)answer\s*(?:is|:)?\s*[:*]*\s*[(*]*{group}\b", rf"\({group}\)", rf"\b{group}\b"):
        found = re.findall(pattern, text)
        if found:
            return found[-1].upper()
    return None
