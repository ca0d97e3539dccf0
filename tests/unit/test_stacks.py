"""Processes that hang write their stacks into their logs, whatever they do; nobody ends of being
asked."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.slow_waits import SlowWaitLogger
from slime.cluster.waiting import Process, _deadline_passed
from slime.processes import stacks
from tests.support.processes import wait_until

_HANGS = """
import sys, time
from slime.processes import stacks
stacks.answer()
def spin_without_an_end():
    print("ready", flush=True)
    while True:
        sum(range(10**6))  # holds the interpreter's lock
spin_without_an_end()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "trainer-0.log"


@pytest.fixture
def hanging(log: Path) -> Iterator[subprocess.Popen[str]]:
    with (
        open(log, "w") as file,
        subprocess.Popen(
            [sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_who_hangs_says_where_and_hangs_on(hanging: subprocess.Popen[str], log: Path) -> None:
    assert stacks.ask([hanging.pid], wait=True) == [hanging.pid]
    wait_until(lambda: "in spin_without_an_end" in log.read_text(), "its stack")
    assert hanging.poll() is None


def test_whoever_waits_for_it_asks(
    hanging: subprocess.Popen[str], log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the deadline; and before that where it is silent for long, or idle."""
    caplog.set_level("INFO")
    worker: Any = SimpleNamespace(name="trainer-0", process=Process(hanging.pid, "127.0.0.1"))
    error = _deadline_passed([worker], "training", 9.0, since=0.0)
    assert "the Python stacks of all threads are in trainer-0.log" in error.fix
    assert log.read_text().count("in spin_without_an_end") == 1

    clock = [0.0]
    silence = SlowWaitLogger("training", lambda: clock[0])
    for clock[0] in (30.0, 60.0, 130.0, 270.0):
        silence.poll([worker])
    said = ["Python stacks: trainer-0.log" in line for line in caplog.messages]
    assert said == [True, False, True], "idle, as this clock runs; at work; silent for long"
    wait_until(lambda: log.read_text().count("in spin_without_an_end") == 3, "its stacks")


def test_who_is_stopped_says_it_when_it_goes_on(hanging: subprocess.Popen[str], log: Path) -> None:
    hanging.send_signal(signal.SIGSTOP)
    assert stacks.ask([hanging.pid]) == [hanging.pid] and not log.read_text()
    hanging.send_signal(signal.SIGCONT)
    wait_until(lambda: "in spin_without_an_end" in log.read_text(), "its stack")


def test_others_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        assert stacks.ask([other.pid, 2**22 + 1], wait=True) == []
        assert other.poll() is None
        other.kill()


def test_a_process_that_ends_while_it_is_asked_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(stacks, "_answers", lambda pid: True)
    assert stacks.ask([ended.pid], wait=True) == []
