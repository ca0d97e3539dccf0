"""Ends what a killed driver leaves behind.

A local Ray shares its driver's fate, but after `kill -9` of the driver some of its agents were seen to live on, and
whatever they hold with them. So the driver starts this small process beside itself: it keeps a list of the driver's
descendants and, when the driver is gone, ends those that are not. Standard library only; reads /proc.

    driver ──pipe──► reaper            the pipe's end of file is the driver's death, however it came

Killed trainers leave their blocks of shared memory, which go last.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_SCAN_SECONDS = 1.0
_GRACE_SECONDS = 3.0  # Ray's own clean-up gets this long


def start_reaper() -> subprocess.Popen[bytes]:
    """Start the reaper of this process. Keep the returned object: its pipe is the sign of life."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not end it before the driver
        close_fds=True,
    )


def _processes() -> dict[int, tuple[int, str]]:
    """pid → (parent pid, start time) of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue  # ended while we looked
            found[int(name)] = (int(fields[1]), fields[19])
    return found


def _add_descendants(root: int, known: dict[int, str]) -> None:
    """Add the descendants of ``root``, and of everything known, to ``known`` (pid → start time)."""
    processes = _processes()
    roots = {root} | {pid for pid, start in known.items() if pid in processes and processes[pid][1] == start}
    grew = True
    while grew:
        grew = False
        for pid, (parent, start) in processes.items():
            if parent in roots and pid not in roots and pid != os.getpid():
                roots.add(pid)
                known[pid] = start
                grew = True


def main() -> None:
    driver = int(sys.argv[1])
    known: dict[int, str] = {}
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _SCAN_SECONDS)
        if readable:  # nothing is ever written: readable means closed
            break
        _add_descendants(driver, known)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and _alive(known):
        _add_descendants(driver, known)
        time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        _add_descendants(driver, known)
        for pid in _alive(known):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        end = time.monotonic() + 1.0
        while time.monotonic() < end and _alive(known):
            time.sleep(0.05)
    sys.path.insert(0, str(Path(__file__).parents[2]))  # -S and -E leave nothing but the standard library
    from slime.engines.wire.shared_memory import remove_stale

    remove_stale()


def _alive(known: dict[int, str]) -> list[int]:
    processes = _processes()
    return [pid for pid, start in known.items() if processes.get(pid, (0, ""))[1] == start]


if __name__ == "__main__":
    main()
