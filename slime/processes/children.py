"""Processes that this process has started: those of one thread, when each began, and their end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from pathlib import Path

import psutil

logger = logging.getLogger("slime.processes.children")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def children_of(native: int) -> list[psutil.Process]:
    """Processes that the thread of this process with that number of the kernel's has started."""
    try:
        pids = [
            int(word) for word in Path(f"/proc/self/task/{native}/children").read_text().split()
        ]
    except OSError:  # the thread has ended, or the kernel does not tell
        return []
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def ticks() -> float:
    """Seconds on a clock that no correction of the time of day moves, in the kernel's whole
    ticks."""
    return (
        math.floor(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND) / _TICKS_PER_SECOND
    )


def began_at(pid: int) -> float:
    """When a process began, on the clock of `ticks`; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return int(fields[19]) / _TICKS_PER_SECOND  # the 22nd field, see proc_pid_stat(5)


def end_children() -> None:
    """Kill all that this process has started, with all that they have started."""
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                running.append(child)
    if killed := kill(running):
        logger.warning("processes that were left behind are ended: %s", killed)


def kill(processes: list[psutil.Process]) -> str:
    """Kill them with their descendants; says which."""
    said = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            said.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
    return ", ".join(said)
