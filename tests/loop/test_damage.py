"""Damage on the disk: the run goes on from what is whole, says so, generates nothing twice, and
ends with the weights of a run to which nothing happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.directory import check_contents
from tests.support.checkpoint_dirs import flip_a_byte
from tests.support.processes import Driver, StartHeld, World, wait_while_running

pytestmark = pytest.mark.slow

_FLAGS = (
    "--custom-rm-path",
    "tests.support.hold.reward_and_count",
    "--deterministic-rollout",
    "--num-rollout",
    4,
)
_FLAGS = (*_FLAGS, "--save-interval", 1, "--max-restarts", 1)
_DIES = ("--custom-megatron-before-train-step-hook-path", "tests.support.hold.die_once")
# a sample of the fourth rollout, of eight samples each: when it is generated, three are saved
_HELD = 27


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights at the end of a run that nothing happened to."""
    from tests.support.processes import start

    folder = tmp_path_factory.mktemp("unbroken-scores")
    with start(
        world.resumable("unbroken", *_FLAGS),
        world.outputs / "unbroken",
        SLIME_TEST_HOLD=str(folder),
    ) as driver:
        assert driver.end() == 0, driver.stderr
        return weights_of(driver)


def weights_of(driver: Driver) -> dict[str, torch.Tensor]:
    return load_file(driver.path / "model" / "model.safetensors")


def scored(hold: Path) -> Counter[int]:
    """How often each sample was."""
    return Counter(int(line.split()[0]) for line in (hold / "scored").read_text().splitlines())


def begin_and_hold(
    world: World, start_held: StartHeld, hold: Path, name: str, *flags: object
) -> Driver:
    """Three rollouts are trained on and saved, all but one group of the fourth are in the
    journal."""
    (hold / f"hold-sample-{_HELD}").touch()
    words = world.flags(
        name,
        "--save",
        world.outputs / name / "checkpoints",
        "--save-min-seconds",
        0,
        *_FLAGS,
        *flags,
    )
    driver = start_held(words, world.outputs / name)
    wait_while_running(driver, (hold / f"held-sample-{_HELD}").exists, "the last rollout")
    wait_while_running(driver, lambda: len(scored(hold)) == 31, "the other samples of it")
    return driver


def kill_and_resume(
    driver: Driver, start_held: StartHeld, hold: Path, harm: Callable[[], object] = lambda: None
) -> Driver:
    driver.signal(signal.SIGKILL)
    driver.end()
    driver.leaves_nothing()
    harm()
    (hold / f"hold-sample-{_HELD}").unlink()
    again = start_held(["resume", str(driver.path)], driver.path, "slime")
    assert again.end() == 0, again.stderr
    return again


def ends_as_unbroken(driver: Driver, unbroken: dict[str, torch.Tensor]) -> None:
    assert driver.steps() == [1, 2, 3, 4]
    weights = weights_of(driver)
    assert all(torch.equal(weights[name], unbroken[name]) for name in unbroken)


def flip_newest(driver: Driver) -> Path:
    newest = driver.path / "checkpoints" / "iter_0000002"
    [file] = newest.glob("*.distcp")
    flip_a_byte(file)
    return newest


def was_skipped(driver: Driver, newest: Path) -> None:
    told = driver.stderr
    assert told.count(f"checkpoint {newest} is skipped, __0_0.distcp is corrupt") == 1, told
    assert f"going on from {newest.parent / 'iter_0000001'}" in told
    assert newest.with_name("iter_0000002.damaged").is_dir()


