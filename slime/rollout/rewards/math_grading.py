r"""Is the answer in a response mathematically equal to the label? Through math-verify, in processes of their own
(``python -m slime.rollout.rewards.math_grading``), because comparing two expressions can take for ever."""

from __future__ import annotations

import functools
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import orjson

from slime.processes import die_with_parent
from slime.rollout.rewards.text import after_thinking, last_boxed

#: Answers stand at the end; searching more text for expressions only costs time.
_TAIL = 2000
#: An expression like 9**9**9 fails with MemoryError instead of taking the machine down.
_MAX_BYTES = 4 << 30


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


# -- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """The process: one JSON request per line on stdin, one JSON answer per line on stdout.

        {"grader": "math", "response": "…", "label": "…", "deadline": 10.0}  →  {"score": 1.0}

    The kernel's alarm ends it when a request takes longer than its deadline: sympy cannot be interrupted reliably in
    any gentler way. `slime.rollout.rewards.grading_pool` then starts another one. It ends with its parent, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes us
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers

    import math_verify  # noqa: F401  (0.4 s, before the first deadline runs)

    answers.write(b'{"ready":true}\n')
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["deadline"])
        try:
            answer: dict[str, float | str] = {
                "score": GRADERS[request["grader"]](request["response"], request["label"])
            }
        except (ArithmeticError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            # sympy raises all of these on strange input: such an answer is wrong, and said so
            answer = {"score": 0.0, "error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(orjson.dumps(answer) + b"\n")


if __name__ == "__main__":
    main()
