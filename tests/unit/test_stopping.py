"""What signals mean to a run, and what is done about an end that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime import __main__ as command
from slime.observe import output
from slime.processes import owner as processes
from slime.run.stopping import StopSignals

ROOT = Path(__file__).parents[2]


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    of_a_terminal = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    # nohup ignores two
    found = {number: signal.signal(number, handler) for number, handler in of_a_terminal.items()}
    try:
        with StopSignals() as signals:
            yield signals
        if signals._leaves:
            of_a_terminal[signal.SIGTERM] = signal.SIG_IGN
        assert of_a_terminal == {number: signal.getsignal(number) for number in of_a_terminal}
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    """To this process; its handler has run when this returns."""
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were let go of; those of the test run stay."""
    let_go: list[int] = []
    ours = SimpleNamespace(**{**vars(os), "dup2": lambda source, target: let_go.append(target)})
    monkeypatch.setattr(output, "os", ours)  # pytest itself calls the real one
    return let_go


def test_only_the_first_one_stops_the_run(signals: StopSignals) -> None:
    assert not signals.requested()
    send(signal.SIGTERM)
    assert signals.requested()
    signals.acknowledge()  # the save is waited for
    send(signal.SIGTERM)
    assert not signals.requested()


def test_a_second_one_does_not_kill_while_the_interpreter_ends() -> None:
    program = (
        "import atexit, os, signal\n"
        "from slime.run.stopping import StopSignals\n"
        "atexit.register(os.killpg, os.getpid(), signal.SIGTERM)\n"
        "with StopSignals() as signals:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    signals.end_program()\n"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, start_new_session=True, timeout=60).returncode == 0


def test_ctrl_c_with_nothing_to_lose_leaves_at_once(signals: StopSignals) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert not signals.requested() and not signals.insists


def test_ctrl_c_saves_first_and_the_second_one_does_not(signals: StopSignals) -> None:
    signals.unsaved_work = lambda: "rollout 12"
    send(signal.SIGINT)
    assert signals.requested() and not signals.insists
    signals.acknowledge()
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert signals.insists
    with pytest.raises(KeyboardInterrupt):
        signals.end_program()


def test_ctrl_c_after_sigterm_leaves_at_once(signals: StopSignals) -> None:
    signals.unsaved_work = lambda: "rollout 12"
    send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert signals.insists


def test_sigquit_writes_stacks_and_leaves_at_once(
    signals: StopSignals, capfd: pytest.CaptureFixture[str]
) -> None:
    signals.unsaved_work = lambda: "rollout 12"
    with pytest.raises(KeyboardInterrupt) as end:
        send(signal.SIGQUIT)
    assert signals.insists and end.value.args == (signal.SIGQUIT,)
    assert "test_sigquit_writes_stacks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGQUIT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
    ],
)
def test_the_end_takes_place_and_nothing_comes_after_it(
    signals: StopSignals, number: signal.Signals, status: type[BaseException]
) -> None:
    signals.ending()
    signals.end_if_asked()
    for _ in range(3):
        send(number)
    assert signals.hurry.is_set() is (number != signal.SIGTERM) and not signals.requested()
    with pytest.raises(status):
        signals.end_if_asked()


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
            assert not signals.requested()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_has_no_signals() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with StopSignals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.requested()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_a_terminal_that_goes_is_let_go_of_and_files_are_not(
    signals: StopSignals, terminal: list[int]
) -> None:
    send(signal.SIGHUP)
    devices = [
        number
        for number in (0, 1, 2)
        if os.path.realpath(f"/proc/self/fd/{number}").startswith("/dev/")
    ]
    assert terminal == devices and not signals.requested()


_SWALLOWED = """
import os, signal, sys
from slime import __main__ as command

def main(words):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except:  # as libraries do while they are imported
        pass
    print("went on")

sys.modules["slime.cli.train"] = sys.modules["__main__"]
sys.exit(command.main(["train"]))
"""


def test_ctrl_c_before_there_is_a_run_cannot_be_swallowed() -> None:
    words = [sys.executable, "-c", _SWALLOWED]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# -- an end that hangs -----------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Statuses with which the process would have been left."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    yield statuses
    processes._hangs.clear()


def test_what_ends_in_time_is_the_end(left: list[int]) -> None:
    assert processes.end_within(60, lambda: None, threading.Event())
    with pytest.raises(ZeroDivisionError):
        processes.end_within(60, lambda: 1 / 0, threading.Event())
    assert command.guarded(lambda: 3) == 3 and left == []


def test_wandb_without_its_server_is_not_waited_for(left: list[int]) -> None:
    processes.will_hang()
    assert command.guarded(lambda: 2) == 2 and left == [2]


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_what_hangs_is_left_with_the_right_status(
    in_a_hurry: bool,
    left: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("slime.deadlines.OWNER_HURRIED_EXIT", 0.0)
    for_ever, hurry = threading.Event(), threading.Event()
    if in_a_hurry:
        hurry.set()
    try:
        assert not processes.end_within(3600.0 if in_a_hurry else 0.0, for_ever.wait, hurry)
    finally:
        for_ever.set()

    def fails(error: BaseException) -> int:
        raise error

    quit = KeyboardInterrupt(signal.SIGQUIT)
    for error, status in (
        (SystemExit(0), 0),
        (KeyboardInterrupt(), 130),
        (quit, 131),
        (ZeroDivisionError(), 1),
    ):
        assert command.guarded(lambda error=error: fails(error)) == status == left[-1]
    assert "ZeroDivisionError" in capsys.readouterr().err, "nobody else would print it"


_BLOCKED = """
import os, resource, signal, sys, time
from slime import deadlines
from slime.run import stopping

resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.dup(0) for _ in range({files})]
signal.signal(signal.{number}, signal.SIG_DFL)  # ignored where the tests run in the background
deadlines.STOPPING_FORCED_EXIT = 0.2
with stopping.StopSignals() as signals:
    signals.what_blocks_exit = lambda: {who!r}
    signals.before_forced_exit = lambda who: os.write(1, f"gave up on {{who}}".encode())
    try:
        os.kill(os.getpid(), signal.{number})
        time.sleep({seconds})
    except KeyboardInterrupt:  # swallowed: it hangs
        time.sleep({seconds})
print("ended by itself")
"""


@pytest.mark.parametrize(
    ("number", "who", "files", "status", "said"),
    [
        ("SIGTERM", "pid 7", 0, 1, "gave up on pid 7"),
        # descriptors beyond what select() can wait for
        ("SIGTERM", "pid 7", 1100, 1, "gave up on pid 7"),
        ("SIGTERM", "", 0, 0, "ended by itself\n"),
        ("SIGQUIT", "", 0, 1, "gave up on the main thread"),
    ],
)
def test_an_end_that_somebody_blocks_takes_place(
    number: str, who: str, files: int, status: int, said: str
) -> None:
    script = _BLOCKED.format(who=who, files=files, number=number, seconds=100 if status else 2)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (status, said), done.stderr