@pytest.mark.full  # what is loaded instead is in tests/unit/test_checkpoint_skipped.py
def test_a_flipped_byte_costs_the_steps_of_one_checkpoint_and_no_samples(
    world: World, start_held: StartHeld, hold: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    driver = begin_and_hold(world, start_held, hold, "flipped")
    again = kill_and_resume(driver, start_held, hold, lambda: flip_newest(driver))
    was_skipped(again, driver.path / "checkpoints" / "iter_0000002")
    group = {_HELD, _HELD - 1}  # its other sample was scored when the run was killed
    assert {index for index, times in scored(hold).items() if times > 1} <= group
    assert len(scored(hold)) == 32
    ends_as_unbroken(again, unbroken)


@pytest.mark.full
def test_a_flipped_byte_where_the_trainer_alone_begins_again(
    world: World, start_held: StartHeld, hold: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    driver = begin_and_hold(world, start_held, hold, "flipped-beside", *_DIES)
    newest = flip_newest(driver)
    (driver.path / "die-3").touch()
    (hold / f"hold-sample-{_HELD}").unlink()
    assert driver.end() == 0, driver.stderr
    was_skipped(driver, newest)
    assert "going on with rollout 2" in driver.stderr
    assert set(scored(hold).values()) == {1} and len(scored(hold)) == 32
    ends_as_unbroken(driver, unbroken)


@pytest.mark.full
def test_a_journal_that_was_cut_anywhere(
    world: World, start_held: StartHeld, hold: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    """What was cut off is generated again, and said; every sample is trained on once."""
    driver = begin_and_hold(world, start_held, hold, "cut")
    newest = driver.path / "journal" / "rollout_000003.log"

    def cut() -> None:
        size = newest.stat().st_size
        with newest.open("r+b") as file:
            file.truncate(random.Random(7).randrange(1, size))

    again = kill_and_resume(driver, start_held, hold, cut)
    assert f"{newest.name} was damaged" in (driver.path / "logs" / "rollout.log").read_text()
    assert {index for index, times in scored(hold).items() if times > 1} <= set(range(24, 32))
    assert len(scored(hold)) == 32
    ends_as_unbroken(again, unbroken)


# -- a file system that is read-only from one moment on --------------------------------------------


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Callable[[], None]]]:
    """``read_only(folder)`` makes it so for whatever is opened from then on; what it returns takes
    that back."""
    made: list[Path] = []

    def make(folder: Path) -> Callable[[], None]:
        mounted = os.system(f"mount --bind {folder} {folder} 2>/dev/null") == 0
        if mounted:
            made.append(folder)
        if not mounted or os.system(f"mount -o remount,bind,ro {folder} 2>/dev/null"):
            pytest.skip("needs root to make a folder read-only for everybody")
        return lambda: undo(folder)

    def undo(folder: Path) -> None:
        made.remove(folder)
        os.system(f"umount -l {folder}")

    yield make
    for folder in list(made):
        undo(folder)


@pytest.mark.full
@pytest.mark.parametrize("which", ["save", "run"])
def test_a_folder_that_becomes_read_only(
    world: World,
    start_held: StartHeld,
    hold: Path,
    unbroken: dict[str, torch.Tensor],
    read_only: Callable[[Path], Callable[[], None]],
    which: str,
) -> None:
    """One message says which folder, the checkpoint before is whole, and the run goes on when it is
    writable again."""
    driver = begin_and_hold(world, start_held, hold, f"read-only-{which}")
    checkpoints = driver.path / "checkpoints"
    take_back = read_only(checkpoints if which == "save" else driver.path)
    (hold / f"hold-sample-{_HELD}").unlink()
    assert driver.end() == 2, driver.stderr
    told = driver.stderr
    assert "Traceback" not in told and told.count("error: ") == 1, told
    assert (
        "Read-only file system" in told
        and str(checkpoints if which == "save" else driver.path) in told
    )
    take_back()
    check_contents(checkpoints / "iter_0000002")
    again = start_held(["resume", str(driver.path)], driver.path, "slime")
    assert again.end() == 0, again.stderr
    assert set(scored(hold).values()) == {1}, "all was in the journal"
    ends_as_unbroken(again, unbroken)


# -- version numbers -------------------------------------------------------------------------------


@pytest.mark.full
def test_versions_of_two_lives_are_told_apart(
    world: World, start_held: StartHeld, hold: Path
) -> None:
    """Pushed after every second rollout, saved after each. The run goes back to the first
    checkpoint, whose weights were not pushed, and the journal has samples of version 2, which was
    pushed after it."""
    driver = begin_and_hold(world, start_held, hold, "versions", "--update-weights-interval", 2)

    def lose_two() -> None:
        for iteration in (1, 2):
            shutil.rmtree(driver.path / "checkpoints" / f"iter_{iteration:07d}")

    again = kill_and_resume(driver, start_held, hold, lose_two)
    rows = [row for row in again.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/staleness/max"] for row in rows] == [0, 1, 0, 1], (
        "as in a run that nothing happened to"
    )
    pushed = [row["perf/weight_version"] for row in rows if "perf/weight_version" in row]
    assert pushed == [4, 5], "1 and 2 in the first life, 3 at the second launch"
