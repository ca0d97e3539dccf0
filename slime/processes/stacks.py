"""Have hanging processes write their Python stacks into their logs, on SIGUSR2.

`faulthandler` answers the signal in C, so this works while Python code runs for minutes or holds
the interpreter's lock. A stopped process (SIGSTOP) answers once it is continued.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from slime import deadlines

_SIGNAL = signal.SIGUSR2
#: A child of an actor with this in its command line is an engine's server, which is asked too.
_SERVERS = "slime.engines."
_MAX_FRAMES = 12
#: Frames of this file call users' code; they are left out of stacks of users' code that hangs.
_CALLER = f"{os.sep}slime{os.sep}user_code{os.sep}calls.py"


def answer() -> None:
    """Make this process write the stacks of all its threads to stderr on SIGUSR2."""
    faulthandler.register(_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=True)


def ask(pids: Iterable[int], *, wait: bool = False) -> list[int]:
    """Ask processes of this host, and engine servers that they have started, for their stacks.
    Processes without a handler, which the signal would kill, are left alone.

    Args:
        wait: wait half a second, until the stacks are written.
    Returns:
        The ``pids`` that were asked.
    """
    asked = []
    for pid in pids:
        for each in (pid, *_servers(pid)):
            if _answers(each) and _signalled(each):
                asked += [pid] if each == pid else []
    if asked and wait:
        time.sleep(deadlines.STACKS_DUMP)
    return asked


def _signalled(pid: int) -> bool:
    try:
        os.kill(pid, _SIGNAL)
    except OSError:  # it has ended: the caller is reporting a failure and must not get another
        return False
    return True


def _servers(pid: int) -> list[int]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in children if any(_SERVERS in word for word in _words_of(child))]


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # a zombie among the others
        return []


def _answers(pid: int) -> bool:
    """Return whether a process handles the signal, by its mask in /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    mask = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)


def frames_of_task(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return all frames of a suspended task, the innermost last; `asyncio.Task.get_stack` returns
    only the outermost."""
    frames: list[FrameType] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        frames += [frame] if frame is not None else []
        coroutine = getattr(coroutine, "cr_await", None)
    return frames


def stack_of_thread(thread: int) -> str:
    """Return the stack of a thread of this process as `lines_of_users` formats it; "" if the thread
    has ended.

    Args:
        thread: its `threading.Thread.ident`.
    """
    frame = sys._current_frames().get(thread)
    if frame is not None:
        return lines_of_users([frame for frame, _ in traceback.walk_stack(frame)][::-1])
    return ""


def lines_of_users(frames: list[FrameType]) -> str:
    """Format frames, the innermost last, without frames of the event loop and of our code that
    calls users' functions."""
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    shown = [
        one
        for one in summary
        if f"{os.sep}asyncio{os.sep}" not in one.filename and not one.filename.endswith(_CALLER)
    ]
    return "\n" + "".join(traceback.format_list(shown[-_MAX_FRAMES:])).rstrip("\n") if shown else ""
