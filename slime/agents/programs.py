"""Agent programs: start one, and end it and all processes it has started at the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime import deadlines
from slime.engines.keys import VARIABLE
from slime.log import get_logger

logger = get_logger(__name__)

#: Secrets of the run and of Ray: no agent needs them, and it may run code that a model wrote.
_WITHHELD = (VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Bytes of output that are read: endless output must not fill the memory of the rollout.
_MAX_OUTPUT = 16 << 20
_REAPER = Path(__file__).parents[1] / "sandbox" / "reaper.py"
#: Variables of this process that the reaper gets: enough to start Python.
_FOR_PYTHON = ("PATH", "LD_LIBRARY_PATH")
#: Programs for which a warning about left-over processes was logged.
_leaves_behind: set[str] = set()


@dataclass(frozen=True)
class Finished:
    """The outcome of a program.

    Attributes:
        status: the exit status, the negative number of the signal that ended it, or None after the
            deadline.
        output: the last 16 MiB of stdout and stderr.
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

    The program and all processes it has started, in other sessions too, are ended at the deadline,
    when the caller is cancelled, when this process dies, and once the program has ended. A small
    parent process ensures that (`slime/sandbox/reaper.py`). The log names processes that had left
    the program's process group.

    Args:
        environ: variables added to this process's own, without the keys of the run.
        timeout: seconds; None: until the caller is cancelled, as at the end of a rollout.
    Raises:
        OSError: the program cannot be started.
    """
    # a file, because a pipe stays open until every process that inherited it has ended
    with tempfile.TemporaryFile() as written:
        own = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        request = {
            "owner": os.getpid(),
            "command": [str(word) for word in command],
            "environ": own | dict(environ),
            "cwd": None if cwd is None else str(cwd),
            "output": written.fileno(),
        }
        came = await _run_under_reaper(request, timeout)
        if refused := came.get("refused"):
            raise OSError(*refused)
        written.seek(max(0, written.seek(0, os.SEEK_END) - _MAX_OUTPUT))
        return Finished(came.get("status"), written.read().decode(errors="replace"))


async def _run_under_reaper(request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    """Return the reaper's report on a program; {} if the reaper was ended before it started."""
    reaper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-s", "-E", "-B", str(_REAPER)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"LANG": "C.UTF-8"}
        | {name: os.environ[name] for name in _FOR_PYTHON if name in os.environ},
        pass_fds=[request["output"]],
        start_new_session=True,
    )
    report = asyncio.ensure_future(reaper.communicate(json.dumps(request).encode()))
    try:
        await asyncio.wait({report}, timeout=timeout)
    finally:
        if not report.done():
            with contextlib.suppress(ProcessLookupError):
                reaper.terminate()
            await asyncio.wait({report}, timeout=deadlines.PROGRAMS_TERMINATE)
        if reaper.returncode is None:  # it hangs: the kernel ends the program with it
            with contextlib.suppress(ProcessLookupError):
                reaper.kill()
            await reaper.wait()
            report.cancel()
        came = _read_report(report)
        _name(request["command"][0], came.get("left", []))
    if not came and (reaper.returncode or 0) > 0:
        raise RuntimeError(
            f"the reaper of {request['command'][0]} ended with status {reaper.returncode}"
        )
    return came


def _read_report(report: asyncio.Future[tuple[bytes, bytes]]) -> dict[str, Any]:
    text = report.result()[0] if report.done() and not report.cancelled() else b""
    return dict(json.loads(text)) if text else {}


def _name(program: str, left: list[str]) -> None:
    """Log the processes that a program had left over. The first time for each program it is a
    warning: all samples of a run start the same program."""
    if left:
        level = logging.INFO if program in _leaves_behind else logging.WARNING
        _leaves_behind.add(program)
        logger.log(level, "ended with %s, which had left them behind: %s", program, ", ".join(left))
