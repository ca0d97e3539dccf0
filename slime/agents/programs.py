"""Agents that are programs of their own: started, given a deadline, and ended with all that they
have started."""

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

#: Secrets of the run and of Ray: no agent needs them, and an agent may run code of a model.
_WITHHELD = (VARIABLE, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: Bytes of output: a program that writes without end must not fill the memory of the rollout.
_MOST_OUTPUT = 16 << 20
_REAPER = Path(__file__).parents[1] / "sandbox" / "reaper.py"
#: Variables of this process that the reaper gets: enough to start Python.
_FOR_PYTHON = ("PATH", "LD_LIBRARY_PATH")
#: Programs whose processes that were left behind were warned of.
_leaves_behind: set[str] = set()


@dataclass(frozen=True)
class Finished:
    """The outcome of a program.

    Attributes:
        status: its exit status, the negative number of the signal that ended it, or None after its
            deadline.
        output: what it wrote, errors included; the last 16 MiB of it.
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

    It is ended with all that it has started, in sessions of their own too: when the deadline has
    passed, when the caller is cancelled, when this process dies, and in any case once the program
    has ended. A small process between them sees to that (`slime/sandbox/reaper.py`); what had left
    the program's process group is named in the log.

    Args:
        environ: variables beside this process's own, without the keys of the run.
        timeout: seconds; None: until the caller is cancelled, as at the end of a rollout.
    Raises:
        OSError: it cannot be started.
    """
    # a pipe would be read until all that inherited it has ended
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
        written.seek(max(0, written.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        return Finished(came.get("status"), written.read().decode(errors="replace"))


async def _run_under_reaper(request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    """Return the reaper's report on a program; {} if it was ended before the program started."""
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
    """Log what a program had left behind. It is a warning once for each program, because all
    samples of a run start the same one."""
    if left:
        level = logging.INFO if program in _leaves_behind else logging.WARNING
        _leaves_behind.add(program)
        logger.log(level, "ended with %s, which had left them behind: %s", program, ", ".join(left))
