"""What SGLang's scheduler dies of, and how it looks from outside: a token while memory is away ends
the server."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

#: Of Triton, handed the address of memory that is not mapped.
NO_MEMORY = "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"
_FALSE = ("false", "0", "no", "n")
_GENERATING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")


def generates(path: str) -> bool:
    """Whether the server generates a token to answer. By default it does so for /health as well."""
    if path == "/health":
        return (
            os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true").lower() not in _FALSE
        )
    return path in _GENERATING


def die(error: str) -> NoReturn:
    """The scheduler logs its exception and sends SIGQUIT to the server, which ends everything,
    itself included."""
    log = (
        'Scheduler hit an exception: Traceback (most recent call last):\n  File "scheduler.py", '
        f"line 1\n{error}\n"
    )
    print(
        log,
        "SIGQUIT received. It usually means one child failed.",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
