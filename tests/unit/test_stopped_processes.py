"""The thread that sees parts which are stopped: what it says, when it ends a wait, and when it does
not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.cluster import open_waits
from slime.cluster import stopped_processes as module
from slime.cluster.stopped_processes import StoppedProcessMonitor
from slime.cluster.waiting import DeadlinePassed

STOPPED = {4711: "pid 4711 (ray::TrainerActor)"}


class Scene:
    """A monitor with a limit of a minute, its clock and what it sees."""

    def __init__(self, log: Path) -> None:
        self.now, self.stopped, self.ended = time.monotonic(), dict(STOPPED), [BaseException()][:0]
        self.stopped_monitor = StoppedProcessMonitor(
            60.0, log, self.ended.append, lambda: self.stopped, lambda: self.now
        )
        self.stopped_monitor._is_main = True

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.stopped_monitor.poll()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr("slime.deadlines.STOPPED_PROCESSES_RAISE", 0.0)
    monkeypatch.setattr(module, "own_actors", lambda: [])
    # the main thread looks by itself here
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    open_waits.note_progress()
    yield Scene(tmp_path / "driver.log")
    open_waits.interrupt_with(None)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = list(caplog.messages)
    caplog.clear()
    return found


def test_it_names_who_is_stopped_and_who_waits_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with open_waits.waiting("training") as wait:
        wait.pending = {"trainer-0": 4711}
        scene.after(0)
        scene.after(19)
        assert lines_of(caplog) == []
        scene.after(1)
        (line,) = lines_of(caplog)
        assert line.startswith("pid 4711 (ray::TrainerActor) has been stopped since ")
        assert "(training) for trainer-0. The run ends at " in line and "kill -CONT 4711" in line
        scene.after(20)
        assert lines_of(caplog) == []
        scene.stopped = {}
        scene.after(1)
        assert lines_of(caplog) == ["pid 4711 runs again or has ended"]


def test_it_ends_the_wait_with_its_names(scene: Scene) -> None:
    with open_waits.waiting("training") as wait:
        wait.pending = {"trainer-0": 4711, "trainer-1": 4712}
        scene.after(0)
        scene.after(59)
        open_waits.raise_interrupt()  # not yet
        scene.after(1)
        with pytest.raises(
            DeadlinePassed, match=r"pid 4711 .* has been stopped since .*the run does not go on"
        ) as failed:
            open_waits.raise_interrupt()
    assert failed.value.names == ("trainer-0",)
    assert "no progress for 60 s" in failed.value.why and "kill -CONT 4711" in failed.value.fix
    assert "test_it_ends_the_wait" in scene.stopped_monitor.log.read_text(), (
        "the driver's own stacks"
    )


def test_what_is_heard_counts_anew(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.after(0)
    monkeypatch.setattr(open_waits, "_last_progress", scene.now + 50)
    scene.after(61)
    scene.after(48)
    open_waits.raise_interrupt()
    scene.after(1)
    with pytest.raises(DeadlinePassed):
        open_waits.raise_interrupt()


def test_another_part_that_is_stopped_later_does_not_count_anew(scene: Scene) -> None:
    scene.after(0)
    scene.stopped |= {4712: "pid 4712 (gcs_server)"}
    scene.after(60)
    with pytest.raises(DeadlinePassed, match=r"pid 4712 .gcs_server. has been stopped"):
        open_waits.raise_interrupt()


def test_a_wait_that_ends_while_the_stacks_are_asked_for_is_not_ended_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks had lost each other: the run has begun again, and the new wait is not that of the
    old ones."""

    def asked(*_: object, **__: object) -> list[int]:
        open_waits.note_progress()
        return []

    monkeypatch.setattr(module.stacks, "ask", asked)
    with open_waits.waiting("starting"):
        scene.after(0)
        scene.after(61)
        open_waits.raise_interrupt()
        scene.stopped = {}
        scene.after(61)
        open_waits.raise_interrupt()


def test_nobody_stopped_ends_nothing(scene: Scene) -> None:
    scene.stopped = {}
    scene.after(10_000)
    open_waits.raise_interrupt()


def test_a_main_thread_that_does_not_hear_is_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    scene.after(0)
    scene.after(60)
    scene.after(15)
    assert left == []
    scene.after(1)
    assert left == [1] and isinstance(scene.ended[0], DeadlinePassed)


def test_a_run_that_has_begun_again_is_as_good_as_new(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", pytest.fail)
    scene.after(0)
    scene.after(60)
    monkeypatch.setattr(open_waits, "_last_progress", scene.now + 1)
    scene.after(30)
    scene.stopped = {}
    scene.after(30)


def test_one_that_has_failed_is_ended_where_a_part_keeps_it_from_leaving(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    scene.stopped_monitor.leaving(RuntimeError("first"), waits_for_save=True)
    scene.after(60)
    assert left == [], "it may wait for a checkpoint"
    scene.stopped_monitor.leaving(RuntimeError("second"), waits_for_save=False)
    scene.after(16)
    assert left == [1] and [str(error) for error in scene.ended] == ["second"]


def test_it_is_raised_in_a_main_thread_that_does_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, with a real process that is stopped."""
    monkeypatch.setattr("slime.deadlines.STOPPED_PROCESSES_RAISE", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.send_signal(signal.SIGSTOP)
        monitor = StoppedProcessMonitor(0.4, tmp_path / "driver.log", lambda error: None)
        try:
            monitor.begin()
            with pytest.raises(DeadlinePassed, match=f"pid {process.pid} "):
                process.wait(60)
        finally:
            monitor.end()
            process.kill()
