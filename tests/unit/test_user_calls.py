"""Calls of users' code end with their own call: threads, coroutines, blocked loops, forked
children."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from slime.user_code import calls as user_calls
from slime.user_code.calls import hung_threads, run_in_thread, run_isolated, running, watch_loop
from slime.user_code.loading import FunctionHangs, call_hook
from tests.support.processes import wait_until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "POLL": 0.02,
        "CANCEL": 0.2,
        "BLOCKED": 0.1,
    }.items():
        monkeypatch.setattr(f"slime.deadlines.USER_CALLS_{name}", seconds)


async def hangs(function: Any, limit: float = 0.05) -> None:
    with pytest.raises(FunctionHangs, match="has not returned within"):
        await call_hook(function, what="mine", limit=limit)


# -- threads ---------------------------------------------------------------------------------------


def test_a_hung_thread_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def polls() -> None:
        try:
            while True:
                time.sleep(0.001)
        except Exception:  # what users write does not keep it
            polls()
        finally:
            ended.set()

    asyncio.run(hangs(polls))
    wait_until(ended.is_set, "the thread ends")
    assert "mine hangs and is ended" in caplog.text


def test_a_thread_that_waits_for_a_deadlocked_child_ends_with_it() -> None:
    children: list[Any] = []
    ended = threading.Event()

    def waits() -> None:
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        child = multiprocessing.get_context("fork").Process(target=lock.acquire)
        child.start()
        children.append(child)
        try:
            child.join()
        finally:
            ended.set()

    asyncio.run(hangs(waits, limit=1.0))
    wait_until(ended.is_set, "the thread ends")
    assert not psutil.pid_exists(children[0].pid), "killed, and waited for by the thread"


def test_a_thread_that_cannot_be_ended_is_named_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()

    def deadlocks() -> None:
        gate.wait()

    before = hung_threads()
    asyncio.run(hangs(deadlocks))
    wait_until(lambda: hung_threads() == before + 1, "it is counted")
    # right after it is counted
    wait_until(lambda: "the thread of mine cannot be ended" in caplog.text, "it is named")
    assert "in deadlocks\n    gate.wait()" in caplog.text
    gate.set()
    wait_until(lambda: hung_threads() == before, "it has ended after all")


def test_a_process_ends_without_waiting_for_hung_threads() -> None:
    code = """
import asyncio, time
from slime.user_code.loading import FunctionHangs, call_hook
async def main():
    try:
        await call_hook(lambda: time.sleep(10**6), limit=0.05)
    except FunctionHangs:
        print("hung")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "hung\n"


def test_threads_are_used_again() -> None:
    """One that has just answered may not be idle yet."""

    async def main() -> set[int]:
        return {await run_in_thread(threading.get_ident, "mine") for _ in range(50)}

    assert len(asyncio.run(main())) < 10


class Own(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [StopIteration(1), SystemExit(2), Own("mine"), asyncio.CancelledError("by nobody")]
)
@pytest.mark.parametrize("sync", [True, False])
def test_what_would_end_the_loop_is_a_failure(error: BaseException, sync: bool) -> None:
    def raises() -> None:
        raise error

    async def raises_async() -> None:
        raise error

    async def main() -> None:
        with pytest.raises(RuntimeError, match=f"raised {type(error).__name__}"):
            await call_hook(raises if sync else raises_async)

    asyncio.run(main())


# -- coroutines ------------------------------------------------------------------------------------


def test_a_coroutine_that_swallows_its_cancellation_is_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = False

    async def swallows() -> None:
        while not stop:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def main() -> None:
        nonlocal stop
        await hangs(swallows)
        assert (
            "mine goes on after it was cancelled" in caplog.text
            and "await asyncio.sleep(0.001)" in caplog.text
        )
        stop = True
        await asyncio.gather(*user_calls._LEFT)

    asyncio.run(main())


# -- loops -----------------------------------------------------------------------------------------


def watched(work: Any, lost: Any = lambda said: None, limit: float = 0.3) -> Any:
    """What ``work`` returns or raises, on a loop that is watched."""

    async def main() -> Any:
        loop = watch_loop(asyncio.get_running_loop(), lambda: limit, lost)
        try:
            while not loop.thread:  # it has been looked at
                await asyncio.sleep(0.001)
            return await work()
        finally:
            loop.stop()

    return asyncio.run(main())


