"""Call users' code on a shared event loop, so that a hang or failure affects only its own call.

    run_in_thread  run a sync function in a thread. If it hangs, kill the processes that it waits
                   for, and raise an exception in it. If it still does not end, log its stack and
                   abandon the thread
    run_isolated   run a coroutine in its own task. If it swallows its cancellation, log its stack
                   and abandon the task
    watch_loop     watch an event loop. If code blocks it, log the stack within half a minute, and
                   end the code if possible

A thread cannot be killed: the exception reaches Python code at its next step, but no C call that
does not return (`time.sleep`, a lock, a socket). If such a call blocks an event loop, only the end
of the process helps; the callback ``lost`` decides.

A process that user code forks, and that returns from the call as its parent does, ends there: with
its copies of all sockets and of the loop it would continue the parent's work.
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
from slime.errors import safe_repr
from slime.processes.children import began_at, children_of, kill, ticks
from slime.processes.stacks import frames_of_task, lines_of_users, stack_of_thread

logger = logging.getLogger("slime.user_code.calls")
T = TypeVar("T")

_MAX_IDLE = 64
#: Name prefix of tasks that run users' coroutines.
_TASK = "user code: "


class UserCodeKilled(BaseException):
    """Raised in a hanging call to end it; not an `Exception`, which users' code may catch."""


# -- coroutines ------------------------------------------------------------------------------------


async def run_isolated(work: Awaitable[T], what: str) -> T:
    """Await ``work`` in its own task: a cancelled caller waits at most 5 s more, whatever ``work``
    does.

    Args:
        what: name for messages: "my.reward on sample 3".
    Raises:
        RuntimeError: ``work`` raised CancelledError itself, was ended because it hung, or tried to
            exit the program.
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
                work.close()  # in case it has not even started
        else:
            logger.warning(
                "%s goes on after it was cancelled, and is left behind; let asyncio.CancelledError "
                "through%s",
                what,
                lines_of_users(frames_of_task(task)),
            )
        raise


#: Cancelled tasks that have not ended. An event loop has only weak references to its tasks, so this
#: set keeps them alive.
_LEFT: set[asyncio.Task[Any]] = set()


def _seen(task: asyncio.Task[Any]) -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # mark it as retrieved: nobody awaits this task


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
    """Turn an exception that would end the shared event loop into one that affects only the code
    that raised it."""
    what = (
        "it hung, and was ended"
        if isinstance(error, UserCodeKilled)
        else f"it raised {safe_repr(error)}"
    )
    return RuntimeError(what).with_traceback(error.__traceback__)


# -- threads ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A call in a thread.

    Attributes:
        deadline: `time.monotonic` at which the thread is ended if its caller was cancelled.
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
        except BaseException as raised:  # delivered to the caller
            error = raised
            if isinstance(raised, StopIteration) or not isinstance(raised, Exception):
                error = _as_exception(raised)
                error.__cause__ = raised
        if os.getpid() != owner:
            os._exit(0)  # a child process that was forked in the call
        with self.lock:
            self.is_over = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the result
            self.loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    def end(self) -> None:
        """Kill the call's child processes, and raise `UserCodeKilled` in its thread."""
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
    """Runs calls one after the other; a daemon thread, so that a hanging call does not keep the
    program from exiting."""

    def __init__(self) -> None:
        super().__init__(name="slime-hook", daemon=True)
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    def run(self) -> None:
        with contextlib.suppress(UserCodeKilled):  # raised just after the call returned
            while True:
                call = self.calls.get()
                try:
                    call.run()
                finally:
                    call.is_over = True
                if call.ended_at or len(_idle) >= _MAX_IDLE:
                    return
                del call  # release its objects before the next call arrives
                _idle.append(self)


#: Idle threads; appending and popping are atomic.
_idle: list[_CallThread] = []


async def run_in_thread(
    function: Callable[[], Any], what: str, limit: float = deadlines.USER_CALLS_ABANDONED
) -> Any:
    """Call ``function`` in a thread with the caller's context variables; return its result.

    A cancelled caller returns at once. The thread continues, and is ended ``limit`` seconds after
    the call began.

    Args:
        what: name for messages.
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
    """Return the number of threads whose calls could not be ended."""
    return sum(call.is_named for call in _overseer.calls)


# -- loops -----------------------------------------------------------------------------------------

#: Thread → name of the user's code that runs in it without its own task.
_running: dict[int, str] = {}


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Mark the block as user code ``what``: if it blocks an event loop, this name is logged, and
    the code is ended."""
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
    """An event loop that is checked every second; made by `watch_loop`.

    Args:
        limit: returns the seconds after which blocking code is ended.
        lost: called in another thread, with a message, if the blocking code cannot be ended, or
            the loop was stopped.
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
        self._since = ticks()  # processes of the blocking code start later
        self._began()

    def _began(self) -> None:
        self._answered = True
        self._blocked = 0.0
        self._stopped = 0.0
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
        """Check the loop, in the overseer's thread, ``seconds`` after the last check."""
        if self.loop.is_closed():
            return self.stop()
        if not self.loop.is_running():  # its owner may run it again
            before = self._stopped
            self._began()
            self._stopped = before + seconds
            if before < deadlines.USER_CALLS_CANCEL <= self._stopped:
                self._lost("the event loop was stopped, by users' code that called loop.stop()")
            return None
        if self._answered:
            self._began()
            self._answered = False
            with contextlib.suppress(RuntimeError):  # closed meanwhile
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
            # the code started another process, and the exception waits until that ends
            elif self._new_children():
                self._end(what)

    def _users_code(self) -> str:
        """Return the name of the user code that runs on the loop; "" if other code runs."""
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
    """Watch the current event loop until `WatchedLoop.stop` or its end; for the arguments see
    `WatchedLoop`."""
    watched = _overseer.loops[loop] = WatchedLoop(loop, limit, lost)
    watched._answer()  # this is the loop's thread
    _overseer.start()
    return watched


class _Overseer:
    """A thread that checks event loops and abandoned calls every second."""

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
            kill(children_of(call.native))  # started since the first kill
            logger.warning(
                "the thread of %s cannot be ended, and stays until this process ends%s",
                call.what,
                stack_of_thread(call.thread),
            )


_overseer = _Overseer()

# -- forks -----------------------------------------------------------------------------------------


def _leave_loops() -> None:
    """Make a child forked by code on a watched loop exit when it returns to the loop, before
    anything else runs there."""
    for watched in list(_overseer.loops.values()):
        if watched.thread == threading.get_ident():
            ready = getattr(watched.loop, "_ready", None)
            handle = asyncio.Handle(os._exit, (0,), watched.loop)
            if ready is not None:
                ready.appendleft(handle)


os.register_at_fork(after_in_child=_leave_loops)
