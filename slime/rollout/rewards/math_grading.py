r"""Grade mathematical answers: is the answer in a response equal to the label?

`slime.rollout.rewards.math_answers` reads both and decides; notation that it does not read (sums,
integrals, derivatives) goes to math-verify. Grading runs in separate processes (``python -m
slime.rollout.rewards.math_grading``), because math-verify may never return.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from slime.rollout.rewards.grading_worker import serve
from slime.rollout.rewards.math_answers import (
    LIMIT_BEFORE,
    LIMIT_BEHIND,
    SPELLED_NUMBER,
    Opaque,
    Words,
    read_answer,
    same_answer,
)
from slime.rollout.rewards.measures import UNSPACED
from slime.rollout.rewards.other_languages import ANSWER_IS, BOUND, BOUND_BEHIND, IS, NOT, denies
from slime.rollout.rewards.text import (
    after_thinking,
    answer_in_label,
    final_text,
    joined_boxes,
)

#: Characters at the end of a response in which its answer is searched.
_TAIL = 2000
#: A response of at most this many words is an answer as a whole.
_SHORT = 6
#: Places in the last sentence at which its answer may begin.
_MAX_CLAUSES = 8
_LONGEST_CLAUSE = 200


def grade_math(response: str, label: Any, boxed_only: bool = False) -> float:
    r"""Return 1.0 if the response's answer equals the label, else 0.0.

    The answer is the last ``\boxed{…}``; boxes joined by a comma, "and" or "or" are a list. Without
    a box (unless ``boxed_only``) it is what follows the last "answer is" or "Answer:", else what
    the last sentence states, else the last formula or number; to a label in words it is the whole
    response. Only text after ``</think>`` counts,
    and only the part of a GSM8K label after its "####". docs/rewards.md says when two answers are
    equal. An empty label or answer scores 0.

    Example:
        >>> grade_math(r"Half of it is left: \boxed{\frac{1}{2}}", "0.5")
        1.0
    """
    wanted = _answer_of(str(label))
    text = final_text(response)
    if label is None or not wanted or text is None:
        return 0.0
    boxed = joined_boxes(_BARE_BOX.sub(r"\\boxed{\1}", text))
    if boxed is not None:
        return float(_is_right(wanted, boxed))
    if boxed_only:
        return 0.0
    text = _ARROW.sub("→", _CALCULATION.sub("", text))
    return float(any(_is_right(wanted, answer) for answer in _stated(text, wanted)))


def grade_deepscaler(response: str, label: Any) -> float:
    r"""Return 1.0 if the text after the reasoning has the right answer in ``\boxed{…}``; 0.0 if
    reasoning never ended."""
    answer = after_thinking(response)
    return 0.0 if answer is None else grade_math(answer, label, boxed_only=True)


@functools.lru_cache(maxsize=1024)
def _answer_of(label: str) -> str:
    return answer_in_label(label)[0]


# -- answers in prose ------------------------------------------------------------------------------

#: A box of a number, or of a letter that ends its formula or sentence, without braces.
_BARE_BOX = re.compile(r"\\boxed\s*(-?\d(?:[\d,.]*\d)?|[A-Za-z](?=\s*(?:[$.,;:)!?\\\n]|\Z)))")
_ANCHOR = re.compile(
    r"(?i)(?:\banswer\b[^.\n:=]{0,60}?(?:\bis\b|\bare\b|\bequals\b|:|=|→)|####|"
    rf"{ANSWER_IS})(?:\*\*)?\s*[:：]?\s*"
)
_SENTENCE_END = re.compile(r"\n|[。！？]|[.!?](?=\s+[A-Z]|\s*$|\*\*)")
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$(?!\d[^$]*\s\$\d)(.+?)(?<!\\)\$|\\\((.+?)\\\)|"
    r"\\\[(.+?)\\\]",
    re.S,
)
_NUMBER = re.compile(
    rf"(?:(?<![\w.\\^_√/{{,])|(?<=[{UNSPACED}]))"
    r"(?:[-+−](?=[\d.$€£])|(?<=\s)-)?(?:\\?[$€£])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?(?: ?/ ?\d+|(?::\d+)+(?: ?[AaPp]\.?[Mm]\b)?)?(?: ?\\?%)?(?!\w*[_^√])"
)
#: A formula on lines of its own.
_DISPLAYED = re.compile(r"\$\$.+?\$\$|\\\[.+?\\\]", re.S)
_CLAUSE = re.compile(
    r"(?i)(?:→|⇒|=|≈|\bis\b|\bare\b|\bequals\b|\bgives?\b|\bget\b|\bhave\b|:(?!\d))\s*"
)
_THEREFORE = re.compile(r"(?i)\b(?:so|thus|hence|therefore|then|finally)\b,? *")
#: "Total cost: "
_HEAD = re.compile(r"^[A-Za-z]{3,}(?: [A-Za-z]{3,})*: +")
_AND = re.compile(r"\s*(?:,|;|,?\s*(?:and|or))\s*")
_REASON = re.compile(r"(?i)\s*(?:,|;|\bbecause\b|\bsince\b|\bas\b|\bnot\b|\()")
#: What denies the number behind it, or makes it the end of a range.
_DENIED = re.compile(
    r"(?i)(?:(?:\bnot|n['’]t|\bcannot|\bnever|\bneither|\bnor|\brather than|\binstead of|≠|"
    r"\\neq?\b|\bbetween(?: [^ ]{1,20} and)?)(?: be| equal| equal to| exactly| is| just)*|"
    rf"{BOUND}|{NOT} ?(?:{IS})?)[ *]*\Z"
)
_REFUTED = re.compile(
    r"(?i)\W{0,3}(?:is (?:wrong|incorrect|impossible|not (?:the|right|correct|possible|valid)\b)|"
    r"(?:does not|doesn['’]t|cannot|can['’]t) (?:work|be (?:right|correct|it|the answer))\b)|"
    rf"[^\W\d]?(?:{BOUND_BEHIND})"
)
#: Calculations that GSM8K's solutions repeat: <<2*3=6>>.
_CALCULATION = re.compile(r"<<[^<>\n]*>>")
_ARROW = re.compile(r"(?<=\s)[-=]{1,2}>")
#: A statement that says only what the answer is not.
_DENIAL = re.compile(rf"(?i)(?:\w+ly )?(?:not\b(?!.* but )|{NOT})")


def _stated(text: str, label: str) -> Iterator[str]:
    """Yield the answer of a text without a box, in one or two spellings."""
    tail = text[-_TAIL:]
    found = [
        one for one in _ANCHOR.finditer(tail) if "answer" in one[0].lower() or not denies(one[0])
    ]
    statements = (tail[one.end() :].lstrip() for one in found)
    anchors = [rest for rest in statements if not _DENIAL.match(rest)]
    is_words = isinstance(read_answer(label), Words)
    if anchors:
        rest = anchors[-1]
        displayed = _DISPLAYED.match(rest)
        end = _SENTENCE_END.search(rest, displayed.end() if displayed else 0)
        statement = (rest[: end.start()] if end else rest).strip()
        yield from _answers_in(statement, is_words)
        return
    if is_words:
        yield text.strip()
        return
    has_head = re.search(r"(?<![A-Za-z])[A-Za-z]{3,} ?[:,]", text)
    is_conclusion = has_head or _THEREFORE.search(text)
    if len(text.split()) <= _SHORT and not is_conclusion and _is_whole(text):
        yield text
    else:
        yield from _last_in(tail)


def _answers_in(statement: str, is_words: bool) -> Iterator[str]:
    if _is_whole(statement):
        yield statement
        return
    if is_words:
        yield _REASON.split(statement, maxsplit=1)[0]
        yield statement
    elif formulas := _not_denied(statement, _FORMULA):
        yield _joined(statement, formulas)
    elif numbers := _not_denied(statement, _NUMBER):
        yield _limited(statement, numbers[0].start(), numbers[0].end())


def _not_denied(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return [
        found
        for found in pattern.finditer(text)
        if not _DENIED.search(text[max(0, found.start() - 60) : found.start()])
        and not _REFUTED.match(text, found.end())
    ]


def _limited(text: str, start: int, end: int) -> str:
    """Return a part of a text with the words that make it a bound: "at least 5"."""
    before = LIMIT_BEFORE.search(text, max(0, start - 60), start)
    behind = LIMIT_BEHIND.match(text, end)
    return text[before.start() if before else start : behind.end() if behind else end].strip()


def _joined(text: str, formulas: list[re.Match[str]], from_end: bool = False) -> str:
    """Return the first (or last) formula, with its neighbours that only "and" or a comma
    separates."""
    run = [formulas[-1 if from_end else 0]]
    for formula in formulas[-2::-1] if from_end else formulas[1:]:
        left, right = (formula, run[0]) if from_end else (run[-1], formula)
        if not _AND.fullmatch(text, left.end(), right.start()):
            break
        run.insert(0 if from_end else len(run), formula)
    contents = [next(group for group in formula.groups() if group is not None) for formula in run]
    if len(run) == 1 and (limited := _limited(text, run[0].start(), run[0].end())) != run[0][0]:
        return limited
    names = {
        name[1] for content in contents if (name := re.match(r"\s*([A-Za-z]\w*)\s*=", content))
    }
    if len(names) > 1:  # x = 2 and y = 3: only one of them was asked for
        return contents[-1 if from_end else 0]
    return ", ".join(contents)


def _last_in(tail: str) -> Iterator[str]:
    formulas = _not_denied(tail, _FORMULA)
    after = tail[formulas[-1].end() :] if formulas else tail
    if formulas and not _not_denied(after, _NUMBER):
        yield _joined(tail, formulas, from_end=True)
        return
    numbers = _not_denied(after, _NUMBER)
    sentences = [part for part in _SENTENCE_END.split(after) if part.strip()]
    if sentences:
        sentence = _concluded(_HEAD.sub("", sentences[-1].strip()))
        starts = [0, *(found.end() for found in _CLAUSE.finditer(sentence))]
        for start in [start for start in starts if len(sentence) - start <= _LONGEST_CLAUSE][
            -_MAX_CLAUSES:
        ]:
            clause = sentence[start:].strip()
            is_prose = len(set(re.findall(r"[A-Za-z]{2,}", clause)) - {"and", "or"}) > 2
            if re.search(r"\d", clause) and not is_prose and _is_whole(clause):
                yield clause
                return
    words = SPELLED_NUMBER.findall(sentences[-1]) if sentences and not numbers else ()
    if words:
        yield words[-1]
    if numbers:
        yield _limited(after, numbers[-1].start(), numbers[-1].end())


def _concluded(sentence: str) -> str:
    """Return what a sentence concludes: what follows its last "so" or "therefore", if that has a
    number."""
    *before, last = _THEREFORE.split(sentence)
    return last if re.search(r"\d", last) else "".join([*before, last])


def _is_whole(statement: str) -> bool:
    """Tell whether all of a statement is one mathematical answer, without prose around it."""
    answer = read_answer(statement)
    return answer is not None and not _has_words(answer) and not _REFUTED.search(statement)


def _has_words(answer: Any) -> bool:
    if isinstance(answer, (Words, Opaque)):
        return True
    parts = (getattr(answer, name, ()) for name in ("items", "parts", "sides"))
    return any(_has_words(part) for group in parts for part in group)


# -- comparing -------------------------------------------------------------------------------------


def _is_right(label: str, answer: str) -> bool:
    verdict = same_answer(label, answer)
    return _math_verify(label, answer) if verdict is None else verdict


def _math_verify(label: str, answer: str) -> bool:
    """math-verify's verdict, without its rounding to six places: 6.6e-34 is not 1.1e-34."""
    _quiet()
    import sympy
    from math_verify import parse, verify

    golds = list(_parse(label))
    answers = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not golds or not answers or not verify(golds, answers, timeout_seconds=None):
        return False
    gold = golds[0]
    given = answers[0]
    if not isinstance(gold, sympy.Expr) or not isinstance(given, sympy.Expr) or gold == given:
        return True
    if not gold.is_number or not given.is_number:
        return True
    x = sympy.N(gold, 30)
    y = sympy.N(given, 30)
    return bool(abs(x - y) <= abs(x) * sympy.Float("1e-6"))


@functools.lru_cache(maxsize=1024)
def _parse(label: str) -> tuple[Any, ...]:
    """Return the label's expression; the samples of a group share it."""
    from math_verify import parse

    return tuple(parse(f"\\boxed{{{label}}}", parsing_timeout=None))


@functools.cache
def _quiet() -> None:
    """Silence math-verify's warning that its time-outs are off: the worker's alarm replaces
    them."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


#: Name of a grader in requests → the function.
GRADERS: dict[str, Callable[[str, Any], float]] = {
    "math": grade_math,
    "boxed_math": functools.partial(grade_math, boxed_only=True),
    "deepscaler": grade_deepscaler,
    "boxed_deepscaler": functools.partial(grade_math, boxed_only=True),
}


def _import_math_verify() -> None:
    """Import math-verify ahead of the first request; it takes 0.4 s."""
    import math_verify  # noqa: F401


if __name__ == "__main__":
    serve(GRADERS, _import_math_verify)
