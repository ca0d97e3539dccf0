"""Whatever dies: what has been generated is neither lost nor generated again, and what comes out is
what an unbroken run makes, bit for bit."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.__main__ import main
from slime.page.folders import RunWatch
from tests.support.processes import (
    PATIENCE,
    Driver,
    StartHeld,
    World,
    wait_until,
    wait_while_running,
)
from tests.support.random_kills import (
    AHEAD,
    GRADED,
    GROUPS,
    NOTING_SECONDS,
    SAMPLES,
    VICTIMS,
    Scores,
    length_of,
    let_through,
    strike,
    trained_indices,
    trained_on,
)

pytestmark = pytest.mark.slow

_REWARD = ("--custom-rm-path", "tests.support.hold.reward_and_count")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("lost"))


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
    """Killed in the second rollout, before the first checkpoint, with one sample of one group left
    to score."""
    (hold / "hold-sample-15").touch()
    flags = ("--num-rollout", 2, "--save-interval", 9)
    driver = begin("killed", *flags)
    wait_while_running(driver, (hold / "held-sample-15").exists, "the last sample")
    scores = Scores(hold, [time.time()])
    wait_while_running(driver, lambda: sum(map(len, scores.by_group().values())) == 8, "the others")
    time.sleep(NOTING_SECONDS)
    driver.signal(signal.SIGKILL)
    driver.end()
    driver.leaves_nothing()
    (hold / "hold-sample-15").unlink()
    journal = sorted(path.name for path in (driver.path / "journal").iterdir())
    assert journal == ["pushes.jsonl", "rollout_000000.log", "rollout_000001.log"]

    driver = begin("killed", *flags)
    assert driver.end() == 0, driver.stderr
    assert scores.generated_twice() == [] and len(scores.by_group()) == 8
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/num_restored_groups"] for row in rows] == [GROUPS, GROUPS - 1]
    assert not (driver.path / "journal").exists(), "a run that is finished needs it no more"


@pytest.mark.full
def test_what_others_try_does_not_disturb_a_run(
    begin: Callable[..., Driver],
    world: World,
    hold: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its third rollout, with two checkpoints, a journal, and one sample left to score."""
    monkeypatch.chdir(tmp_path)
    flags = ("--num-rollout", 3, "--save-interval", 1, "--lr", 1e-2)
    alone = begin("alone", *flags)
    assert alone.end() == 0, alone.stderr
    (hold / "hold-sample-23").touch()
    driver = begin("beside", *flags)
    wait_while_running(driver, (hold / "held-sample-23").exists, "the last sample")
    time.sleep(NOTING_SECONDS)
    run, before = str(driver.path), kept(driver.path)
    same = [*world.resumable("beside", *_REWARD, "--deterministic-rollout"), *map(str, flags)]
    tried = {
        "the same command": ["train", *same],
        "another rate": ["train", *same[:-1], "5e-1"],
        "back": ["train", *same, "--ckpt-step", "0"],
        "resume": ["resume", run],
        "report": ["report", run],
        "bundle": ["bundle", run, "--output", str(tmp_path / "x.tar.gz")],
        "explain": ["explain", run],
    }
    ends = {name: main(words) for name, words in tried.items()}
    watched = RunWatch(driver.path)
    watched.index.update(watched.stages())
    watched.index.close()
    assert kept(driver.path) == before
    assert ends == dict.fromkeys(tried, 0) | dict.fromkeys(
        ("the same command", "another rate", "back", "resume"), 2
    )
    (hold / "hold-sample-23").unlink()
    # of a checkpoint, or of the end
    assert main(["export", run, "--to", str(tmp_path / "x")]) == 0
    assert driver.end() == 0, driver.stderr
    expected = weights_of(alone)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(driver).items())
    assert said(driver) == said(alone)


