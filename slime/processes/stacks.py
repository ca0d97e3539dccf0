"""Python stacks of processes that hang: asked by a signal, each writes its own into its log.

SIGUSR2, which the standard library answers in C: also where Python code runs for minutes, or holds
the interpreter's lock. A process that is stopped (SIGSTOP) answers when it goes on.
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
#: Servers that actors watch write to their log, too.
_SERVERS = "slime.engines."
_MOST_FRAMES = 12
#: Its frames call users' code, and are not where that hangs.
_CALLER = f"{os.sep}slime{os.sep}user_code{os.sep}calls.py"


def answer() -> None:
    """Have this process write the stacks of its threads to stderr whenever it is asked."""
    faulthandler.register(_SIGNAL, file=sys.__stderr__ or sys.stderr, all_threads=True)


def ask(pids: Iterable[int], *, wait: bool = False) -> list[int]:
    """Ask these processes of this host, and the servers that they have started. Those that do not
    answer to the signal, and would end of it, are left alone.

    Args:
        wait: until the stacks are written, half a second.
    Returns:
        Those of ``pids`` that were asked.
    """
    asked = []
    for pid in pids:
        for each in (pid, *_servers(pid)):
            if _answers(each) and _signalled(each):
                asked += [pid] if each == pid else []
    if asked and wait:
        time.sleep(deadlines.STACKS_WRITTEN)
    return asked


def _signalled(pid: int) -> bool:
    try:
        os.kill(pid, _SIGNAL)
    # it has ended since it was looked at: whoever asks tells of a failure, and must not meet
    # another
    except OSError:
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
    """Whether a process handles the signal: by its mask in /proc, where there is one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    mask = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)


def frames_of_task(task: asyncio.Task[Any]) -> list[FrameType]:
    """Where a suspended task stands, the innermost frame last; `asyncio.Task.get_stack` tells only
    the outermost."""
    frames: list[FrameType] = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        frames += [frame] if frame is not None else []
        coroutine = getattr(coroutine, "cr_await", None)
    return frames


def stack_of_thread(thread: int) -> str:
    """`lines_of_users` of a thread of this process, by its ident; "" where it has ended."""
    frame = sys._current_frames().get(thread)
    return (
        lines_of_users([frame for frame, _ in traceback.walk_stack(frame)][::-1])
        if frame is not None
        else ""
    )


def lines_of_users(frames: list[FrameType]) -> str:
    """Where frames are, the innermost last, without those of the event loop and of what calls
    users' code."""
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    shown = [
        one
        for one in summary
        if f"{os.sep}asyncio{os.sep}" not in one.filename and not one.filename.endswith(_CALLER)
    ]
    return (
        "\n" + "".join(traceback.format_list(shown[-_MOST_FRAMES:])).rstrip("\n") if shown else ""
    )