def test_code_that_blocks_the_loop_is_named_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def blocks() -> None:
        while True:
            time.sleep(0.001)

    with pytest.raises(RuntimeError, match="it hung, and was ended"):
        watched(lambda: run_isolated(blocks(), "my.generate on sample 3"))
    assert "my.generate on sample 3 blocks the event loop for" in caplog.text
    assert "in blocks\n    time.sleep(0.001)" in caplog.text


def waiting_for_a_child_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the child's end, and not because the loop was given up."""
    monkeypatch.setattr("slime.deadlines.USER_CALLS_CANCEL", 20.0)
    given_up, children = [], []

    async def waits() -> int:
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"]))
        return children[0].wait()

    def lost(said: str) -> None:
        given_up.append(said)
        children[0].kill()  # or the test would hang

    with pytest.raises(RuntimeError, match="it hung, and was ended"):
        watched(lambda: run_isolated(waits(), "mine"), lost)
    assert not given_up


def test_a_child_that_blocks_the_loop_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting_for_a_child_is_ended(monkeypatch)


def test_a_child_that_begins_as_its_parent_is_ended_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody saw it when the exception was set, which waits until the child ends."""
    see, times = user_calls.children_of, iter([True])
    monkeypatch.setattr(
        user_calls, "children_of", lambda native: [] if next(times, False) else see(native)
    )
    waiting_for_a_child_is_ended(monkeypatch)


def test_sync_code_of_the_users_on_the_loop_is_ended_too() -> None:
    async def draws() -> None:
        with running("my.Source.get_samples"):
            while True:
                time.sleep(0.001)

    with pytest.raises(RuntimeError, match="it hung, and was ended"):
        watched(draws)


def test_whoever_owns_the_loop_is_told_of_what_cannot_be_ended() -> None:
    gate, told = threading.Event(), []

    async def deadlocks() -> None:
        gate.wait()

    def lost(said: str) -> None:
        told.append(said)
        gate.set()

    with pytest.raises(RuntimeError, match="it hung, and was ended"):
        watched(lambda: run_isolated(deadlocks(), "mine"), lost)
    assert "mine blocks the event loop and cannot be ended" in told[0] and "gate.wait()" in told[0]


def test_whoever_owns_the_loop_is_told_once_that_it_was_stopped() -> None:
    """By a function of the user's: nobody is answered any more."""
    told: list[str] = []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        watch = watch_loop(loop, lambda: 60.0, told.append)
        for _ in range(20):
            watch.check(1.0)
        assert not told, "it runs"
        loop.stop()

    task = loop.create_task(main())
    loop.run_forever()
    assert task.done()
    watch = user_calls._overseer.loops[loop]
    for _ in range(20):
        watch.check(1.0)
    watch.stop()
    loop.close()
    assert told == ["the event loop was stopped, by users' code that called loop.stop()"]


def test_our_own_code_is_named_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def works() -> str:
        wait_until(lambda: "something blocks the event loop" in caplog.text, "it is named")
        return "done"

    assert watched(works, limit=0.0) == "done"


# -- children --------------------------------------------------------------------------------------

FORKS = """
import asyncio, os, signal
from slime.user_code.loading import call_hook
from slime.user_code.calls import watch_loop

def fork():
    pid = os.fork()
    signal.alarm(60 if pid == 0 else 0)      # should it live on, it does not do so for ever
    return pid

async def fork_async():
    return fork()

async def main():
    watched = watch_loop(asyncio.get_running_loop(), lambda: 60.0, print)
    while not watched.thread:
        await asyncio.sleep(0.01)
    for function in (fork, fork_async):
        others = [asyncio.create_task(asyncio.sleep(0, "others")) for _ in range(5)]
        pid = await call_hook(function)
        await asyncio.gather(*others)
        print(f"{function.__name__} came back in", "the child" if pid == 0 else "the parent", \
flush=True)
        print("its child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

asyncio.run(main())
"""


def test_a_forked_child_does_not_come_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [
        "fork came back in the parent",
        "its child ended with 0",
        "fork_async came back in the parent",
        "its child ended with 0",
    ]


def test_processes_that_were_left_behind_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    code = """
import subprocess, sys
from slime.processes.children import end_children
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
end_children()
print(child.pid, child.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    pid, status = done.stdout.split()
    assert status == "-9" and not psutil.pid_exists(int(pid))
    assert os.getpid() != int(pid)
