"""Whatever dies: what has been generated is neither lost nor generated again, and what comes out is what an unbroken
run makes, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import PATIENCE, Driver, StartHeld, World, wait_until, wait_while_running

pytestmark = pytest.mark.slow

_SAMPLES = 2  # per group, in the world of these runs
_GROUPS = 4  # per rollout
_REWARD = ("--custom-rm-path", "tests.support.hold.reward_and_count")
#: Between the last score of a group and the record of it in the journal.
_NOTING_SECONDS = 0.3
#: Between a kill and the end of the processes that its run ends with.
_DYING_SECONDS = 1.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("lost"))


@dataclass
class Scores:
    """What `reward_and_count` wrote: per group and process, when each of its samples was scored."""

    folder: Path
    kills: list[float] = field(default_factory=list)

    def by_group(self) -> dict[int, dict[str, list[float]]]:
        found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in (self.folder / "scored").read_text().splitlines():
            index, pid, at = line.split()
            found[int(index) // _SAMPLES][pid].append(float(at))
        return found

    def generated_twice(self) -> list[int]:
        """Groups that were finished more than once. One whose process was ended right when it had been scored, by a
        kill or by what another's kill led to, was not finished yet."""
        twice = []
        for group, times in self.by_group().items():
            whole = [max(own) for own in times.values() if len(own) >= _SAMPLES]
            late = [at for at in whole if any(-_DYING_SECONDS < kill - at < _NOTING_SECONDS for kill in self.kills)]
            surplus = sum(len(own) // _SAMPLES for own in times.values()) - len(late)
            if surplus > 1:
                twice.append(group)
        return sorted(twice)


@pytest.fixture
def begin(world: World, start_held: StartHeld) -> Callable[..., Driver]:
    def start_driver(name: str, *flags: object, script: str = "train.py") -> Driver:
        words = world.resumable(name, *_REWARD, "--deterministic-rollout", *flags)
        return start_held(words, world.outputs / name, script)

    return start_driver


def weights_of(driver: Driver) -> dict[str, torch.Tensor]:
    return load_file(driver.path / "model" / "model.safetensors")


@pytest.mark.full
def test_what_was_finished_is_not_generated_again(begin: Callable[..., Driver], hold: Path) -> None:
    """Killed in the second rollout, before the first checkpoint, with one sample of one group left to score."""
    (hold / "hold-sample-15").touch()
    flags = ("--num-rollout", 2, "--save-interval", 9)
    driver = begin("killed", *flags)
    wait_while_running(driver, (hold / "held-sample-15").exists, "the last sample")
    scores = Scores(hold, [time.time()])
    wait_while_running(driver, lambda: sum(map(len, scores.by_group().values())) == 8, "the others")
    time.sleep(_NOTING_SECONDS)
    driver.signal(signal.SIGKILL)
    driver.end()
    driver.leaves_nothing()
    (hold / "hold-sample-15").unlink()
    journal = sorted(path.name for path in (driver.path / "journal").iterdir())
    assert journal == ["rollout_000000.log", "rollout_000001.log"]

    driver = begin("killed", *flags)
    assert driver.end() == 0, driver.stderr
    assert scores.generated_twice() == [] and len(scores.by_group()) == 8
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/num_restored_groups"] for row in rows] == [_GROUPS, _GROUPS - 1]
    assert not (driver.path / "journal").exists(), "a run that is finished needs it no more"


@pytest.mark.full
def test_the_only_engine_and_the_trainer_at_once(begin: Callable[..., Driver], hold: Path) -> None:
    """Engines come back with a push, trainers when nothing is generated any more: neither may wait for the other."""
    (hold / "hold-request-1").touch()
    flags = ("--num-rollout", 3, "--save-interval", 1, "--use-fault-tolerance", "--max-restarts", 3)
    flags = (*flags, "--custom-generate-function-path", "tests.support.hold.generate")
    driver = begin("both", *flags)
    wait_while_running(driver, (hold / "held-request-1").exists, "the second rollout")
    scores = Scores(hold, [time.time()])
    assert strike(driver, "engine") and strike(driver, "trainer")
    (hold / "hold-request-1").unlink()
    assert driver.end() == 0, driver.stderr
    assert driver.steps() == [1, 2, 3] and scores.generated_twice() == []
    assert "the trainer is started again, 1 of 3 times" in driver.stderr and "going on with rollout 1" in driver.stderr


# -- injections ----------------------------------------------------------------------------------------------

#: Who is killed → what its command line has; the driver is itself, "all" its whole family.
VICTIMS = {
    "driver": "",
    "all": "",
    "trainer": "ray::TrainerActor",
    "engine": "slime.engines.embedded",
    "rollout actor": "ray::RolloutActor",
    "router": "sglang::router",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}


def strike(driver: Driver, victim: str) -> bool:
    """Kill it; false where it is not there."""
    if victim == "driver":
        driver.signal(signal.SIGKILL)
        return True
    if victim == "all":
        found = driver.family("")
        driver.signal(signal.SIGKILL)
    else:
        found = driver.family(VICTIMS[victim])
    for process in found:
        process.kill()
    return bool(found)


def broken(
    begin: Callable[[], Driver], scores: Scores, num_rollouts: int, victims: list[str], dice: random.Random
) -> tuple[Driver, list[str]]:
    """A run that is struck at random moments, and begun again when it has ended of it, until it is finished.

    Returns:
        Its last driver, and what was struck when, in words.
    """
    driver, told = begin(), []
    for victim in victims:
        goal, delay = min(num_rollouts - 1, len(driver.steps()) + dice.randint(0, 2)), dice.uniform(0.0, 3.0)
        driver = reach(begin, driver, goal)
        time.sleep(delay)
        if driver.process.poll() is None and strike(driver, victim):
            scores.kills.append(time.time())
            told.append(f"{victim} at step {len(driver.steps())}")
    return reach(begin, driver, num_rollouts, to_its_end=True), told


def reach(begin: Callable[[], Driver], driver: Driver, step: int, *, to_its_end: bool = False) -> Driver:
    """Until the run has made this step, begun again as often as it has ended before; the driver that did it."""
    while True:
        if not to_its_end:
            done = partial(_has_reached, driver, step)
            wait_until(done, f"step {step}")
            if driver.process.poll() is None:
                return driver
        status = driver.end(PATIENCE * 4)
        wait_until(
            lambda driver=driver: not driver.living(), "its processes are gone"
        )  # shared memory: the next launch
        if status == 0:  # finished
            return driver
        assert "Traceback" not in driver.stderr, driver.stderr
        driver = begin()


def _has_reached(driver: Driver, step: int) -> bool:
    return len(driver.steps()) >= step or driver.process.poll() is not None


@pytest.fixture(scope="module")
def unbroken() -> dict[tuple[object, ...], dict[str, torch.Tensor]]:
    """Weights that runs which nothing happened to ended with, by their script and length: made once for all seeds."""
    return {}


@pytest.mark.parametrize(
    ("script", "seed", "count"),
    [
        ("train.py", 1, 5),
        *(pytest.param("train.py", seed, 12, marks=pytest.mark.full) for seed in range(2, 11)),
        *(pytest.param("train_async.py", seed, 12, marks=pytest.mark.full) for seed in range(11, 20)),
    ],
)
def test_kills_at_random_leave_what_an_unbroken_run_leaves(
    begin: Callable[..., Driver],
    hold: Path,
    unbroken: dict[tuple[object, ...], dict[str, torch.Tensor]],
    script: str,
    seed: int,
    count: int,
) -> None:
    dice = random.Random(seed)
    num_rollouts = 2 * count
    apart = ["--no-colocate"] if "async" in script else []
    flags: tuple[Any, ...] = ("--num-rollout", num_rollouts, "--save-interval", 3, "--use-fault-tolerance", *apart)
    flags = (*flags, "--max-restarts", 99, "--rollout-shuffle")
    victims = [dice.choice(list(VICTIMS)) for _ in range(count)]
    scores = Scores(hold)
    name = f"struck-{seed}-{script}"
    driver, told = broken(lambda: begin(name, *flags, script=script), scores, num_rollouts, victims, dice)
    assert scores.generated_twice() == [], told
    assert len(scores.by_group()) >= num_rollouts * _GROUPS
    struck, steps = weights_of(driver), driver.steps()
    assert steps == list(range(1, num_rollouts + 1)), told

    if (script, count) not in unbroken:
        calm = begin(f"unbroken-{seed}-{script}", *flags, script=script)
        assert calm.end() == 0, calm.stderr
        unbroken[script, count] = weights_of(calm)
    expected = unbroken[script, count]
    assert all(torch.equal(struck[name], expected[name]) for name in expected), told
