"""While nothing is heard from those who are waited for, lines name them, with what they do."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slime.cluster import slow_waits as module
from slime.cluster.slow_waits import SlowWaitLogger, own_actors, stopped_parts
from slime.processes.host import own_addresses
from tests.support.processes import wait_until

HERE = "127.0.0.1"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(name: str, pid: int | None = None, host: str = HERE) -> Any:
    return SimpleNamespace(name=name, process=None if pid is None else (pid, host))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = list(caplog.messages)
    caplog.clear()
    return found


def test_this_host_knows_itself() -> None:
    assert HERE in own_addresses()


def test_lines_come_at_growing_intervals_while_somebody_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    clock, used = Clock(), itertools.count(0.0, 20.0)
    monkeypatch.setattr(module, "_cpu_seconds", lambda pid: next(used))
    silence = SlowWaitLogger("training", clock)
    said = {}
    for second in range(500):
        clock.now = float(second)
        silence.poll([worker("trainer-0", os.getpid()), worker("trainer-1")])
        if lines := lines_of(caplog):
            [said[second]] = lines
    assert list(said) == [60, 120, 240, 480]
    assert said[60] == (
        f"training: nothing heard for 60 s from trainer-0 (pid {os.getpid()} on {HERE}: 20 s of "
        "CPU in 30 s), "
        "trainer-1 (which has not started)"
    )


def test_a_sign_begins_the_silence_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    silence = SlowWaitLogger("generating", clock)
    for second in range(130):
        clock.now = float(second)
        silence.poll([worker("rollout")], state=second // 50)
    assert lines_of(caplog) == []
    clock.now = 161.0
    silence.poll([worker("rollout")], state=2, details=lambda: "engine http://e: no answer")
    assert lines_of(caplog) == [
        "generating: nothing heard for 61 s from rollout (which has not started); engine "
        "http://e: no answer"
    ]


def test_who_is_stopped_is_named_every_minute(
    sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """For real: one that is waited for, then one that only belongs to the run."""
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: sleeper.pid in stopped_parts(), "it is stopped")
    assert stopped_parts()[sleeper.pid].startswith(f"pid {sleeper.pid} (python")
    clock = Clock()
    silence = SlowWaitLogger("pushing weights", clock)
    for second in range(200):
        clock.now = float(second)
        silence.poll([worker("trainer-0", sleeper.pid)])
    lines = lines_of(caplog)
    assert len(lines) == 3 and all(
        f"trainer-0 (pid {sleeper.pid} on {HERE}: stopped)" in line for line in lines
    )
    assert "stopped besides" not in lines[0]
    other = SlowWaitLogger("training", clock)
    clock.now = 300.0
    other.poll([worker("trainer-1", 1, "192.0.2.77")])
    [line] = lines_of(caplog)
    assert line.startswith("training: nothing heard for 101 s from trainer-1 (pid 1 on 192.0.2.77)")
    assert f"stopped besides: pid {sleeper.pid} (python" in line
    sleeper.send_signal(signal.SIGCONT)


def test_an_idle_one_is_told_and_so_is_one_that_is_gone(
    sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    silence = SlowWaitLogger("saving a checkpoint", clock)
    for second in (30, 60, 90, 120):
        clock.now = float(second)
        silence.poll([worker("trainer-0", sleeper.pid)])
    assert [line.rpartition(": ")[2] for line in lines_of(caplog)] == ["idle)", "idle)"]


def test_an_actor_works_when_its_server_does() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", script], process_group=0) as process:
        try:
            wait_until(lambda: module._cpu_seconds(process.pid) >= 0.5, "its child has worked")
            own = psutil.Process(process.pid).cpu_times()
            assert own.user + own.system < 0.5
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_actors_are_known_by_their_names() -> None:
    names = ("ray::TrainerActor.train", "ray::IDLE", "python")
    before = set(own_actors())  # of a Ray that other tests have started
    started = [
        subprocess.Popen([name, "-c", "input()"], executable=sys.executable, stdin=-1)
        for name in names
    ]
    try:
        wait_until(lambda: len(set(own_actors()) - before) == 2, "both have their names")
        assert set(own_actors()) - before == {process.pid for process in started[:2]}
    finally:
        for process in started:
            process.kill()
            process.communicate()
