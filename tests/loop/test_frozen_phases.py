"""No silent hang: each part of a run is stopped (SIGSTOP) in each phase. A line names it, and the run ends or goes on.

A cell holds the run where a phase begins, stops a part, waits for the line, and lets the phase go on.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.processes import Driver, StartHeld, World, wait_while_running

pytestmark = pytest.mark.slow

#: Of a run that a stopped part keeps from going on; seconds that such a part may be stopped.
_MINUTES = 0.25
_TITLES = {
    "trainer": "ray::TrainerActor",
    "rollout actor": "ray::RolloutActor",
    "engine actor": "ray::EngineActor",
    "engine": "slime.engines.embedded",
    "router": "sglang::router",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}
_PHASES = ("launch", "generate", "evaluate", "train", "sleep", "update_weights", "save", "export", "end")
#: Whose freezing keeps nobody from anything in the phases, so that the run ends as it should; elsewhere it fails.
_GOES_ON = {(phase, "engine actor") for phase in _PHASES}
#: The quickest ones.
_SOON = {("train", "trainer"), ("generate", "engine")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("frozen-phases"))


def flags_of(world: World, name: str, phase: str, *more: object) -> list[str]:
    """A run of two rollouts that saves after both, and writes its model."""
    folder = world.outputs / name / "checkpoints"
    flags = ["--save", folder, "--num-rollout", 2, "--save-interval", 1, "--distributed-timeout-minutes", _MINUTES]
    flags += ["--custom-megatron-init-path", "tests.support.hold.hold_phases"]
    flags += ["--custom-rm-path", "tests.support.hold.reward"]
    if phase == "evaluate":
        flags += ["--eval-prompt-data", "sums", f"{world.inputs / 'train.jsonl'}@[0:4]", "--eval-interval", 2]
    return world.flags(name, *flags, *more)


def held_at(phase: str) -> str:
    """What `tests.support.hold` calls it: rewards of rollout 0 are those of an evaluation before it, too."""
    return "0" if phase in ("generate", "evaluate") else phase


def stop(driver: Driver, part: str) -> list[psutil.Process]:
    found = [process for process in driver.family(_TITLES[part]) if process.status() != psutil.STATUS_STOPPED]
    assert found, driver.family("")
    for process in found:
        process.send_signal(signal.SIGSTOP)
    return found


def state_of(driver: Driver) -> str:
    return str(json.loads((Path(driver.path) / "run.json").read_text())["stages"][""]["state"])


def cells() -> list[object]:
    return [
        pytest.param(phase, part, marks=() if (phase, part) in _SOON else pytest.mark.full, id=f"{phase}-{part}")
        for phase in _PHASES
        for part in _TITLES
    ]


@pytest.mark.parametrize(("phase", "part"), cells())
def test_a_part_that_is_stopped_is_named_and_ends_its_wait(
    phase: str, part: str, world: World, start_held: StartHeld, hold: Path
) -> None:
    name = f"{phase}-{part}".replace(" ", "-")
    (hold / f"hold-{held_at(phase)}").touch()
    driver = start_held(flags_of(world, name, phase), world.outputs / name)
    wait_while_running(driver, (hold / f"held-{held_at(phase)}").exists, phase)
    stopped = stop(driver, part)
    first = re.compile(rf"pid {stopped[0].pid} \([^)]*\) is stopped since \d\d:\d\d:\d\d")
    wait_while_running(driver, lambda: first.search(driver.stderr), f"the line of {part}")
    (hold / f"hold-{held_at(phase)}").unlink()
    status = driver.end(120)
    if (phase, part) in _GOES_ON:
        assert (status, state_of(driver)) == (0, "finished"), driver.stderr[-3000:]
    else:
        error = "\n".join(driver.error())
        assert (status, state_of(driver)) == (1, "failed"), driver.stderr[-3000:]
        assert f"pid {stopped[0].pid} (" in error and "is stopped since" in error, error
        assert "Traceback" not in driver.stderr, driver.stderr[-3000:]
    driver.leaves_nothing()
