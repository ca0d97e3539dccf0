"""Silence has an end: while nothing is heard from those who are waited for, lines say who they are
and what they do.

    training: nothing heard for 60 s from trainer-0 (pid 4711 on node-1: 29 s of CPU in 30 s),
        trainer-1 (pid 4712 on
    node-1: stopped); stopped besides: pid 4800 (python -m slime.embedded …)

A deadline ends a wait (docs/deadlines.md); long before that, somebody who looks at the terminal
wants to know.
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
    """Of one wait.

    Args:
        what: "training", for the line.
        clock: seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._last_sign: object = None
        self._begin()

    def _begin(self) -> None:
        self._since = self._clock()
        self._next = deadlines.SLOW_WAITS_QUIET
        self._cpu: dict[int, tuple[float, float]] = {}

    def look(
        self, waited_for: Sequence[Waited], sign: object = None, words: Callable[[], str] = str
    ) -> None:
        """To be called about twice a second while waiting.

        Args:
            waited_for: those who have not answered.
            sign: anything; when it has changed, something was heard.
            words: what is known besides, asked for when there is a line.
        """
        if sign != self._last_sign:
            if self._last_sign is not None:
                open_waits.heard()
            self._last_sign = sign
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
        is_odd = bool(stopped) or (
            bool(rows) and all(row.endswith((": stopped)", ": idle)")) for row in rows)
        )
        text = f"{self._what}: nothing heard for {quiet:.0f} s from {', '.join(rows)}"
        text += f"; stopped besides: {', '.join(stopped)}" if stopped else ""
        text += f"; {said}" if (said := words()) else ""
        if is_odd or quiet >= deadlines.SLOW_WAITS_STACKS:
            names = {_pid(worker): worker.name for worker in here}
            if asked := stacks.ask(pid for pid in names if pid not in stopped_parts()):
                text += f"; Python stacks: {', '.join(f'{names[pid]}.log' for pid in asked)}"
        (logger.warning if is_odd else logger.info)("%s", text)
        self._next = quiet + deadlines.SLOW_WAITS_QUIET if is_odd else 2 * quiet
        self._cpu = {}

    def _described(self, worker: Waited) -> str:
        process = worker.process
        if process is None:
            return f"{worker.name} (which has not started)"
        pid, host = process
        return f"{worker.name} (pid {pid} on {host}{self._state(pid) if _is_here(worker) else ''})"

    def _state(self, pid: int) -> str:
        """ ": stopped", ": idle", or what it has computed."""
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
    """Process id → "pid 4711 (its command)" of the run's processes on this host that are stopped
    (SIGSTOP), and so will answer nobody. Those are the descendants of this process; of a Ray that
    it has not started there are none."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_STOPPED:
                found[process.pid] = f"pid {process.pid} ({_name(process)})"
        except psutil.NoSuchProcess:
            continue
    return found


def own_actors() -> list[int]:
    """Process ids of Ray's workers on this host, idle ones included, as far as this process has
    started them."""
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
    """Its process, where that is one of this host's, and of this run."""
    return _pid(worker) if _is_here(worker) else None


def _is_here(worker: Waited) -> bool:
    """Its process is one of this host's, and of this run."""
    process = worker.process
    return process is not None and psutil.pid_exists(process[0]) and process[1] in own_addresses()


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children: an engine's actor only watches its server."""
    total = 0.0
    try:
        process = psutil.Process(pid)
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
