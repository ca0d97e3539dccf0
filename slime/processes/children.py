"""Child processes: list the children of one thread, find out when a process started and whether it
compiles, and kill children that were left behind."""

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


#: Programs that compile kernels at run time: FlashInfer's and torch's extensions take minutes.
_COMPILERS = frozenset({"nvcc", "cicc", "cudafe++", "ptxas", "cc1plus"})


def compiles(pid: int) -> bool:
    """Tell whether a compiler runs among the descendants of a process."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if child.name() in _COMPILERS:
                    return True
    return False


def children_of(native: int) -> list[psutil.Process]:
    """Return the processes that one thread of this process has started.

    Args:
        native: the kernel's id of the thread (`threading.Thread.native_id`).
    """
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
    """Return the seconds since boot, rounded down to whole ticks of the kernel; setting the system
    time does not change them."""
    return (
        math.floor(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND) / _TICKS_PER_SECOND
    )


def began_at(pid: int) -> float:
    """Return when a process started, on the clock of `ticks`; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return int(fields[19]) / _TICKS_PER_SECOND  # the 22nd field, see proc_pid_stat(5)


def end_children() -> None:
    """Kill all descendants of this process."""
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                running.append(child)
    if killed := kill(running):
        logger.warning("processes that were left behind are ended: %s", killed)


def kill(processes: list[psutil.Process]) -> str:
    """Kill the processes and their descendants; return a list of them for a message."""
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            killed.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
    return ", ".join(killed)
