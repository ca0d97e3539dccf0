"""Parts of a run that are frozen (SIGSTOP): whichever it is, SIGTERM ends the run in a quarter of a
minute."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import StartHeld, World, wait_until

pytestmark = pytest.mark.slow

_LONG = ("--num-rollout", 100_000, "--save-interval", 100_000)
_TITLES = {
    "trainer": "ray::TrainerActor",
    "rollout actor": "ray::RolloutActor",
    "engine": "slime.embedded",
    "router": "sglang::router",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("frozen"))


_SOON = ("trainer",)


@pytest.mark.parametrize(
    "part",
    [name if name in _SOON else pytest.param(name, marks=pytest.mark.full) for name in _TITLES],
)
def test_sigterm_ends_a_run_with_a_frozen_part(
    part: str, world: World, start_held: StartHeld
) -> None:
    name = f"frozen-{part.replace(' ', '-')}"
    driver = start_held(world.resumable(name, *_LONG), world.outputs / name, "train.py")
    wait_until(lambda: len(driver.steps()) >= 2, "two steps")
    frozen = [
        process
        for process in driver.family(_TITLES[part])
        if process.status() != psutil.STATUS_STOPPED
    ]
    assert frozen, driver.family("")
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2)  # until whoever needs it waits for it
    asked = time.monotonic()
    driver.signal(signal.SIGTERM)
    driver.end(60)
    seconds = time.monotonic() - asked
    state = json.loads((Path(driver.path) / "run.json").read_text())["stages"][""]["state"]
    assert seconds < 15 and state == "stopped", (seconds, state, driver.stderr[-3000:])
    driver.leaves_nothing()
