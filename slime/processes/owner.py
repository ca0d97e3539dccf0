"""How a process ends with the one that it belongs to, however that one ended.

    die_with_parent    the kernel kills it at once: servers, graders
    follow_parent      it is told, has a moment to end tidily, and leaves: embedded engines,
                       workers of the data check
    end_within         the other way round: what has a deadline to end, before its owner leaves

What a local Ray starts ends as a whole (`slime.processes.tree`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from slime import deadlines

logger = logging.getLogger("slime.processes.owner")

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(
    None
)  # loaded once: between fork and exec of a child there should be little to do

#: Something here did not end in time (`end_within`, `will_hang`), and would keep the interpreter
#: from ending, too.
_hangs = threading.Event()


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies, and end it now should that have
    happened already.

    To be called in the child: first thing in its ``main``, or by
    ``subprocess.Popen(preexec_fn=…)``. The kernel means the *thread* that started the child: it
    must be one that lives as long as its process.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def follow_parent(parent_pid: int, stop: Callable[[], object]) -> None:
    """Call ``stop`` when process ``parent_pid`` ends, and leave for good if that has not ended us
    within 5 seconds.

    Noticed in two ways: by a thread that waits on the parent's pidfd, and by the kernel's
    parent-death signal. The kernel sends that when the *thread* which started us ends, so its
    handler looks whether the parent is really gone. Call from the main thread.
    """
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        logger.warning("parent process %d is gone already", parent_pid)
        os._exit(1)
    except OSError:
        descriptor = -1  # no pidfd on this kernel: look once a second
    threading.Thread(
        target=_wait_and_leave, args=(parent_pid, descriptor, stop), name="parent", daemon=True
    ).start()
    if os.getppid() == parent_pid:
        signal.signal(signal.SIGUSR2, lambda *_: stop() if os.getppid() != parent_pid else None)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)


def _wait_and_leave(parent_pid: int, descriptor: int, stop: Callable[[], object]) -> None:
    if descriptor >= 0:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not poller.poll(60_000):
            pass
    else:
        while _exists(parent_pid):
            time.sleep(1.0)
    logger.warning("parent process %d ended; stopping", parent_pid)
    stop()
    time.sleep(deadlines.OWNER_LEAVE)
    os._exit(1)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_within(seconds: float, end: Callable[[], object], hurry: threading.Event) -> bool:
    """Call ``end``, and wait for it so long at most, or 2 seconds from when somebody is in a
    ``hurry``.

    Ray waits a minute for a daemon of its own that is gone, and then ends the process in which it
    is. A call that hangs is left behind in its thread; whoever knows the exit status is to call
    `leave_what_hangs`.

    Returns:
        False when it hangs. What it raises in time is raised here.
    """
    raised: list[BaseException] = []

    def call() -> None:
        try:
            end()
        except BaseException as error:  # raised again below, where someone listens
            raised.append(error)

    thread = threading.Thread(target=call, name="end", daemon=True)
    thread.start()
    limit = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < limit:
        thread.join(0.1)
        if hurry.is_set():
            limit = min(limit, time.monotonic() + deadlines.OWNER_HURRY)
            hurry = threading.Event()
    if raised:
        raise raised[0]
    if thread.is_alive():
        _hangs.set()
        return False
    return True


def will_hang() -> None:
    """Something was started here that keeps the interpreter from ending: W&B's service without its
    server, for one."""
    _hangs.set()


def something_hangs() -> bool:
    return _hangs.is_set()


def leave_what_hangs(status: int) -> None:
    """End this process at once, should something have been left behind in it."""
    if _hangs.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
