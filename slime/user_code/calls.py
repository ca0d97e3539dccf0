"""Users' code, called so that what goes wrong in it ends with its own call, on an event loop that
others share.

    run_in_thread  a sync function, in a thread. Hung: the processes that it waits for are killed,
                   an exception is raised in it; what even then does not end is named with its
                   stack, and holds nothing up
    run_isolated   a coroutine, in a task of its own; one that swallows its cancellation is left
                   behind, and named
    watch_loop     a loop that code blocks: named with the stack within half a minute, and freed
                   where that is possible

Nobody can kill a thread: the exception reaches Python code at its next step, but no call of C that
does not return (`time.sleep`, a lock, a socket). On an event loop that means the end of the
process, and so whoever owns it is asked.

A process that is forked in such a call, and comes back from it as its parent does, ends there: it
has copies of everybody's sockets and of the loop, and would go on with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from slime import deadlines
from slime.processes.children import began_at, children_of, kill, ticks
from slime.processes.stacks import frames_of_task, lines_of_users, stack_of_thread

logger = logging.getLogger("slime.user_code.calls")
T = TypeVar("T")

_MOST_IDLE = 64
#: Of tasks that run a coroutine of the user's.
_TASK = "user code: "


class UserCodeKilled(BaseException):
    """Raised in a call that hangs, to end it; no `Exception`, which users' code catches."""


# -- coroutines ------------------------------------------------------------------------------------


async def run_isolated(work: Awaitable[T], what: str) -> T:
    """Await ``work`` in a task of its own: a caller that is cancelled is free 5 s later, whatever
    ``work`` does.

    Args:
        what: for messages: "my.reward on sample 3".
    Raises:
        RuntimeError: it was cancelled by itself, ended since it hung, or wanted to leave the
            program.
    """
    task = asyncio.create_task(_contained(work), name=_TASK + what)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if task.cancelled() and not (caller is not None and caller.cancelling()):
            raise RuntimeError(
                "it raised CancelledError, although nobody has cancelled it"
            ) from None
        task.cancel()
        _LEFT.add(task)
        task.add_done_callback(_seen)
        await asyncio.wait({task}, timeout=deadlines.USER_CALLS_CANCEL)
        if task.done():
            if asyncio.iscoroutine(work):
                work.close()  # should it not even have begun
        else:
            logger.warning(
                "%s goes on after it was cancelled, and is left behind; let asyncio.CancelledError "
                "through%s",
                what,
                lines_of_users(frames_of_task(task)),
            )
        raise


#: Tasks that were cancelled and have not ended; kept, since a loop holds its tasks by weak
#: references alone.
_LEFT: set[asyncio.Task[Any]] = set()


def _seen(task: asyncio.Task[Any]) -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # of what nobody waits for


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
        ):
            raise
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> RuntimeError:
    """Turn what would end the event loop, and so keep everyone else waiting, into an exception of
    the code that raised it."""
    what = "it hung, and was ended" if isinstance(error, UserCodeKilled) else f"it raised {error!r}"
    return RuntimeError(what).with_traceback(error.__traceback__)


