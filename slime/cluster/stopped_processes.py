"""A part of the run that is stopped (SIGSTOP) answers nobody: a thread of the driver sees it, and
ends the wait for it.

    pid 4711 (ray::TrainerActor) is stopped since 14:03:12; the driver waits since 14:03:10
    (training) for trainer-0. It ends at 14:13:12 if nothing is heard until then; kill -CONT 4711
    lets it go on

Deadlines of calls (docs/deadlines.md) fit the work that is waited for, up to hours, and a call into
Ray may not come back at all while one of Ray's daemons is stopped. So the thread counts from when a
part was seen stopped and nothing was heard, raises `DeadlinePassed` in the main thread, and where
that does not hear it ends the program.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

from slime import deadlines
from slime.cluster import open_waits
from slime.cluster.slow_waits import own_actors, stopped_parts
from slime.cluster.waiting import DeadlinePassed
from slime.log import get_logger
from slime.processes import stacks

logger = get_logger(__name__)

#: Nobody else's: a handler runs in the main thread, between two steps of Python.
_SIGNAL = signal.SIGRTMIN + 3


class StoppedProcessMonitor:
    """Begun in the main thread; in another one it only speaks.

    Args:
        limit: seconds that a part may be stopped while nothing is heard.
        log: of the driver, for its own stacks.
        ends: called by the thread, with the error that keeps the run from going on, before it ends
            the program over a main thread that does not hear.
        look: process id → name of the parts that are stopped.
        clock: seconds.
    """

    def __init__(
        self,
        limit: float,
        log: Path,
        ends: Callable[[BaseException], None],
        look: Callable[[], dict[int, str]] = stopped_parts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._log = log
        self._ends = ends
        self._find = look
        self._clock = clock
        self._interval = min(deadlines.STOPPED_PROCESSES_LOOK, limit / 8)
        self._said_after = min(deadlines.STOPPED_PROCESSES_SAID, limit / 3)
        self._since: dict[int, float] = {}
        self._said: set[int] = set()
        self._error: BaseException | None = None
        self._raised_at: float | None = None
        self._is_leaving = False
        self._settles = False
        self._is_over = threading.Event()
        self._is_main = False

    def begin(self) -> None:
        """To be called once."""
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            signal.signal(_SIGNAL, self._raise)
        threading.Thread(target=self._keep_looking, name="watchman", daemon=True).start()

    def end(self) -> None:
        """From now on it neither raises nor ends anything; twice is once. Its signal may still be
        on the way."""
        self._is_over.set()
        open_waits.end_with(None)
        if self._is_main:
            signal.signal(_SIGNAL, signal.SIG_IGN)

    def leaving(self, error: BaseException, *, settles: bool) -> None:
        """The run has failed: nothing is raised any more, but a part that is stopped may keep it
        from leaving.

        Args:
            settles: it may wait for a checkpoint that is being written, and so is left alone.
        """
        self._error = error
        self._is_leaving = True
        self._settles = settles
        open_waits.end_with(None)
        self._raised_at = self._clock()

    # -- the thread
    # ------------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        while not self._is_over.wait(self._interval):
            self.look()

    def look(self) -> None:
        """What the thread does now and then."""
        now = self._clock()
        stopped = self._find()
        for pid in self._said - stopped.keys():
            logger.info("pid %d goes on, or is gone", pid)
        self._said &= stopped.keys()
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        if self._raised_at is not None:
            self._see_whether_it_was_heard(now, stopped)
        if not stopped:
            return
        left = max(min(self._since.values()), open_waits.heard_at()) + self._limit - now
        self._say(
            {
                pid: name
                for pid, name in stopped.items()
                if now - self._since[pid] >= self._said_after
            },
            left,
        )
        if self._raised_at is None and left <= 0 and self._is_main:
            self._expire(now, stopped)

    def _say(self, stopped: dict[int, str], left: float) -> None:
        if not (news := {pid: name for pid, name in stopped.items() if pid not in self._said}):
            return
        self._said |= news.keys()
        logger.warning(
            "%s; the driver %s. It ends at %s if nothing is heard until then; kill -CONT %s lets "
            "it go on",
            self._stopped(news), open_waits.words(), _time_in(left),
            " ".join(map(str, news)),
        )  # fmt: skip

    def _stopped(self, stopped: dict[int, str]) -> str:
        since = {pid: _time_in(self._since[pid] - self._clock()) for pid in stopped}
        return ", ".join(f"{name} is stopped since {since[pid]}" for pid, name in stopped.items())

    def _expire(self, now: float, stopped: dict[int, str]) -> None:
        heard_at = open_waits.heard_at()
        asked = stacks.ask((pid for pid in own_actors() if pid not in stopped), wait=True)
        self._write_own_stacks()
        if (
            open_waits.heard_at() != heard_at
        ):  # meanwhile: who waited found it out, and may have begun again
            return
        error = self._error = DeadlinePassed(
            f"{self._stopped(stopped)}, and the run does not go on: the driver "
            f"{open_waits.words()}",
            why="a process that is stopped (SIGSTOP) answers nobody, and nothing was heard for "
            f"{self._limit:.0f} s "
            "(--distributed-timeout-minutes)",
            fix=f"the Python stacks of the driver and of {len(asked)} actors that could still "
            "tell are in their logs; "
            f"find out who has stopped it; kill -CONT {' '.join(map(str, stopped))} in time would "
            "have let the run "
            "go on",
        )
        error.names = tuple(open_waits.names_of(stopped))
        self._raised_at = now
        open_waits.end_with(error)
        if not self._is_over.wait(deadlines.STOPPED_PROCESSES_TAKES_UP) and open_waits.is_ending():
            os.kill(os.getpid(), _SIGNAL)

    def _see_whether_it_was_heard(self, now: float, stopped: Collection[int]) -> None:
        """A run that has begun again, without the one that was stopped, is as good as new."""
        assert self._raised_at is not None
        if open_waits.heard_at() > self._raised_at and not self._is_leaving:
            self._raised_at = None
        elif (
            now - self._raised_at > deadlines.STOPPED_PROCESSES_HEARS
            and stopped
            and not self._settles
            and not self._is_over.is_set()
        ):
            assert self._error is not None
            try:
                self._ends(self._error)
            finally:
                os._exit(1)

    def _write_own_stacks(self) -> None:
        try:
            with open(self._log, "a") as log:
                faulthandler.dump_traceback(file=log, all_threads=True)
        except OSError as problem:
            logger.error("could not write %s: %s", self._log, problem)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        open_waits.look()


def _time_in(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
