"""The server process's ends: when the process it belongs to dies, and when it is told to stop."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from slime.log import get_logger

logger = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_GRACE = 5.0


def follow_parent(parent_pid: int, stop: Callable[[], object]) -> None:
    """Call ``stop`` when process ``parent_pid`` ends, and leave for good if that has not ended us within 5 seconds.

    Noticed in two ways: by a thread that waits on the parent's pidfd, and by the kernel's parent-death signal. The
    kernel sends that when the *thread* which started us ends, so its handler looks whether the parent is really gone.
    Call from the main thread.
    """
    try:
        descriptor = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        logger.warning("parent process %d is gone already", parent_pid)
        os._exit(1)
    except OSError:
        descriptor = -1  # no pidfd on this kernel: look once a second
    threading.Thread(target=_wait_and_leave, args=(parent_pid, descriptor, stop), name="parent", daemon=True).start()
    if sys.platform == "linux" and os.getppid() == parent_pid:
        signal.signal(signal.SIGUSR2, lambda *_: stop() if os.getppid() != parent_pid else None)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)


def _wait_and_leave(parent_pid: int, descriptor: int, stop: Callable[[], object]) -> None:
    if descriptor >= 0:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not poller.poll(60_000):
            pass
    else:
        while _is_alive(parent_pid):
            time.sleep(1.0)
    logger.warning("parent process %d ended; stopping", parent_pid)
    stop()
    time.sleep(_GRACE)
    os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
