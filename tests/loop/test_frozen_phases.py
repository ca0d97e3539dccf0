"""No silent hang: each part of a run is stopped (SIGSTOP) in each phase. A line names it, and the
run ends or goes on.

A cell holds the run where a phase begins, stops a part, waits for the line, and lets the phase go
on.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import PATIENCE, Driver, StartHeld, World, wait_while_running
from tests.support.sglang_servers import fake_environment

pytestmark = pytest.mark.slow

#: Of a run that a stopped part keeps from going on; seconds that such a part may be stopped.
_MINUTES = 0.25
_TITLES = {
    "trainer": "ray::TrainerActor",
    "rollout actor": "ray::RolloutActor",
    "engine actor": "ray::EngineActor",
    "engine": "slime.embedded",  # of the stand-in of SGLang: `_SGLANG`
    "router": "sglang::router",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}
_SGLANG = "slime.engines.sglang.engine_process"
#: "sleep" is the hand-over of memory between engines and trainer, without a GPU by the stand-in of
#: SGLang alone.
_PHASES = (
    "launch", "generate", "evaluate", "train", "sleep", "update_weights", "save", "export", "end"
)  # fmt: skip
#: Ray asks the GCS for a place for whatever is started, and engine actors only watch their servers:
#: nobody needs either between the launch and the end.
_NOT_NEEDED = ("GCS", "engine actor")
#: The quickest ones.
_SOON = {("train", "trainer")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("frozen-phases"))


def flags_of(world: World, name: str, phase: str, *more: object) -> list[str]:
    """A run of two rollouts that saves after both, and writes its model."""
    folder = world.outputs / name / "checkpoints"
    flags = [
        "--save",
        folder,
        "--num-rollout",
        2,
        "--save-interval",
        1,
        "--distributed-timeout-minutes",
        _MINUTES,
    ]
    flags += ["--custom-megatron-init-path", "tests.support.hold.hold_phases"]
    flags += ["--custom-rm-path", "tests.support.hold.reward"]
    if phase == "evaluate":
        flags += [
            "--eval-prompt-data",
            "sums",
            f"{world.inputs / 'train.jsonl'}@[0:4]",
            "--eval-interval",
            2,
        ]
    if phase == "sleep":
        flags += ["--rollout-engine", "sglang", "--num-gpus-per-node", 8]
    return world.flags(name, *flags, *more)


def held_at(phase: str) -> str:
    """What `tests.support.hold` calls it: rewards of rollout 0 are those of an evaluation before
    it, too."""
    return "0" if phase in ("generate", "evaluate") else phase


def stop(driver: Driver, part: str, phase: str = "") -> list[psutil.Process]:
    titles = [_TITLES[part], *([_SGLANG] if part == "engine" else [])]

    def there() -> list[psutil.Process]:
        family = [process for title in titles for process in driver.family(title)]
        return [process for process in family if process.status() != psutil.STATUS_STOPPED]

    # the parts of a launch come up beside each other, in any order, and so they go
    found = there() if phase == "end" else wait_while_running(driver, there, f"a {part}")
    for process in found:
        process.send_signal(signal.SIGSTOP)
    return found


def state_name(driver: Driver) -> str:
    return str(json.loads((Path(driver.path) / "run.json").read_text())["stages"][""]["state"])


def cells() -> list[object]:
    return [
        pytest.param(
            phase,
            part,
            marks=() if (phase, part) in _SOON else pytest.mark.full,
            id=f"{phase}-{part}",
        )
        for phase in _PHASES
        for part in _TITLES
    ]


def goes_on(phase: str, part: str) -> bool | None:
    """Whether the run ends as it should although a part is stopped; None where it may, if it is up
    already."""
    if phase == "launch" and part != "trainer":
        return None
    if phase == "export" and part != "trainer":
        return True  # nobody else is needed any more
    return phase == "end" or part in _NOT_NEEDED


@pytest.mark.parametrize(("phase", "part"), cells())
def test_a_part_that_is_stopped_is_named_and_ends_its_wait(
    phase: str, part: str, world: World, start_held: StartHeld, hold: Path
) -> None:
    name = f"{phase}-{part}".replace(" ", "-")
    driver, stopped, first = stopped_at(
        phase, part, flags_of(world, name, phase), world.outputs / name, start_held, hold
    )
    if phase != "end":  # which waits for nobody for long, and needs no line
        wait_while_running(driver, lambda: first.search(driver.stderr), f"the line of {part}")
    (hold / f"hold-{held_at(phase)}").unlink()
    ended = driver.end(PATIENCE), state_name(driver)
    expected = goes_on(phase, part)
    if ended != (0, "finished") or expected is False:
        error = "\n".join(driver.error())
        assert ended == (1, "failed") and not expected, driver.stderr[-3000:]
        # the monitor's error, or that of a wait whose own deadline passed in the same moment
        assert (
            re.search(rf"pid {stopped.pid} \([^\n]* (is|has been) stopped", error)
            and "Traceback" not in error
        ), error
        assert phase == "launch" or re.search(
            r"weights: (version \d was|none were) pushed", error
        ), error
        if "has been stopped since" in error:
            stacks = (driver.path / "logs" / "driver.log").read_text()
            assert "most recent call first" in stacks and 'session.py", line' in stacks, (
                "the driver's own"
            )
    driver.leaves_nothing()


def stopped_at(
    phase: str, part: str, flags: list[str], path: Path, start_held: StartHeld, hold: Path
) -> tuple[Driver, psutil.Process, re.Pattern[str]]:
    """A run that is held where a phase begins, with one part stopped: the driver, the part, and the
    line about it."""
    (hold / f"hold-{held_at(phase)}").touch()
    driver = start_held(
        flags, path, **(fake_environment(hold / "calls.jsonl") if phase == "sleep" else {})
    )
    wait_while_running(driver, (hold / f"held-{held_at(phase)}").exists, phase)
    # at the end, it may have gone already
    [stopped, *_] = stop(driver, part, phase) or [psutil.Process(driver.process.pid)]
    return (
        driver,
        stopped,
        re.compile(
            rf"pid {stopped.pid} \([^\n]*\) has been stopped since \d\d:\d\d:\d\d; the driver "
        ),
    )


@pytest.mark.full
@pytest.mark.parametrize("part", ["raylet", "GCS"])
def test_a_daemon_of_ray_that_is_stopped_while_ray_starts(
    part: str, world: World, start_held: StartHeld
) -> None:
    """The main thread is in `ray.init`, which has its own deadlines, and may hold Python's lock:
    nobody speaks until it gives up. Then somebody says why."""
    name = f"init-{part}"
    driver = start_held(flags_of(world, name, "launch"), world.outputs / name)
    wait_while_running(driver, lambda: driver.family(_TITLES[part]), part)
    [stopped] = stop(driver, part)
    assert driver.end() in (1, 2) and state_name(driver) == "failed", driver.stderr[-3000:]
    error = "\n".join(driver.error())
    assert f"pid {stopped.pid} (" in error and re.search("(is|has been) stopped", error), error
    driver.leaves_nothing()


# -- what goes on ----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_part_that_goes_on_in_time_changes_nothing(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    flags = flags_of(world, "in-time", "train")
    driver, stopped, first = stopped_at(
        "train", "trainer", flags, world.outputs / "in-time", start_held, hold
    )
    wait_while_running(driver, lambda: first.search(driver.stderr), "the line")
    stopped.send_signal(signal.SIGCONT)
    log = driver.path / "logs" / "driver.log"
    wait_while_running(
        driver, lambda: f"pid {stopped.pid} runs again" in log.read_text(), "that it goes on"
    )
    (hold / "hold-train").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    driver.leaves_nothing()


@pytest.mark.full
def test_a_trainer_that_is_stopped_is_replaced(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    flags = flags_of(world, "replaced", "train", "--max-restarts", 1)
    driver, stopped, first = stopped_at(
        "train", "trainer", flags, world.outputs / "replaced", start_held, hold
    )
    wait_while_running(driver, lambda: first.search(driver.stderr), "the line")
    (hold / "hold-train").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    assert (
        "the trainer is started again, 1 of 1 times" in driver.stderr and not stopped.is_running()
    )
    driver.leaves_nothing()


@pytest.mark.full
def test_an_engine_that_is_stopped_is_replaced_before_that(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    """With --use-fault-tolerance its health check is quicker, also where trainer and engine take
    turns."""
    care = [
        "--use-fault-tolerance",
        "--rollout-health-check-timeout",
        2,
        "--rollout-health-check-interval",
        1,
    ]
    flags = flags_of(world, "cared-for", "generate", *care)
    driver, _, _ = stopped_at(
        "generate", "engine", flags, world.outputs / "cared-for", start_held, hold
    )
    wait_while_running(driver, lambda: "gave no sign of life" in driver.stderr, "it is killed")
    (hold / "hold-0").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    driver.leaves_nothing()


@pytest.mark.full
@pytest.mark.parametrize("phase", ["sleep", "update_weights", "paused"])
def test_an_engine_that_is_stopped_around_a_push_is_replaced(
    phase: str, world: World, start_held: StartHeld, hold: Path
) -> None:
    """Where no health check is under way: as it is to take memory, before it is paused, and before
    it gets weights."""
    care = [
        "--use-fault-tolerance",
        "--rollout-health-check-timeout",
        2,
        "--rollout-health-check-interval",
        1,
    ]
    name = f"cared-for-{phase}"
    flags = flags_of(world, name, phase, *care)
    driver, stopped, _ = stopped_at(phase, "engine", flags, world.outputs / name, start_held, hold)
    (hold / f"hold-{phase}").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    assert not stopped.is_running()
    driver.leaves_nothing()


@pytest.mark.full
def test_a_reward_worker_that_is_stopped_is_replaced(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    """It has graded rollout 0, and does not come to rollout 1: its samples count as wrong."""
    (hold / "hold-request-1").touch()
    flags = world.flags("graded", "--rm-type", "math", without="--custom-rm-path")
    flags += ["--custom-generate-function-path", "tests.support.hold.generate"]
    driver = start_held(flags, world.outputs / "graded")
    wait_while_running(driver, (hold / "held-request-1").exists, "requests of rollout 1")
    workers = driver.family("slime.rollout.rewards.math_grading")
    assert workers
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    (hold / "hold-request-1").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    driver.leaves_nothing()


# -- the driver, whom nobody sees ------------------------------------------------------------------


@pytest.mark.full
def test_a_driver_that_is_stopped_and_goes_on_loses_nothing(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    """The others come to the end of what they were asked for, and wait."""
    (hold / "hold-1").touch()
    driver = start_held(flags_of(world, "paused", "generate"), world.outputs / "paused")
    wait_while_running(driver, (hold / "held-1").exists, "rollout 1")
    driver.signal(signal.SIGSTOP)
    (hold / "hold-1").unlink()
    log = driver.path / "logs" / "rollout.log"
    size = log.stat().st_size
    # longer than a part may be stopped: the driver's clock has gone on, too
    time.sleep(60 * _MINUTES + 5)
    assert driver.family("ray::TrainerActor") and log.stat().st_size >= size
    driver.signal(signal.SIGCONT)
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr[-3000:]
    driver.leaves_nothing()


@pytest.mark.full
def test_a_driver_that_is_stopped_and_killed_takes_all_with_it(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    (hold / "hold-0").touch()
    driver = start_held(flags_of(world, "gone", "generate"), world.outputs / "gone")
    wait_while_running(driver, (hold / "held-0").exists, "rollout 0")
    driver.signal(signal.SIGSTOP)
    driver.signal(signal.SIGKILL)
    driver.end()
    driver.leaves_nothing(30)
