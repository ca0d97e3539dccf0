"""A grading process: one JSON request per line on stdin, one JSON answer per line on stdout.

    {"grader": "math", "response": "…", "label": "…", "deadline": 10.0}  →  {"score": 1.0}

The kernel's alarm ends the process when a request takes longer than its deadline: sympy cannot be interrupted
reliably in any gentler way. The pool then starts another one. The process ends with its parent, too.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

import orjson

from slime.processes import die_with_parent

#: An expression like 9**9**9 fails with MemoryError instead of taking the machine down.
_MAX_BYTES = 4 << 30


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes us
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers

    import math_verify  # noqa: F401  (0.4 s, before the first deadline runs)

    from slime.rollout.rewards.math_grading import GRADERS

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