def said(driver: Driver) -> list[list[Any]]:
    """Of each rollout's samples: what was generated, and how likely it was."""
    names = ("index", "prompt", "response", "reward", "log_probs", "weight_versions")
    return [
        [[sample.get(name) for name in names] for sample in rollout]
        for rollout in trained_on(driver, 3)
    ]


def kept(folder: Path) -> dict[str, bytes]:
    """What a run reads, or tells of itself, but for its logs."""
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("report.html", ".lock")
    ]
    return {str(path): path.read_bytes() for path in files if path.parent.name != "logs"}


@pytest.mark.full
def test_another_learning_rate_behind_a_kill(begin: Callable[..., Driver], hold: Path) -> None:
    """Killed in the second rollout, before the first checkpoint. The weights of the first step are
    no more when the run goes on at another rate, and what they had generated is generated again:
    the end is that of a run that had this rate
    from the start. What the weights of the beginning have generated is not."""
    (hold / "hold-sample-15").touch()
    flags = ("--num-rollout", 2, "--save-interval", 9)
    driver = begin("rate", *flags, "--lr", 3e-2)
    wait_while_running(driver, (hold / "held-sample-15").exists, "the last sample")
    scores = Scores(hold)
    wait_while_running(driver, lambda: sum(map(len, scores.by_group().values())) == 8, "the others")
    time.sleep(NOTING_SECONDS)
    driver.signal(signal.SIGKILL)
    driver.end()
    (hold / "hold-sample-15").unlink()

    driver = begin("rate", *flags, "--lr", 1e-3)
    assert driver.end() == 0, driver.stderr
    assert (
        driver.stderr.count("the run continues from its checkpoint in another way than before") == 1
    )
    assert sorted(group for group, lives in scores.by_group().items() if len(lives) > 1) == [
        4,
        5,
        6,
        7,
    ]
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row.get("rollout/num_restored_groups", 0) for row in rows] == [GROUPS, 0]
    assert rows[0]["perf/tokens_per_gpu_per_sec"] == 0 < rows[1]["perf/tokens_per_gpu_per_sec"], (
        "what it generated"
    )

    unbroken = begin("unbroken-rate", *flags, "--lr", 1e-3)
    assert unbroken.end() == 0, unbroken.stderr
    expected = weights_of(unbroken)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(driver).items())


@pytest.mark.full
def test_the_only_engine_and_the_trainer_at_once(begin: Callable[..., Driver], hold: Path) -> None:
    """Engines come back with a push, trainers when nothing is generated any more: neither may wait
    for the other."""
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
    assert (
        "the trainer is started again, 1 of 3 times" in driver.stderr
        and "going on with rollout 1" in driver.stderr
    )


# -- injections ------------------------------------------------------------------------------------


#: Who is killed → what its command line has; the driver is itself, "all" its whole family.
def broken(
    begin: Callable[[], Driver],
    scores: Scores,
    num_rollouts: int,
    victims: list[str],
    dice: random.Random,
    longest_stop: float = 6.0,
    first: int = 0,
    drawn: int = GROUPS,
) -> tuple[Driver, list[str]]:
    """A run that is struck at random moments, and begun again when it has ended of it, until it is
    finished. Every other victim is stopped for a while instead of killed. Rollouts wait for their
    rewards (`GRADED`) before they come so far that not all can be struck.

    Args:
        num_rollouts: `length_of` a run for so many victims.
        first: step before which nothing is struck; 0 strikes launches, too.
        drawn: groups of a rollout, those that a filter drops among them.
    Returns:
        Its last driver, and what was struck when, in words.
    """
    pace, told = (num_rollouts - AHEAD) // len(victims), list[str]()
    let_through(scores.folder, 0)
    driver = begin()
    for number, victim in enumerate(victims):
        goal, delay = first + pace * number + dice.randint(0, pace - 1), dice.uniform(0.0, 1.0)
        seconds = dice.uniform(0.5, longest_stop) if number % 2 else 0.0
        let_through(scores.folder, drawn * (goal + AHEAD - 1))
        is_struck = False
        while not is_struck:  # or the run had ended of what was before
            driver = reach(begin, driver, goal)
            time.sleep(delay)
            wait_until(partial(_is_there_or_ended, driver, victim), f"a {victim} at step {goal}")
            assert driver.process.poll() != 0, (
                f"finished before a {victim} was struck, after {told}"
            )
            is_struck = driver.process.poll() is None and strike(driver, victim, seconds)
        scores.kills.append(time.time())
        told.append(
            f"{victim} at step {len(driver.steps())}"
            + (f", for {seconds:.1f} s" if seconds else "")
        )
    (scores.folder / "hold-groups-from").unlink()
    assert len(told) == len(victims)
    return reach(begin, driver, num_rollouts, to_its_end=True), told


