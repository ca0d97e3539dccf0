"""End a tree of processes as a whole, including processes that leave it by a new session or a
double fork.

    driver ─► this file as a script, twice ─► raylet ─► agents, workers, engines, and whatever
                                                        users' functions start

The script starts one command. It ends everything that the command started when the command ends, on
SIGTERM, or when the driver has ended for any reason. The kernel makes it the parent of each process
of the tree that loses its own (PR_SET_CHILD_SUBREAPER), so it needs no list of them.

Only the standard library is imported, and nothing of slime: this file runs as a script without
site-packages, and scripts that must start in a few milliseconds import it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

_END_SECONDS = 5.0
_LOOK_SECONDS = 0.2
#: Ray kills the raylet a second after it has asked it to end.
_GRACE_SECONDS = 0.8
_LAST_COMMAND_SECONDS = 30.0
_PDEATHSIG = 1
_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_SEARCHED = not os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    _LIBC.prctl(_SUBREAPER, 1)


def descendants() -> list[int]:
    """Return the ids of all descendants of this process.

    Where the kernel does not list the children of a process, all of /proc is searched.
    """
    children = _children_by_parent() if _SEARCHED else None
    found = []
    to_visit = [os.getpid()]
    while to_visit:
        pid = to_visit.pop()
        new = children.get(pid, []) if children is not None else _children_of(pid)
        found += new
        to_visit += new
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                found += map(int, children.read().split())
    except OSError:
        pass  # it ended meanwhile
    return found


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found.setdefault(parent, []).append(int(pid))
    return found


def has_ended(child: int) -> bool:
    """Return whether a child has ended; reap all other children that have.

    The child itself stays a zombie, so that its process id is not reused.
    """
    while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if found.si_pid == child:
            return True
        os.waitpid(found.si_pid, 0)
    return False


def end_all() -> None:
    """Kill all descendants. They are stopped first, so that none forks while others are killed."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in descendants():
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


# -- the script ------------------------------------------------------------------------------------


def hold(owner: int, command: Sequence[str], last_command: Sequence[str]) -> int:
    """Run ``command`` until it ends, SIGTERM arrives, or process ``owner``, our parent, has ended;
    then end everything it started.

    Two processes do this, parent and child. If one of them is killed, the other one cleans up.

    Args:
        last_command: run if the owner has ended, to remove what is left other than processes.
    Returns:
        The exit status of ``command``; 1 if it did not end by itself.
    """
    import subprocess

    adopt_orphans()
    # Ray has the kernel kill its daemons with the driver; this one must then clean up.
    _LIBC.prctl(_PDEATHSIG, 0)
    if os.getppid() != owner:
        return 1
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # sigtimedwait receives them
    outer = os.getpid()
    inner = os.fork()
    if inner:
        status = _watch(owner, inner, _GRACE_SECONDS + _LOOK_SECONDS / 2)
        if os.getppid() != owner:
            subprocess.run(
                last_command, stdin=subprocess.DEVNULL, timeout=_LAST_COMMAND_SECONDS, check=False
            )
        return status
    adopt_orphans()  # a fork does not inherit this
    own = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    os._exit(_watch(outer, child.pid, _GRACE_SECONDS))


def _watch(owner: int, child: int, grace: float) -> int:
    """Wait for the child, the owner or a signal, end everything, and return the child's status."""
    limit = float("inf")
    while not (ended := has_ended(child)) and os.getppid() == owner and time.monotonic() < limit:
        received = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
        if received is not None and received.si_signo == signal.SIGTERM:
            if limit < float("inf"):
                break  # asked twice: end at once
            limit = time.monotonic() + grace
            os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if ended else 1
    end_all()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(hold(**json.load(sys.stdin)))
