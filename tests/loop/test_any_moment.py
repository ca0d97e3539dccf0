"""A launch that is hit by a signal at any moment leaves no process behind and a state that is
true."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.moments import hit
from tests.support.processes import World

pytestmark = [pytest.mark.slow, pytest.mark.full]

_LONGER_THAN_A_RUN = 600.0
#: Before a run listens to a signal, it ends the process in the system's way; then in the run's own.
_STATUSES = {
    signal.SIGTERM: {-signal.SIGTERM, 0},
    signal.SIGINT: {-signal.SIGINT, 130},
    signal.SIGQUIT: {-signal.SIGQUIT, 131},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("moments"))


def strike(world: World, name: str, seconds: float, number: signal.Signals) -> dict[str, Any]:
    flags = world.flags(name, "--custom-rm-path", "tests.support.moments.reward_with_daemons")
    return hit(seconds, number, flags, Path(world.outputs / name))


@pytest.fixture(scope="module")
def whole(world: World) -> dict[str, Any]:
    """A run that nothing happens to."""
    return strike(world, "whole", _LONGER_THAN_A_RUN, signal.SIGKILL)


def test_daemons_of_a_reward_end_with_a_run_that_finishes(whole: dict[str, Any]) -> None:
    assert (whole["status"], whole["state"], whole["survivors"]) == (0, "finished", []), whole[
        "stderr"
    ]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_survives_the_drivers_sigkill(
    world: World, whole: dict[str, Any], seed: int
) -> None:
    found = strike(
        world, f"killed-{seed}", random.Random(seed).uniform(0.0, whole["lasted"]), signal.SIGKILL
    )
    assert found["survivors"] == [], found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", list(_STATUSES))
def test_other_signals_leave_a_true_state(
    world: World, whole: dict[str, Any], number: signal.Signals, seed: int
) -> None:
    seconds = random.Random(f"{number} {seed}").uniform(0.0, whole["lasted"])
    found = strike(world, f"{number.name}-{seed}", seconds, number)
    assert found["survivors"] == [], found
    if found["was_hit"] and found["state"] != "finished":  # its end was under way already
        assert found["status"] in _STATUSES[number] and found["state"] in (None, "stopped"), found
