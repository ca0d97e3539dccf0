"""Make a process end with its parent, however the parent ended.

    die_with_parent    the kernel kills the process at once (servers, graders)
    follow_parent      the process is notified, gets a moment to clean up, and exits (embedded
                       engines, workers of the data check)
    end_within         gives cleanup a deadline before the process itself exits

The processes of a local Ray end as a tree (`slime.processes.tree`).
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
#: Loaded at import, so that a child has little to do between fork and exec.
_LIBC = ctypes.CDLL(None)

#: Set when something would keep the interpreter from exiting (`end_within`, `will_hang`).
_hangs = threading.Event()


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies; exit at once if it has died already.

    Call it in the child: first in its ``main``, or as ``subprocess.Popen(preexec_fn=…)``. For the
    kernel the parent is the *thread* that started the child, so that thread must live as long as
    its process.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def follow_parent(parent_pid: int, stop: Callable[[], object]) -> None:
    """Call ``stop`` when process ``parent_pid`` ends, and exit if this process still runs 5 seconds
    later.

    A thread waits on the parent's pidfd, and the kernel sends its parent-death signal. Since the
    kernel sends it when the *thread* that started this process ends, the handler checks that the
    parent has really ended. Call from the main thread.
    """
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        logger.warning("parent process %d is gone already", parent_pid)
        os._exit(1)
    except OSError:
        descriptor = -1  # this kernel has no pidfd: check once a second
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
    time.sleep(deadlines.OWNER_SERVER_EXIT)
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
    """Call ``end`` in a thread and wait at most ``seconds``, or 2 seconds once ``hurry`` is set.

    `ray.shutdown`, for one, waits a minute for a daemon that has died and then ends the process. A
    call that hangs stays in its thread; `leave_what_hangs` must then end the process.

    Returns:
        False if the call hangs. An exception of ``end`` is raised here.
    """
    raised: list[BaseException] = []

    def call() -> None:
        try:
            end()
        except BaseException as error:  # raised again in the caller's thread, below
            raised.append(error)

    thread = threading.Thread(target=call, name="end", daemon=True)
    thread.start()
    limit = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < limit:
        thread.join(0.1)
        if hurry.is_set():
            limit = min(limit, time.monotonic() + deadlines.OWNER_HURRIED_EXIT)
            hurry = threading.Event()
    if raised:
        raise raised[0]
    if thread.is_alive():
        _hangs.set()
        return False
    return True


def will_hang() -> None:
    """Record that something keeps the interpreter from exiting, such as W&B's service without its
    server."""
    _hangs.set()


def something_hangs() -> bool:
    return _hangs.is_set()


def leave_what_hangs(status: int) -> None:
    """Exit at once with ``status`` if something would keep the interpreter from exiting."""
    if _hangs.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