def _is_there_or_ended(driver: Driver, victim: str) -> bool:
    return (
        victim in ("driver", "all")
        or bool(driver.family(VICTIMS[victim]))
        or driver.process.poll() is not None
    )


def reach(
    begin: Callable[[], Driver], driver: Driver, step: int, *, to_its_end: bool = False
) -> Driver:
    """Until the run has made this step, begun again as often as it has ended before; the driver
    that did it."""
    while True:
        if not to_its_end:
            done = partial(_has_reached, driver, step)
            wait_until(done, f"step {step}")
            if driver.process.poll() is None:
                return driver
        status = driver.end(PATIENCE * 4)
        # shared memory: the next launch
        wait_until(lambda driver=driver: not driver.living(), "its processes are gone")
        if status == 0:  # finished
            return driver
        assert "Traceback" not in driver.stderr, driver.stderr
        driver = begin()


def _has_reached(driver: Driver, step: int) -> bool:
    return len(driver.steps()) >= step or driver.process.poll() is not None


@pytest.fixture(scope="module")
def unbroken() -> dict[tuple[object, ...], dict[str, torch.Tensor]]:
    """Weights that runs which nothing happened to ended with, by their script and length: made once
    for all seeds."""
    return {}


#: Strikes of a long run, and its rollouts for each: so many are done again after half of them.
_STRIKES, _PACE = 12, 3
#: Script → seeds of its long runs.
_SEEDS = {"train.py": range(2, 11), "train_async.py": range(11, 20)}
#: Script → victims of its short run: of those that cost a launch or a trainer as few as tell
#: something.
_SHORT = {
    "train.py": ["reward worker", "router", "all", "engine", "reward worker"],
    "train_async.py": ["engine", "router", "reward worker", "engine", "router"],
}


def victims_of(script: str, seed: int, dice: random.Random) -> list[str]:
    """In the order in which they are struck."""
    if seed not in _SEEDS[script]:
        return list(_SHORT[script])
    return [dice.choice(list(VICTIMS)) for _ in range(_STRIKES)]


def test_as_many_points_are_struck_as_are_promised() -> None:
    """At least 200 in `make test-full` and 10 in `make test`, and everybody; `broken` leaves none
    out."""
    runs = [
        victims_of(script, seed, random.Random(seed))
        for script, seeds in _SEEDS.items()
        for seed in seeds
    ]
    assert sum(map(len, runs)) >= 200 and {victim for run in runs for victim in run} == set(VICTIMS)
    killed, stopped = ({victim for run in runs for victim in run[half::2]} for half in (0, 1))
    assert killed == stopped == set(VICTIMS)
    assert sum(map(len, _SHORT.values())) >= 10 and set(_SHORT) == set(_SEEDS)


