"""Whatever dies: what has been generated is neither lost nor generated again, and what comes out is what an unbroken
run makes, bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
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
_WORKER = {"reward worker": "slime.rollout.rewards.math_grading"}


def strike(driver: Driver, victim: str, seconds: float = 0.0) -> bool:
    """Kill it, or stop it for so many seconds; false where it is not there."""
    found = [psutil.Process(driver.process.pid)] if victim in ("driver", "all") else []
    if victim != "driver":
        found += driver.family((VICTIMS | _WORKER)[victim])
    driver.family("")  # from now on it is known, whoever dies
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP if seconds else signal.SIGKILL)
    time.sleep(seconds)
    for process in found if seconds else ():
        with suppress(psutil.NoSuchProcess):  # whoever noticed has killed it
            process.send_signal(signal.SIGCONT)
    return bool(found)


def broken(
    begin: Callable[[], Driver],
    scores: Scores,
    num_rollouts: int,
    victims: list[str],
    dice: random.Random,
    stops: bool = False,
) -> tuple[Driver, list[str]]:
    """A run that is struck at random moments, and begun again when it has ended of it, until it is finished.

    Args:
        stops: every other one is stopped for a while instead of killed.
    Returns:
        Its last driver, and what was struck when, in words.
    """
    driver, told = begin(), []
    for number, victim in enumerate(victims):
        goal, delay = min(num_rollouts - 1, len(driver.steps()) + dice.randint(0, 2)), dice.uniform(0.0, 3.0)
        seconds = dice.uniform(0.5, 6.0) if stops and number % 2 else 0.0
        driver = reach(begin, driver, goal)
        time.sleep(delay)
        if driver.process.poll() is None and strike(driver, victim, seconds):
            scores.kills.append(time.time())
            told.append(f"{victim} at step {len(driver.steps())}" + (f", for {seconds:.1f} s" if seconds else ""))
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


def trained_on(driver: Driver, num_rollouts: int) -> list[list[dict[str, Any]]]:
    """Of each rollout: the samples of its record."""
    files = [driver.path / "samples" / f"rollout_{number:06d}.jsonl" for number in range(num_rollouts)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


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


#: Options → script, flags, who is struck two times of three.
_OPTIONS: dict[str, tuple[str, tuple[object, ...], list[str]]] = {
    "pieces": ("train.py", ("--rollout-request-tokens", 1), []),
    "paced": (
        "train_async.py",
        ("--no-colocate", "--async-buffer-size", 3, "--max-staleness", 1, "--rollout-request-tokens", 2),
        [],
    ),
    "reward workers": (
        "train_async.py",
        ("--no-colocate", "--custom-rm-path", "tests.support.hold.reward_by_worker", "--rm-num-workers", 2),
        ["reward worker"],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("options", "seed"), [(name, seed) for name in _OPTIONS for seed in (31, 32)])
def test_options_that_kills_and_stops_must_not_change(
    begin: Callable[..., Driver], hold: Path, unbroken: dict[Any, Any], options: str, seed: int
) -> None:
    """Every other one is stopped for a while instead of killed: who does not answer and then does is no one's loss."""
    script, flags, more = _OPTIONS[options]
    dice, count = random.Random(seed), 6
    flags = (*flags, "--num-rollout", 2 * count, "--save-interval", 3, "--use-fault-tolerance", "--max-restarts", 99)
    victims = [dice.choice(more if more and number % 3 else list(VICTIMS)) for number in range(count)]
    name, scores = f"{options.replace(' ', '-')}-{seed}", Scores(hold)
    driver, told = broken(lambda: begin(name, *flags, script=script), scores, 2 * count, victims, dice, stops=True)
    assert driver.steps() == list(range(1, 2 * count + 1)), told
    assert scores.generated_twice() == [], told
    struck = weights_of(driver)
    if options not in unbroken:
        calm = begin(f"unbroken-{name}", *flags, script=script)
        assert calm.end() == 0, calm.stderr
        unbroken[options] = weights_of(calm)
    assert all(torch.equal(struck[name], expected) for name, expected in unbroken[options].items()), told


@pytest.mark.full
@pytest.mark.parametrize("seed", [41, 42])
def test_pushes_in_flight_under_kills_and_stops(begin: Callable[..., Driver], hold: Path, seed: int) -> None:
    """What is generated then depends on timing. But every group is trained on once, none is older than the bound, and
    the versions of a sample's tokens never go back."""
    dice, count = random.Random(seed), 6
    flags = ("--no-colocate", "--update-weights-in-flight", "--async-buffer-size", 2, "--max-staleness", 1)
    flags = (*flags, "--rollout-request-tokens", 2, "--rollout-max-response-len", 24, "--no-deterministic-rollout")
    flags = (*flags, "--num-rollout", 2 * count, "--save-interval", 3, "--use-fault-tolerance", "--max-restarts", 99)
    victims = [dice.choice(list(VICTIMS)) for _ in range(count)]
    driver, told = broken(
        lambda: begin(f"flight-{seed}", *flags, script="train_async.py"),
        Scores(hold), 2 * count, victims, dice, stops=True,
    )  # fmt: skip
    assert driver.steps() == list(range(1, 2 * count + 1)), told
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/num_samples"] for row in rows] == [_GROUPS * _SAMPLES] * len(rows), told
    assert not any(row["rollout/staleness/num_too_old"] for row in rows), told
    rollouts = trained_on(driver, 2 * count)
    indices = [sample["index"] for samples in rollouts for sample in samples]
    assert len(indices) == len(set(indices)) == 2 * count * _GROUPS * _SAMPLES, told
    for sample in (sample for samples in rollouts for sample in samples):
        versions = [version for _, _, version in sample["token_spans"]]
        assert versions == sorted(versions), (told, sample)
