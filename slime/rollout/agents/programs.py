"""Agents that are programs of their own: started, given a deadline, and ended with all that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime.engines.keys import VARIABLE
from slime.processes import die_with_parent

#: Of the run and of Ray: no agent needs them, and it may run code that a model wrote.
_WITHHELD = (VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Bytes of output: a program that writes without end must not fill the memory of the rollout.
_MOST_OUTPUT = 16 << 20


@dataclass(frozen=True)
class Finished:
    """What came of a program.

    Attributes:
        status: its exit status, the negative number of the signal that ended it, or None after its deadline.
        output: what it wrote, errors included; of more than 16 MiB the end.
    """

    status: int | None
    output: str


async def run_program(
    command: Sequence[str | Path],
    environ: Mapping[str, str],
    *,
    timeout: float | None = None,
    cwd: str | Path | None = None,
) -> Finished:
    """Run a program to its end.

    It leads a process group, which is killed when the deadline has passed, when the caller is cancelled, and in any
    case once the program has ended; and it dies with this process.

    Args:
        environ: added to this process's own, less the keys of the run.
        timeout: seconds; None: until the caller is cancelled, as at the end of a rollout.
    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as written:  # a pipe would be read until all that inherited it has ended
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            env={name: value for name, value in os.environ.items() if name not in _WITHHELD} | dict(environ),
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=written,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        status: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        written.seek(max(0, written.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        return Finished(status, written.read().decode(errors="replace"))
