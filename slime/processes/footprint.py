"""How much host memory processes hold for themselves: what grows when something is kept that nobody
needs.

Pages that are shared with others (weights on their way, libraries) are left out. A look costs some
20 µs a process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from slime.processes.host import free_host_memory

_GB = 1e9
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds after which the children are looked up anew; that costs a look at every process of the
#: host.
_CHILDREN_AGE = 60.0


def own_bytes(pid: int) -> int:
    """Resident memory of a process without shared pages; 0 where it is gone, or the system does not
    tell."""
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
        self._looked = 0.0

    def gigabytes(self, pid: int) -> float:
        """10⁹ bytes that they hold now; a child counts from the next look at the children on."""
        if pid != self._pid or time.monotonic() > self._looked + _CHILDREN_AGE:
            self._pid = pid
            self._looked = time.monotonic()
            try:
                self._family = [child.pid for child in psutil.Process(pid).children(recursive=True)]
            except psutil.NoSuchProcess:
                self._family = []
        return sum(map(own_bytes, [pid, *self._family])) / _GB


def of_this_host() -> dict[str, float]:
    """Measure this process alone, and what the host has left."""
    return {
        "perf/driver_memory_gb": own_bytes(os.getpid()) / _GB,
        "perf/host_free_memory_gb": free_host_memory() / _GB,
    }
