"""Log lines about long waits: which actors are waited for, and what they do.

    training: nothing heard for 60 s from trainer-0 (pid 4711 on node-1: 29 s of CPU in 30 s),
        trainer-1 (pid 4712 on node-1: stopped); stopped besides: pid 4800 (python -m
        slime.embedded …)

A deadline ends a wait (docs/deadlines.md), but a user at the terminal wants to know much earlier.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from slime import deadlines
from slime.cluster import open_waits
from slime.log import get_logger
from slime.processes import stacks
from slime.processes.host import own_addresses

logger = get_logger(__name__)

_NAME_LENGTH = 70


class Waited(Protocol):
    """An actor that is waited for (`slime.cluster.waiting.NamedActor`)."""

    @property
    def name(self) -> str: ...

    @property
    def process(self) -> tuple[int, str] | None:
        """Process id and host; None while they are not known."""


class SlowWaitLogger:
    """Logs the actors that are waited for while a wait makes no progress.

    Args:
        what: "training", for the line.
        clock: seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._last_state: object = None
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock()
        self._next = deadlines.SLOW_WAITS_LINE
        self._cpu: dict[int, tuple[float, float]] = {}

    def poll(
        self, waited_for: Sequence[Waited], state: object = None, details: Callable[[], str] = str
    ) -> None:
        """Log a line if it is due. Call this about twice a second while waiting.

        Args:
            waited_for: actors that have not answered.
            state: any value that changes with progress.
            details: returns more to say, called only for a line.
        """
        if state != self._last_state:
            if self._last_state is not None:
                open_waits.note_progress()
            self._last_state = state
            self._begin()
        quiet = self._clock() - self._since
        here = [worker for worker in waited_for if _is_here(worker)]
        if quiet >= self._next / 2 and not self._cpu:
            self._cpu = {
                _pid(worker): (self._clock(), _cpu_seconds(_pid(worker))) for worker in here
            }
        if quiet < self._next:
            return
        rows = [self._described(worker) for worker in waited_for]
        own = {_pid(worker) for worker in here}
        stopped = [row for pid, row in stopped_parts().items() if pid not in own]
        is_suspicious = bool(stopped) or (
            bool(rows) and all(row.endswith((": stopped)", ": idle)")) for row in rows)
        )
        text = f"{self._what}: nothing heard for {quiet:.0f} s from {', '.join(rows)}"
        text += f"; stopped besides: {', '.join(stopped)}" if stopped else ""
        text += f"; {more}" if (more := details()) else ""
        if is_suspicious or quiet >= deadlines.SLOW_WAITS_STACKS:
            names = {_pid(worker): worker.name for worker in here}
            if asked := stacks.ask(pid for pid in names if pid not in stopped_parts()):
                text += f"; Python stacks: {', '.join(f'{names[pid]}.log' for pid in asked)}"
        (logger.warning if is_suspicious else logger.info)("%s", text)
        self._next = quiet + deadlines.SLOW_WAITS_LINE if is_suspicious else 2 * quiet
        self._cpu = {}

    def _described(self, worker: Waited) -> str:
        process = worker.process
        if process is None:
            return f"{worker.name} (which has not started)"
        pid, host = process
        return f"{worker.name} (pid {pid} on {host}{self._state(pid) if _is_here(worker) else ''})"

    def _state(self, pid: int) -> str:
        """Return ": stopped", ": idle", or its CPU time."""
        try:
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                return ": stopped"
        except psutil.NoSuchProcess:
            return ": gone"
        began, before = self._cpu.get(pid, (self._clock(), 0.0))
        used = _cpu_seconds(pid) - before
        seconds = self._clock() - began
        if seconds <= 0:
            return ""
        return ": idle" if used < 0.01 * seconds else f": {used:.0f} s of CPU in {seconds:.0f} s"


def stopped_parts() -> dict[int, str]:
    """Return process id → "pid 4711 (its command)" of the stopped (SIGSTOP) descendants of this
    process. Processes of a Ray that it did not start are not descendants.
    """
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_STOPPED:
                found[process.pid] = f"pid {process.pid} ({_name(process)})"
        except psutil.NoSuchProcess:
            continue
    return found


def own_actors() -> list[int]:
    """Return the process ids of Ray's workers among the descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            if (process.cmdline() or [""])[0].startswith("ray::"):
                found.append(process.pid)
    return found


def _name(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    line = " ".join([os.path.basename(words[0]), *words[1:]])
    return line if len(line) <= _NAME_LENGTH else f"{line[: _NAME_LENGTH - 2]} …"


def _pid(worker: Waited) -> int:
    assert worker.process is not None
    return worker.process[0]


def pid_here(worker: Waited) -> int | None:
    """Return the process id of an actor that runs on this host, else None."""
    return _pid(worker) if _is_here(worker) else None


def _is_here(worker: Waited) -> bool:
    process = worker.process
    return process is not None and psutil.pid_exists(process[0]) and process[1] in own_addresses()


def _cpu_seconds(pid: int) -> float:
    total = 0.0
    try:
        process = psutil.Process(pid)
        # an engine's actor only watches its server, a child
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for one in family:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
