"""The grading process that `slime.rollout.rewards.grading_pool` starts."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from slime.errors import UserError
from slime.processes.owner import die_with_parent

#: Address space limit: 9**9**9 raises MemoryError instead of exhausting the host.
_MAX_BYTES = 4 << 30


def serve(
    graders: Mapping[str, Callable[[str, Any], float]], prepare: Callable[[], object]
) -> None:
    """Serve one JSON request per line on stdin, with one JSON answer per line on stdout.

        {"grader": "math", "response": "…", "label": "…", "deadline": 10.0}  →  {"score": 1.0}

    The kernel's alarm ends the process when a request takes longer than its deadline: sympy cannot
    be interrupted reliably in any gentler way. `slime.rollout.rewards.grading_pool` then starts
    another one. The process also ends with its parent.

    Args:
        graders: functions of response and label, by their name in the request. A `UserError` that
            they raise is returned to the caller: ``{"refused": [what, why, fix]}``.
        prepare: does slow imports, before the first deadline starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes us
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    prepare()
    answers.write(b'{"ready":true}\n')
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["deadline"])
        answer: dict[str, Any]
        try:
            answer = {"score": graders[request["grader"]](request["response"], request["label"])}
        except UserError as error:
            answer = {"refused": [error.what, error.why, error.fix]}
        except (
            ArithmeticError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            MemoryError,
            re.error,
        ) as error:
            # sympy raises most of these on malformed input: the response is wrong
            answer = {"score": 0.0, "error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(orjson.dumps(answer) + b"\n")