@pytest.mark.parametrize(
    ("script", "seed"),
    [
        *((script, 1) for script in _SHORT),
        *(
            pytest.param(script, seed, marks=pytest.mark.full)
            for script, seeds in _SEEDS.items()
            for seed in seeds
        ),
    ],
)
def test_kills_and_stops_at_random_leave_what_an_unbroken_run_leaves(
    begin: Callable[..., Driver], hold: Path, unbroken: dict[Any, Any], script: str, seed: int
) -> None:
    dice = random.Random(seed)
    victims, is_short = victims_of(script, seed, dice), seed not in _SEEDS[script]
    num_rollouts = length_of(len(victims), 1 if is_short else _PACE)
    apart = ["--no-colocate"] if "async" in script else []
    flags: tuple[Any, ...] = (
        "--num-rollout",
        num_rollouts,
        "--save-interval",
        3,
        "--use-fault-tolerance",
        *apart,
    )
    flags = (*flags, *GRADED, "--max-restarts", 99, "--rollout-shuffle")
    scores = Scores(hold)
    name = f"struck-{seed}-{script}"
    start = partial(begin, name, *flags, script=script)
    cheap: dict[str, Any] = {"longest_stop": 1.5, "first": 1} if is_short else {}
    driver, told = broken(start, scores, num_rollouts, victims, dice, **cheap)
    assert driver.steps() == list(range(1, num_rollouts + 1)), told
    assert scores.generated_twice() == [], told
    assert trained_indices(driver, num_rollouts) == list(range(num_rollouts * GROUPS * SAMPLES)), (
        told
    )
    if is_short and apart:
        return  # a run to compare with would take another launch: the long ones have one
    struck = weights_of(driver)
    if (script, num_rollouts) not in unbroken:
        calm = begin(f"unbroken-{seed}-{script}", *flags, script=script)
        assert calm.end() == 0, calm.stderr
        unbroken[script, num_rollouts] = weights_of(calm)
    expected = unbroken[script, num_rollouts]
    assert all(torch.equal(struck[name], expected[name]) for name in expected), told


#: Options → script, flags, who is struck two times of three.
_OPTIONS: dict[str, tuple[str, tuple[object, ...], list[str]]] = {
    "pieces": ("train.py", (*GRADED, "--rollout-request-tokens", 1), []),
    "paced": (
        "train_async.py",
        (
            *GRADED,
            "--no-colocate",
            "--async-buffer-size",
            3,
            "--max-staleness",
            1,
            "--rollout-request-tokens",
            2,
        ),
        [],
    ),
    "reward workers": (
        "train_async.py",
        ("--no-colocate", *GRADED, "--rm-num-workers", 2),
        ["reward worker"],
    ),
}
_FEWER = 6


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "seed"), [(name, seed) for name in _OPTIONS for seed in (31, 32)]
)
def test_options_that_kills_and_stops_must_not_change(
    begin: Callable[..., Driver], hold: Path, unbroken: dict[Any, Any], options: str, seed: int
) -> None:
    script, flags, more = _OPTIONS[options]
    dice, num_rollouts = random.Random(seed), length_of(_FEWER, _PACE)
    flags = (*flags, "--num-rollout", num_rollouts, "--save-interval", 3, "--use-fault-tolerance")
    flags = (*flags, "--max-restarts", 99)
    victims = [
        dice.choice(more if more and number % 3 else list(VICTIMS)) for number in range(_FEWER)
    ]
    name, scores = f"{options.replace(' ', '-')}-{seed}", Scores(hold)
    driver, told = broken(
        partial(begin, name, *flags, script=script), scores, num_rollouts, victims, dice
    )
    assert driver.steps() == list(range(1, num_rollouts + 1)), told
    assert scores.generated_twice() == [], told
    struck = weights_of(driver)
    if options not in unbroken:
        calm = begin(f"unbroken-{name}", *flags, script=script)
        assert calm.end() == 0, calm.stderr
        unbroken[options] = weights_of(calm)
    assert all(
        torch.equal(struck[name], expected) for name, expected in unbroken[options].items()
    ), told


