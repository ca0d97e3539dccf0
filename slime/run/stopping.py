"""Signals of a run, from before Ray starts until its folder is closed.

    SIGHUP               the terminal was closed: continue without it
    SIGTERM              finish the current step, or abandon it while it is generated; then save
      another one        nothing: `timeout` and schedulers signal both a process and its group
    Ctrl-C               like SIGTERM if training would be lost, else leave at once
      another one        leave at once, without a save that is not finished
    SIGQUIT              write the stacks of all threads, and leave at once
    once the end began   finish ending, faster after Ctrl-C; nothing may start after it

A signal that was ignored when the run began (`nohup`, a background job) stays ignored.

A stopped process (SIGSTOP) may keep the driver from handling a signal, because a call into Ray
waits for it inside C++. So a thread receives signals, too, and ends the program if something blocks
the end for ten seconds.
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
    """Context manager that handles the signals of a run; in another than the main thread it does
    nothing.

    Attributes:
        unsaved_work: returns trained work that is not on disk ("rollout 12"), or "".
        what_blocks_exit: returns what keeps the run from ending ("pid 4711 (raylet) is stopped"),
            or ""; called by a thread.
        before_forced_exit: called by that thread with the blocker's name, before it ends the
            program.
        insists: Ctrl-C was pressed after the run had been asked to stop.
        hurry: set by Ctrl-C during the end.
    """

    def __init__(self) -> None:
        self.unsaved_work: Callable[[], str] = lambda: ""
        self.what_blocks_exit: Callable[[], str] = lambda: ""
        self.before_forced_exit: Callable[[str], None] = lambda who: None
        self.insists = False
        self.hurry = threading.Event()
        self._asked = threading.Event()
        self._pending = threading.Event()
        self._interrupted = False
        self._by = signal.SIGINT
        self._ending = False
        self._leaves = False
        self._before: dict[int, Any] = {}
        self._before_pipe = -1
        # reading and writing end; Python writes each signal's number at once
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            handlers = {
                signal.SIGTERM: self._on_stop,
                signal.SIGHUP: self._on_sighup,
                signal.SIGINT: self._on_ctrl_c,
                signal.SIGQUIT: self._on_quit,
            }
            for number, handler in handlers.items():
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    # None: the handler was not installed by Python
                    self._before[number] = signal.SIG_DFL if before is None else before
                    signal.signal(number, handler)
            if signal.SIGQUIT in self._before:  # works in C, also while the main thread is stuck
                faulthandler.register(
                    signal.SIGQUIT, file=sys.__stderr__ or sys.stderr, all_threads=True, chain=True
                )
            self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # as the writing end must be
            os.set_blocking(self._pipe[0], True)
            self._before_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(
                target=self._watch_signals, name="stop", args=(self._pipe[0],), daemon=True
            ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if signal.SIGQUIT in self._before:
            faulthandler.unregister(signal.SIGQUIT)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._leaves and signal.SIGTERM in self._before:
            # a second one, to the group, may come while the interpreter exits; the status must stay
            # 0
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before_pipe)
            os.close(self._pipe[1])  # the thread closes the other one

    # -- for the run -------------------------------------------------------------------------------

    def requested(self) -> bool:
        """Return whether the run was asked to stop and has not acknowledged it."""
        return self._pending.is_set()

    def acknowledge(self) -> None:
        """Note that the run has begun to end; its last waits are then not interrupted."""
        self._pending.clear()

    def ending(self) -> None:
        """Raise nothing from now on."""
        self._ending = True

    def end_program(self) -> NoReturn:
        """Exit with status 0 after SIGTERM, with the signal's status after Ctrl-C or SIGQUIT."""
        if self._interrupted:
            raise KeyboardInterrupt(self._by)
        self._leaves = True
        raise SystemExit(0)

    def end_if_asked(self) -> None:
        """End the program after a finished run if a signal came meanwhile."""
        if self._interrupted or self._asked.is_set():
            self.end_program()

    # -- the thread --------------------------------------------------------------------------------

    def _watch_signals(self, pipe: int) -> None:
        limit = math.inf
        quits = False
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        while True:
            if poller.poll(deadlines.STOPPING_POLL * 1000 if limit < math.inf else None):
                numbers = set(os.read(pipe, 64))
                if not numbers:  # the end of the context
                    break
                if numbers & (set(self._before) - {signal.SIGHUP}):
                    limit = min(limit, time.monotonic() + deadlines.STOPPING_FORCED_EXIT)
                quits = quits or signal.SIGQUIT in numbers
            if time.monotonic() > limit and (
                who := self.what_blocks_exit() or ("the main thread" if quits else "")
            ):
                self.before_forced_exit(who)
                os._exit(1)
        os.close(pipe)

    # -- handlers ----------------------------------------------------------------------------------

    def _on_sighup(self, number: int, frame: FrameType | None) -> None:
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
        if not self.insists and (lost := self.unsaved_work()):
            self._asked.set()
            self._pending.set()
            logger.warning(
                "Ctrl-C: %s is not saved yet; the run ends after the step under way and a save. "
                "Press it again to leave without",
                lost,
            )
            return
        raise KeyboardInterrupt