# -- threads ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A call in a thread.

    Attributes:
        deadline: `time.monotonic` at which the thread is ended, should nobody wait for it any more.
    """

    function: Callable[[], Any]
    what: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    context: contextvars.Context
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    thread: int = 0
    native: int = 0
    ended_at: float = 0.0
    is_named: bool = False

    def run(self) -> None:
        self.thread = threading.get_ident()
        self.native = threading.get_native_id()
        owner = os.getpid()
        result = None
        error = None
        try:
            result = self.context.run(self.function)
        except BaseException as raised:  # delivered to whoever awaits
            error = raised
            if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
                error = _as_exception(raised)
                error.__cause__ = raised
        if os.getpid() != owner:
            os._exit(0)  # a child that was forked in the call
        with self.lock:
            self.is_over = True
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    def end(self) -> None:
        """Kill what it waits for, and have it raise `UserCodeKilled`."""
        with self.lock:
            if self.is_over:
                return
            killed = kill(children_of(self.native))
            self.ended_at = time.monotonic()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread), ctypes.py_object(UserCodeKilled)
            )
        logger.warning(
            "%s hangs and is ended%s", self.what, f", with its processes {killed}" if killed else ""
        )


class _CallThread(threading.Thread):
    """Takes one call after the other; a daemon, so that one that hangs holds up no end of the
    program."""

    def __init__(self) -> None:
        super().__init__(name="slime-hook", daemon=True)
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    def run(self) -> None:
        with contextlib.suppress(UserCodeKilled):  # raised a moment after the call had come back
            while True:
                call = self.calls.get()
                try:
                    call.run()
                finally:
                    call.is_over = True
                if call.ended_at or len(_idle) >= _MOST_IDLE:
                    return
                del call  # what it refers to is not kept until the next one comes
                _idle.append(self)


#: Workers without a call; appending and popping are atomic.
_idle: list[_CallThread] = []


async def run_in_thread(
    function: Callable[[], Any], what: str, limit: float = deadlines.USER_CALLS_ABANDONED
) -> Any:
    """The result of ``function``, called in a thread that sees the caller's context variables.

    A caller that is cancelled is free at once. The thread goes on, and is ended ``limit`` seconds
    after the call began.

    Args:
        what: for messages.
    """
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + limit
    call = _Call(function, what, loop, loop.create_future(), contextvars.copy_context(), deadline)
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _CallThread()
        worker.start()
    worker.calls.put(call)
    try:
        return await call.future
    except asyncio.CancelledError:
        _overseer.add(call)
        raise


def hung_threads() -> int:
    """Threads of calls that could not be ended."""
    return sum(call.is_named for call in _overseer.calls)


# -- loops -----------------------------------------------------------------------------------------

#: Thread → what of the user's runs in it at once, without a task of its own.
_running: dict[int, str] = {}


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """The block is code of the user's: where it blocks an event loop, it is what is named and
    ended."""
    thread = threading.get_ident()
    before = _running.get(thread)
    _running[thread] = what
    try:
        yield
    except UserCodeKilled as error:
        raise _as_exception(error) from error
    finally:
        if before is None:
            _running.pop(thread, None)
        else:
            _running[thread] = before


class WatchedLoop:
    """An event loop that is asked each second whether it lives; from `watch_loop`.

    Args:
        limit: gives the seconds after which blocking code is ended.
        lost: called in another thread with a message about code that cannot be ended; the loop
            does not answer any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit: Callable[[], float],
        lost: Callable[[str], object],
    ) -> None:
        self.loop = loop
        self._limit = limit
        self._lost = lost
        self.thread = self.native = 0
        self._since = ticks()  # what blocks it began later
        self._began()

    def _began(self) -> None:
        self._answered = True
        self._blocked = 0.0
        self._next = deadlines.USER_CALLS_BLOCKED
        self._ended = False

    def _answer(self) -> None:
        self.thread = threading.get_ident()
        self.native = threading.get_native_id()
        self._since = ticks()
        self._answered = True

    def stop(self) -> None:
        _overseer.loops.pop(self.loop, None)

    def check(self, seconds: float) -> None:
        """Called in the overseer's thread, ``seconds`` after the last time."""
        if self.loop.is_closed():
            return self.stop()
        if not self.loop.is_running():  # it need not answer
            return self._began()
        if self._answered:
            self._began()
            self._answered = False
            with contextlib.suppress(RuntimeError):  # it has been closed since
                self.loop.call_soon_threadsafe(self._answer)
            return None
        self._blocked += seconds
        if self._blocked >= self._next:
            self._next *= 2
            self._warn()
        what = self._users_code()
        if what and self._blocked >= self._limit():
            if not self._ended:
                self._end(what)
            elif self._blocked >= self._limit() + deadlines.USER_CALLS_CANCEL:
                self._lost(f"{what} blocks the event loop and cannot be ended{self._stack()}")
            # one that was about to begin: what was raised waits until it ends
            elif self._new_children():
                self._end(what)

    def _users_code(self) -> str:
        """Name the user's code that runs on the loop now; "" if it is something else."""
        task = asyncio.current_task(self.loop)
        name = task.get_name() if task is not None else ""
        return name.removeprefix(_TASK) if name.startswith(_TASK) else _running.get(self.thread, "")

    def _stack(self) -> str:
        return stack_of_thread(self.thread)

    def _warn(self) -> None:
        logger.warning(
            "%s blocks the event loop for %.0f s, and all samples wait for it: use await, or a "
            "sync function%s",
            self._users_code() or "something",
            self._blocked,
            self._stack(),
        )

    def _new_children(self) -> list[psutil.Process]:
        return [child for child in children_of(self.native) if began_at(child.pid) >= self._since]

    def _end(self, what: str) -> None:
        self._ended = True
        killed = kill(self._new_children())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.thread), ctypes.py_object(UserCodeKilled)
        )
        logger.warning(
            "%s has blocked the event loop for %.0f s and is ended%s",
            what,
            self._blocked,
            f", with its processes {killed}" if killed else "",
        )


def watch_loop(
    loop: asyncio.AbstractEventLoop, limit: Callable[[], float], lost: Callable[[str], object]
) -> WatchedLoop:
    """Watch the event loop that this is called on until `WatchedLoop.stop` or its end; the
    arguments are those of the class."""
    watched = _overseer.loops[loop] = WatchedLoop(loop, limit, lost)
    watched._answer()  # it is called there
    _overseer.start()
    return watched


class _Overseer:
    """A thread that checks loops, and calls that nobody waits for any more, each second."""

    def __init__(self) -> None:
        self.calls: set[_Call] = set()
        self.loops: dict[asyncio.AbstractEventLoop, WatchedLoop] = {}
        self._lock = threading.Lock()
        self._is_started = False

    def add(self, call: _Call) -> None:
        self.calls.add(call)
        self.start()

    def start(self) -> None:
        with self._lock:
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._watch, name="slime-overseer", daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(deadlines.USER_CALLS_POLL)
            now = time.monotonic()
            # this process may have been stopped
            seconds = min(now - last, 2 * deadlines.USER_CALLS_POLL)
            last = now
            for watched in list(self.loops.values()):
                watched.check(seconds)
            for call in list(self.calls):
                self._check_call(call, now)

    def _check_call(self, call: _Call, now: float) -> None:
        if call.is_over:
            self.calls.discard(call)
        elif not call.ended_at:
            if now >= call.deadline and call.thread:
                call.end()
        elif now >= call.ended_at + deadlines.USER_CALLS_CANCEL and not call.is_named:
            call.is_named = True
            kill(children_of(call.native))  # those that it has started since
            logger.warning(
                "the thread of %s cannot be ended, and stays until this process ends%s",
                call.what,
                stack_of_thread(call.thread),
            )


_overseer = _Overseer()

# -- forks -----------------------------------------------------------------------------------------


def _leave_loops() -> None:
    """End a process that was forked on a watched loop, as soon as it is back on that loop and
    before anything else runs there."""
    for watched in list(_overseer.loops.values()):
        if watched.thread == threading.get_ident():
            ready = getattr(watched.loop, "_ready", None)
            handle = asyncio.Handle(os._exit, (0,), watched.loop)
            if ready is not None:
                ready.appendleft(handle)


os.register_at_fork(after_in_child=_leave_loops)
