"""End waits for stopped processes (SIGSTOP), which never answer, from a thread of the driver.

    pid 4711 (ray::TrainerActor) has been stopped since 14:03:12; the driver has waited since
        14:03:10 (training) for trainer-0. The run ends at 14:13:12 unless there is progress before;
        kill -CONT 4711 continues the process

Deadlines of calls (docs/deadlines.md) include the work itself, up to hours. A call into Ray may
never return while one of Ray's daemons is stopped. So the thread measures the time since it first
saw the process stopped and since the last progress. At its limit it raises `DeadlinePassed` in the
main thread; if that has no effect, it ends the program.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from slime import deadlines
from slime.cluster import open_waits
from slime.cluster.slow_waits import own_actors, stopped_parts
from slime.cluster.waiting import DeadlinePassed
from slime.log import get_logger
from slime.processes import stacks

logger = get_logger(__name__)

#: Used by nothing else. Its handler runs in the main thread, between two bytecodes.
_SIGNAL = signal.SIGRTMIN + 3


@dataclass(eq=False)
class StoppedProcessMonitor:
    """Logs stopped processes and ends waits for them.

    If it is not started in the main thread, it only logs.

    Args:
        limit: seconds that a process may be stopped without any progress.
        log: the driver's log, to which its own stacks are written.
        before_exit: called by the thread with the error before it ends the program because the main
            thread does not react.
        find_stopped: returns process id → name of the stopped processes.
        clock: seconds.
    """

    limit: float
    log: Path
    before_exit: Callable[[BaseException], None]
    find_stopped: Callable[[], dict[int, str]] = stopped_parts
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._interval = min(deadlines.STOPPED_PROCESSES_POLL, self.limit / 8)
        self._warn_after = min(deadlines.STOPPED_PROCESSES_LINE, self.limit / 3)
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()
        self._error: BaseException | None = None
        self._raised_at: float | None = None
        self._is_leaving = False
        self._waits_for_save = False
        self._is_over = threading.Event()
        self._is_main = False

    def begin(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            signal.signal(_SIGNAL, self._raise)
        threading.Thread(target=self._run, name="stopped-processes", daemon=True).start()

    def end(self) -> None:
        """Stop the thread. This may be called twice."""
        self._is_over.set()
        open_waits.interrupt_with(None)
        if self._is_main:  # the thread's signal may still be on the way
            signal.signal(_SIGNAL, signal.SIG_IGN)

    def leaving(self, error: BaseException, *, waits_for_save: bool) -> None:
        """Raise nothing more, because the run has failed, but end the program if a stopped process
        keeps it from exiting.

        Args:
            waits_for_save: the run may still write a checkpoint; then never end the program.
        """
        self._error = error
        self._is_leaving = True
        self._waits_for_save = waits_for_save
        open_waits.interrupt_with(None)
        self._raised_at = self.clock()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over.wait(self._interval):
            self.poll()

    def poll(self) -> None:
        """Look for stopped processes; log and end waits that are due."""
        now = self.clock()
        stopped = self.find_stopped()
        for pid in self._reported - stopped.keys():
            logger.info("pid %d runs again or has ended", pid)
        self._reported &= stopped.keys()
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        if self._raised_at is not None:
            self._exit_if_not_raised(now, stopped)
        if not stopped:
            return
        left = max(min(self._since.values()), open_waits.last_progress()) + self.limit - now
        self._warn(
            {
                pid: name
                for pid, name in stopped.items()
                if now - self._since[pid] >= self._warn_after
            },
            left,
        )
        if self._raised_at is None and left <= 0 and self._is_main:
            self._expire(now, stopped)

    def _warn(self, stopped: dict[int, str], left: float) -> None:
        if not (news := {pid: name for pid, name in stopped.items() if pid not in self._reported}):
            return
        self._reported |= news.keys()
        logger.warning(
            "%s; the driver %s. The run ends at %s unless there is progress before; kill -CONT %s "
            "continues the process",
            self._stopped(news),
            open_waits.describe(),
            _time_in(left),
            " ".join(map(str, news)),
        )

    def _stopped(self, stopped: dict[int, str]) -> str:
        since = {pid: _time_in(self._since[pid] - self.clock()) for pid in stopped}
        return ", ".join(
            f"{name} has been stopped since {since[pid]}" for pid, name in stopped.items()
        )

    def _expire(self, now: float, stopped: dict[int, str]) -> None:
        last_progress = open_waits.last_progress()
        asked = stacks.ask((pid for pid in own_actors() if pid not in stopped), wait=True)
        self._write_own_stacks()
        if open_waits.last_progress() != last_progress:
            return  # the wait has ended meanwhile, and the trainer may have been restarted
        error = self._error = DeadlinePassed(
            f"{self._stopped(stopped)}, and the run does not go on: the driver "
            f"{open_waits.describe()}",
            why="a stopped process (SIGSTOP) does not answer, and there was no progress for "
            f"{self.limit:.0f} s (--distributed-timeout-minutes)",
            fix="find out who stopped it; in time, kill -CONT "
            f"{' '.join(map(str, stopped))} lets a run continue. The Python stacks of the driver "
            f"and of {len(asked)} actors that still answered are in their logs",
        )
        error.names = tuple(open_waits.names_of(stopped))
        self._raised_at = now
        open_waits.interrupt_with(error)
        if (
            not self._is_over.wait(deadlines.STOPPED_PROCESSES_RAISE)
            and open_waits.is_interrupt_pending()
        ):
            os.kill(os.getpid(), _SIGNAL)

    def _exit_if_not_raised(self, now: float, stopped: Collection[int]) -> None:
        assert self._raised_at is not None
        # progress: the error was raised, and the run continues without the stopped process
        if open_waits.last_progress() > self._raised_at and not self._is_leaving:
            self._raised_at = None
        elif (
            now - self._raised_at > deadlines.STOPPED_PROCESSES_EXIT
            and stopped
            and not self._waits_for_save
            and not self._is_over.is_set()
        ):
            assert self._error is not None
            try:
                self.before_exit(self._error)
            finally:
                os._exit(1)

    def _write_own_stacks(self) -> None:
        try:
            with open(self.log, "a") as log:
                faulthandler.dump_traceback(file=log, all_threads=True)
        except OSError as problem:
            logger.error("could not write %s: %s", self.log, problem)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        open_waits.raise_interrupt()


def _time_in(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
