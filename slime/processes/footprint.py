"""Measure the host memory that processes hold for themselves, which grows when a process leaks.

Pages shared with other processes (weights during a push, libraries) do not count. Measuring costs
about 20 µs per process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from slime.processes.host import free_host_memory

_GB = 1e9
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds after which the list of children is refreshed, which reads every process of the host.
_CHILDREN_AGE = 60.0


def own_bytes(pid: int) -> int:
    """Return the resident memory of a process without shared pages; 0 if it has ended or the system
    does not report it."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return max(0, int(resident) - int(shared)) * _PAGE


class Footprint:
    """Memory of a process and its descendants."""

    def __init__(self) -> None:
        self._pid = 0
        self._family: list[int] = []
        self._refreshed = 0.0

    def gigabytes(self, pid: int) -> float:
        """Return the gigabytes (10⁹ bytes) held by process ``pid`` and its descendants. A new child
        counts once the list of children is refreshed."""
        if pid != self._pid or time.monotonic() > self._refreshed + _CHILDREN_AGE:
            self._pid = pid
            self._refreshed = time.monotonic()
            try:
                self._family = [child.pid for child in psutil.Process(pid).children(recursive=True)]
            except psutil.NoSuchProcess:
                self._family = []
        return sum(map(own_bytes, [pid, *self._family])) / _GB


def of_this_host() -> dict[str, float]:
    """Return metrics of this process's own memory (without children) and the host's free memory."""
    return {
        "perf/driver_memory_gb": own_bytes(os.getpid()) / _GB,
        "perf/host_free_memory_gb": free_host_memory() / _GB,
    }
