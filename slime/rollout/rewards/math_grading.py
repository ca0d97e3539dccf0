r"""Is the answer in a response mathematically equal to the label? Through math-verify, in processes of their own
(``python -m slime.rollout.rewards.math_grading``), because comparing two expressions can take for ever."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from slime.rollout.rewards.grading_worker import serve
from slime.rollout.rewards.text import after_thinking, last_boxed

#: Answers stand at the end; searching more text for expressions only costs time.
_TAIL = 2000


def grade_math(response: str, label: Any, boxed_only: bool = False) -> float:
    r"""1.0 if the response's answer equals the label, else 0.0.

    The answer is the last ``\boxed{…}``; without one (unless ``boxed_only``) what math-verify finds in the tail of the
    response: "the answer is …", the last formula, the last number. A label in the style of GSM8K counts from its
    "####" on.

    Example:
        >>> grade_math(r"Half of it is left: \boxed{\frac{1}{2}}", "0.5")
        1.0
    """
    gold = str(label).rsplit("####", 1)[-1].strip()
    gold_boxed = last_boxed(gold)
    gold = gold if gold_boxed is None else gold_boxed.strip()
    answer = last_boxed(response)
    if answer is None and boxed_only:
        return 0.0
    if answer is not None and _squeezed(answer) == _squeezed(gold):
        return 1.0
    golds = _parse_gold(gold)
    _quiet()
    from math_verify import parse, verify

    text = response[-_TAIL:] if answer is None else f"\\boxed{{{answer}}}"
    answers = parse(text, parsing_timeout=None)
    return float(bool(golds) and bool(answers) and verify(list(golds), answers, timeout_seconds=None))


def grade_deepscaler(response: str, label: Any) -> float:
    r"""1.0 if what follows the reasoning has the right answer in ``\boxed{…}``; 0.0 if reasoning never ended."""
    answer = after_thinking(response)
    return 0.0 if answer is None else grade_math(answer, label, boxed_only=True)


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    """The label's expression; the samples of a group share it."""
    _quiet()
    from math_verify import parse

    plain = gold.strip("$ ").rstrip(".")
    number = re.fullmatch(r"[-+]?[\d,]*\.?\d+", plain)
    text = plain.replace(",", "") if number else gold if "$" in gold else f"\\boxed{{{gold}}}"
    return tuple(parse(text, parsing_timeout=None))


def _squeezed(text: str) -> str:
    return re.sub(r"\s+|\$|\\[,!;]", "", text)


@functools.cache
def _quiet() -> None:
    """math-verify warns that its own time-outs are off; the worker's alarm takes their place."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


#: By the name in the request.
GRADERS: dict[str, Callable[[str, Any], float]] = {
    "math": grade_math,
    "boxed_math": functools.partial(grade_math, boxed_only=True),
    "deepscaler": grade_deepscaler,
    "boxed_deepscaler": functools.partial(grade_math, boxed_only=True),
}


def _import_math_verify() -> None:
    """Takes 0.4 s."""
    import math_verify  # noqa: F401


if __name__ == "__main__":
    serve(GRADERS, _import_math_verify)
