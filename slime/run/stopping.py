"""What SIGTERM, SIGHUP and Ctrl-C mean to a run, from before Ray starts until its folder is closed.

    SIGHUP               the terminal is gone, and the run goes on without it
    SIGTERM              the step under way ends, or is given up while it is generated; then what
    was trained is saved another one          nothing: `timeout` and schedulers send it to a process
    and to its group, and it is under way Ctrl-C               the same where training would be
    lost; otherwise the run is left at once another one          the run is left at once, without a
    save that is not finished SIGQUIT              the stacks of all threads are written, and the
    run is left at once once the end began   the end takes place, and faster after Ctrl-C; nothing
    may come after it

A signal that was ignored when the run began (`nohup`, a background job) stays so.

A part of the run that is stopped (SIGSTOP) may keep the driver from ever looking at a signal: a
call into Ray waits for a frozen daemon inside of C++. So a thread hears of signals, too; where
somebody ``blocks`` the end for ten seconds, it ends the program without them.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from slime import deadlines
from slime.log import get_logger
from slime.observe.output import lose_terminal

logger = get_logger(__name__)


class StopSignals:
    """The signals of a run, while used as a context manager in the main thread; in another one
    there are none.

    Attributes:
        would_lose: says what was trained and is not on the disk ("rollout 12"), "" for nothing.
        blocks: says who is in the way of an end ("pid 4711 (raylet) is stopped"), "" for nobody;
            asked by a thread.
        gives_up: called by that thread before it ends the program, with who is in the way.
        insists: there was a Ctrl-C when the run had been asked to stop before.
        hurry: set by Ctrl-C during the end.
    """

    def __init__(self) -> None:
        self.would_lose: Callable[[], str] = lambda: ""
        self.blocks: Callable[[], str] = lambda: ""
        self.gives_up: Callable[[str], None] = lambda who: None
        self.insists = False
        self.hurry = threading.Event()
        self._asked = threading.Event()
        self._pending = threading.Event()
        self._interrupted = False
        self._by = signal.SIGINT
        self._ending = False
        self._before: dict[int, Any] = {}
        self._before_pipe = -1
        self._pipe: tuple[int, int] | None = None
        """The kernel's word that a signal came, whatever the main thread does: its reading and its
        writing end."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {
                signal.SIGTERM: self._on_stop,
                signal.SIGHUP: self._on_hang_up,
                signal.SIGINT: self._on_ctrl_c,
                signal.SIGQUIT: self._on_quit,
            }
            for number, handler in handlers.items():
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = (
                        signal.SIG_DFL if before is None else before
                    )  # None: not Python's
                    signal.signal(number, handler)
            if (
                signal.SIGQUIT in self._before
            ):  # in C, also while the main thread is in a call that does not return
                faulthandler.register(
                    signal.SIGQUIT, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True
                )
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # as the writing end must be
            os.set_blocking(self._pipe[0], True)
            self._before_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(
                target=self._stand_by, name="stop", args=(self._pipe[0],), daemon=True
            ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if signal.SIGQUIT in self._before:
            faulthandler.unregister(signal.SIGQUIT)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before_pipe)
            os.close(self._pipe[1])  # the thread closes the other one

    # -- what the run asks
    # -----------------------------------------------------------------------------

    def requested(self) -> bool:
        """The run was asked to stop and has not begun to."""
        return self._pending.is_set()

    def taken_up(self) -> None:
        """The run has begun to stop, or to fail: what it waits for now is waited for."""
        self._pending.clear()

    def ending(self) -> None:
        """From now on nothing is raised here."""
        self._ending = True

    def end_program(self) -> NoReturn:
        """Exit status 0 after SIGTERM, that of the signal after Ctrl-C or SIGQUIT."""
        raise KeyboardInterrupt(self._by) if self._interrupted else SystemExit(0)

    def end_if_asked(self) -> None:
        """After the end of a run that reached its goal: what came meanwhile also stops what would
        come next."""
        if self._interrupted or self._asked.is_set():
            self.end_program()

    # -- the thread
    # ------------------------------------------------------------------------------------

    def _stand_by(self, pipe: int) -> None:
        limit = math.inf
        quits = False
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        while True:
            if poller.poll(deadlines.STOPPING_LOOK * 1000 if limit < math.inf else None):
                numbers = set(os.read(pipe, 64))
                if not numbers:  # the end of the context
                    break
                if numbers & (set(self._before) - {signal.SIGHUP}):
                    limit = min(limit, time.monotonic() + deadlines.STOPPING_BLOCKED)
                quits = quits or signal.SIGQUIT in numbers
            if time.monotonic() > limit and (
                who := self.blocks() or ("the main thread" if quits else "")
            ):
                self.gives_up(who)
                os._exit(1)
        os.close(pipe)

    # -- handlers
    # --------------------------------------------------------------------------------------

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        lose_terminal()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            return
        self._asked.set()
        if not self._ending:
            self._pending.set()
            logger.warning("%s: finishing up", signal.Signals(number).name)

    def _on_quit(self, number: int, frame: FrameType | None) -> None:
        self.insists = self._interrupted = True
        self._by = signal.SIGQUIT
        if self._ending:
            self.hurry.set()
            return
        raise KeyboardInterrupt(signal.SIGQUIT)

    def _on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        self.insists = self._interrupted or self._asked.is_set()
        self._interrupted = True
        if self._ending:
            self.hurry.set()
            return
        if not self.insists and (lost := self.would_lose()):
            self._asked.set()
            self._pending.set()
            logger.warning("Ctrl-C: %s is saved first; press it again to leave without", lost)
            return
        raise KeyboardInterrupt