#: What depends on timing → its flags.
_CHOOSING = {
    "over-sampling": (),
    "partial": (
        "--partial-rollout",
        "--rollout-request-tokens",
        2,
        "--rollout-max-response-len",
        24,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "seed"), [(name, seed) for name in _CHOOSING for seed in (51, 52)]
)
def test_groups_that_are_put_back_and_dropped_under_kills_and_stops(
    begin: Callable[..., Driver], hold: Path, options: str, seed: int
) -> None:
    """Which groups a rollout takes depends on timing, in a second life, too. But each is trained on
    once, and none that was finished is finished again with other tokens."""
    dice, num_rollouts = random.Random(seed), length_of(_FEWER, _PACE)
    flags = (
        "--no-colocate", "--async-buffer-size", 2, "--over-sampling-batch-size", 6,
        "--no-deterministic-rollout",
    )  # fmt: skip
    flags = (
        *flags,
        "--dynamic-sampling-filter-path",
        "tests.support.hold.drop_every_third",
        *GRADED,
    )
    flags = (*flags, *_CHOOSING[options], "--num-rollout", num_rollouts, "--save-interval", 3)
    flags = (*flags, "--use-fault-tolerance", "--max-restarts", 99)
    victims = [dice.choice(list(VICTIMS)) for _ in range(_FEWER)]
    start = partial(begin, f"{options}-{seed}", *flags, script="train_async.py")
    driver, told = broken(start, Scores(hold), num_rollouts, victims, dice, drawn=6)
    assert driver.steps() == list(range(1, num_rollouts + 1)), told
    indices = trained_indices(driver, num_rollouts)
    assert len(indices) == len(set(indices)) == num_rollouts * GROUPS * SAMPLES, told
    assert not any(index // SAMPLES % 3 == 2 for index in indices), told
    assert finished_differently(hold) == {}, told


def finished_differently(hold: Path) -> dict[str, set[str]]:
    """Groups that were finished more than once with other tokens or log-probs, by what
    `drop_every_third` wrote."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in (hold / "judged").read_text().splitlines():
        index, content = line.split()
        found[index].add(content)
    return {index: contents for index, contents in found.items() if len(contents) > 1}


@pytest.mark.full
@pytest.mark.parametrize("seed", [41, 42])
def test_ancestry_in_flight_under_kills_and_stops(
    begin: Callable[..., Driver], world: World, hold: Path, seed: int
) -> None:
    """What is generated then depends on timing. But every group is trained on once, none is older
    than the bound, and the versions of a sample's tokens never go back. Evaluations go on beside
    it."""
    dice, num_rollouts = random.Random(seed), length_of(_FEWER, _PACE)
    flags = (
        "--no-colocate", "--update-weights-in-flight", "--async-buffer-size", 2,
        "--max-staleness", 1,
    )  # fmt: skip
    flags = (
        *flags,
        "--rollout-request-tokens",
        2,
        "--rollout-max-response-len",
        24,
        "--no-deterministic-rollout",
    )
    flags = (
        *flags,
        "--eval-prompt-data",
        "sums",
        f"{world.inputs / 'train.jsonl'}@[0:4]",
        "--eval-interval",
        4,
    )
    flags = (
        *flags,
        "--num-rollout",
        num_rollouts,
        "--save-interval",
        3,
        "--use-fault-tolerance",
        *GRADED,
    )
    flags = (*flags, "--max-restarts", 99)
    victims = [dice.choice(list(VICTIMS)) for _ in range(_FEWER)]
    start = partial(begin, f"flight-{seed}", *flags, script="train_async.py")
    driver, told = broken(start, Scores(hold), num_rollouts, victims, dice)
    assert driver.steps() == list(range(1, num_rollouts + 1)), told
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/num_samples"] for row in rows] == [GROUPS * SAMPLES] * len(rows), told
    assert not any(row["rollout/staleness/num_too_old"] for row in rows), told
    indices = trained_indices(driver, num_rollouts)
    assert len(indices) == len(set(indices)) == num_rollouts * GROUPS * SAMPLES, told
    for sample in (sample for samples in trained_on(driver, num_rollouts) for sample in samples):
        versions = [version for _, _, version in sample["token_spans"]]
        assert versions == sorted(versions), (told, sample)
