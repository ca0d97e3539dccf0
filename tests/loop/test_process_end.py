"""However a run ends: its exit status and folder tell how, and no process, port or shared memory is
left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import PATIENCE, Driver, StartHeld, World, wait_held, wait_until

pytestmark = pytest.mark.slow

Start = Callable[..., Driver]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("ends"))


@pytest.fixture
def begin(world: World, start_held: StartHeld, hold: Path) -> Start:
    """``begin(name, *flags)``: a driver whose rewards obey ``hold``, and leave processes behind."""
    (hold / "daemons").touch()

    def start_driver(
        name: str, *flags: object, script: str = "train.py", streams: tuple[int, int] | None = None
    ) -> Driver:
        words = world.resumable(name, "--custom-rm-path", "tests.support.hold.reward", *flags)
        return start_held(words, world.outputs / name, script, streams)

    return start_driver


def crash_of(driver: Driver) -> dict[str, str]:
    [folder] = (driver.path / "crash").iterdir()
    assert (folder / "traceback.txt").read_text()
    return json.loads((folder / "crash.json").read_text())


def state_of(driver: Driver) -> str:
    return json.loads((driver.path / "run.json").read_text())["stages"][""]["state"]


def check_closed(ports: set[int]) -> None:
    # of engine and router; others' may take those above meanwhile
    reserved = {port for port in ports if port < 32000}
    assert len(reserved) >= 2, "there were ports while it ran"
    for port in reserved:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))  # raises when somebody still listens


@pytest.mark.parametrize(
    "script", ["train.py", pytest.param("train_async.py", marks=pytest.mark.full)]
)
def test_sigterm_saves_and_the_same_command_goes_on_though_nobody_reads(
    begin: Start, hold: Path, script: str
) -> None:
    (hold / "hold-1").touch()
    name, apart = (
        f"sigterm-{script}",
        ["--async-save", "--num-rollout", 3, *(["--no-colocate"] if "async" in script else [])],
    )
    driver = begin(name, *apart, script=script)
    wait_held(driver, hold, 1)
    ports = driver.ports()
    driver.signal(signal.SIGTERM)  # as `timeout` does: the process, then its group
    os.killpg(driver.process.pid, signal.SIGTERM)  # at once, before the driver can have ended
    assert driver.end() == 0, driver.stderr
    driver.leaves_nothing()
    check_closed(ports)
    assert driver.steps() == [1] and state_of(driver) == "stopped"
    assert (
        driver.path / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text().strip() == "0"
    assert (driver.path / "report.html").exists() and not (driver.path / "crash").exists()

    # stdout is a full device, the reader of stderr goes away in the first rollout that follows, and
    # the terminal in the second
    (hold / "hold-2").touch()
    (hold / "held-1").unlink()
    reader, writer = os.pipe()
    with open("/dev/full", "w") as full, open(reader, "rb"):
        streams = full.fileno(), writer
        driver = begin(name, *apart, script=script, streams=streams)
        os.close(writer)
        wait_held(driver, hold, 1)
    (hold / "hold-1").unlink()
    wait_held(driver, hold, 2)
    driver.signal(signal.SIGHUP, group=True)
    (hold / "hold-2").unlink()
    assert driver.end() == 0
    driver.leaves_nothing()
    assert driver.steps() == [1, 2, 3] and state_of(driver) == "finished"
    log = (driver.path / "logs" / "driver.log").read_text()
    assert log.count("stderr cannot be written any more (Broken pipe): the run continues") == 1
    assert "Traceback" not in log


@pytest.mark.full  # how such a mistake is told is in tests/first_hour/test_cannot_learn.py
def test_a_mistake_in_user_code_keeps_what_was_saved(begin: Start, hold: Path) -> None:
    """Also what is still being written when it happens."""
    (hold / "raise-1").touch()
    (hold / "hold-save").touch()
    held = (
        "--save-interval",
        1,
        "--async-save",
        "--custom-megatron-init-path",
        "tests.support.hold.hold_saves",
    )
    driver = begin("raises", *held)
    wait_until(
        lambda: "still being written" in driver.stderr or driver.process.poll() is not None,
        "it waits for the save",
    )
    assert (
        not (driver.path / "checkpoints" / "iter_0000000").exists()
        and driver.process.poll() is None
    )
    (hold / "hold-save").unlink()
    assert driver.end() == 2, driver.stderr
    error = driver.error()
    assert len(error) <= 8 and "Traceback" not in driver.stderr
    assert "2 groups have failed in this rollout of 4" in error[0]
    assert (
        "'tests.support.hold.reward' (--custom-rm-path) failed" in error[1]
        and "a mistake in the reward function" in error[1]
    )
    assert str(driver.path / "crash") in error[-1]
    assert f"newest whole checkpoint: {driver.path / 'checkpoints' / 'iter_0000000'}" in error[-2]
    driver.leaves_nothing()
    assert "rollout" in crash_of(driver)["note"] and state_of(driver) == "failed"
    assert (driver.path / "report.html").exists() and driver.steps() == [1]
    assert (driver.path / "checkpoints" / "iter_0000000").is_dir()


def test_ctrl_c_in_the_terminal(begin: Start, hold: Path) -> None:
    (hold / "hold-0").touch()
    driver = begin("ctrl-c")
    wait_held(driver, hold, 0)
    driver.signal(signal.SIGINT, group=True)
    driver.signal(signal.SIGINT, group=True)  # wherever the first one has brought it
    check_interrupted(driver)


@pytest.mark.full
def test_sigterm_while_it_comes_up(begin: Start) -> None:
    driver = begin("early-sigterm")
    log = driver.path / "logs" / "engine-0.log"
    wait_until(lambda: log.exists() or driver.process.poll() is not None, "the engine starts")
    driver.signal(signal.SIGTERM)
    assert driver.end() == 0, driver.stderr
    driver.leaves_nothing()
    assert state_of(driver) == "stopped" and "Traceback" not in driver.stderr


@pytest.mark.full
def test_ctrl_c_for_the_driver_alone_while_it_comes_up(begin: Start) -> None:
    driver = begin("early")
    log = driver.path / "logs" / "engine-0.log"
    wait_until(lambda: log.exists() or driver.process.poll() is not None, "the engine starts")
    driver.signal(signal.SIGINT)
    check_interrupted(driver)


def check_interrupted(driver: Driver) -> None:
    assert driver.end() == 130, driver.stderr
    assert driver.stderr.splitlines()[-1] == "interrupted" and "Traceback" not in driver.stderr
    driver.leaves_nothing()
    assert state_of(driver) == "stopped" and (driver.path / "report.html").exists()


@pytest.mark.full  # random kills are part of make test
def test_kill_9_of_the_driver_and_resume(begin: Start, hold: Path, tmp_path: Path) -> None:
    (hold / "hold-1").touch()
    driver = begin("killed", "--save-interval", 1)
    wait_held(driver, hold, 1)
    ports = driver.ports()
    driver.signal(signal.SIGKILL)
    assert driver.end() == -signal.SIGKILL
    driver.leaves_nothing()
    check_closed(ports)

    (hold / "hold-1").unlink()
    command = [sys.executable, "-m", "slime", "resume", str(driver.path)]
    given: dict[str, Any] = {
        "env": {**os.environ, "SLIME_TEST_HOLD": str(hold)},
        "cwd": tmp_path,
        "timeout": PATIENCE,
    }
    resumed = subprocess.run(command, capture_output=True, text=True, **given)
    assert resumed.returncode == 0, resumed.stderr
    assert driver.steps() == [1, 2] and state_of(driver) == "finished"
    again = subprocess.run(command, capture_output=True, text=True, **given)
    assert again.returncode == 2 and "killed is finished" in again.stderr


@pytest.mark.parametrize(
    ("script", "victim", "name", "told"),
    [
        pytest.param(
            "train.py",
            "ray::TrainerActor",
            "trainer-0",
            "its process ended without a word",
            id="trainer",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "train.py", "slime.embedded", "engine-0", "--use-fault-tolerance", id="engine"
        ),
        pytest.param(
            "train_async.py",
            "sglang::router",
            "router",
            "last lines of its log",
            id="router",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_killed_process_ends_the_run_at_once(
    begin: Start, hold: Path, script: str, victim: str, name: str, told: str
) -> None:
    (hold / "hold-0").touch()
    driver = begin(
        f"without-{name}", *(["--no-colocate"] if "async" in script else []), script=script
    )
    wait_held(driver, hold, 0)
    driver.kill(victim)
    assert driver.end(30) == 1, driver.stderr
    error = driver.error()
    assert name in error[0] and told in "".join(error) and "Traceback" not in driver.stderr
    assert len(error) <= 12
    driver.leaves_nothing()
    assert name in crash_of(driver)["message"] and state_of(driver) == "failed"
    assert (driver.path / "report.html").exists()


@pytest.mark.full
def test_ray_leaves_nothing_when_both_of_its_holders_are_killed_at_once(
    begin: Start, hold: Path
) -> None:
    """Nobody is left who would end what the raylet has started, so that each must end by itself."""
    (hold / "daemons").unlink()
    (hold / "hold-0").touch()
    driver = begin("without-holders")
    wait_held(driver, hold, 0)
    driver.family("")  # from now on it is known, whoever dies
    holders = driver.family("slime/processes/tree.py")
    assert len(holders) == 2
    for holder in holders:
        holder.kill()
    driver.end(PATIENCE)
    driver.leaves_nothing()
