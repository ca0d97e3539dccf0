"""Runs that are killed at random moments and resumed, compared with runs that nothing happened to.

    python -m tests.support.random_kills OUT.jsonl --seconds 300

Each run of the plan takes some kills (SIGKILL) of any process, also while it comes up, and is begun again whenever it
ended of one. A line of the output says what was killed when, and everything that differs from an undisturbed run:
weights bit by bit, steps, samples, what was generated twice, and processes that were left 5 s after an end. A run that
is in the output already is not repeated, so that the plan can be worked through in parts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from slime.process_tree import adopt_orphans, has_ended
from tests.loop.test_nothing_lost import (
    _AHEAD,
    _GRADED,
    _GROUPS,
    _SAMPLES,
    VICTIMS,
    Scores,
    _let_through,
    length_of,
    strike,
    trained_indices,
)
from tests.support.moments import LIMIT_SECONDS
from tests.support.processes import PATIENCE, Driver, World, is_running, start, wait_until

_TOLERANT = ("--use-fault-tolerance", "--max-restarts", 99)
_TWO_RANKS = ("--actor-num-gpus-per-node", 2)
_APART = ("--no-colocate",)
#: Name → script and flags.
KINDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "sync": ("train.py", ()),
    "sync, tolerant": ("train.py", _TOLERANT),
    "sync, two ranks, async save, tolerant": ("train.py", (*_TWO_RANKS, "--async-save", *_TOLERANT)),
    "async, async save": ("train_async.py", (*_APART, "--async-save")),
    "async, two ranks, async save, tolerant": ("train_async.py", (*_APART, *_TWO_RANKS, "--async-save", *_TOLERANT)),
}
#: Kills of a run.
_KILLS = 6
_MOST_LAUNCHES = 20
#: From its start, within which a driver is struck that is not to come up.
_LAUNCH_SECONDS = 20.0


@dataclass
class Outcome:
    kind: str
    seed: int
    kills: list[str] = field(default_factory=list)
    launches: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_end: float = 0.0
    seconds: float = 0.0


class Struck:
    """A run that is struck, in ``folder``."""

    def __init__(self, world: World, kind: str, seed: int) -> None:
        script, flags = KINDS[kind]
        self.script, self.world = script, world
        self.dice = random.Random(f"{kind} {seed}")
        self.out = Outcome(kind, seed)
        self.length = length_of(_KILLS, 1)
        self.name = "".join(letter if letter.isalnum() else "-" for letter in f"{kind}-{seed}")
        self.hold = world.outputs / f"{self.name}.hold"
        self.hold.mkdir(parents=True)
        self.flags = ("--num-rollout", self.length, "--save-interval", 3, "--deterministic-rollout")
        self.flags = (*self.flags, "--rollout-shuffle", *_GRADED, *flags)
        self.scores = Scores(self.hold)
        self.driver = self.begin()

    def begin(self) -> Driver:
        self.out.launches += 1
        words = self.world.resumable(self.name, *self.flags)
        self.began = time.monotonic()
        return start(words, self.world.outputs / self.name, self.script, SLIME_TEST_HOLD=str(self.hold))

    def ended(self) -> bool:
        return self.driver.process.poll() is not None or has_ended(self.driver.process.pid)

    def end(self) -> int:
        """Wait for the driver's end; says what it leaves."""
        wait_until(self.ended, "the driver ends", 3 * PATIENCE)
        status = self.driver.end()
        ended = time.monotonic()
        while (left := _left()) and time.monotonic() - ended < LIMIT_SECONDS:
            time.sleep(0.05)
        self.out.slowest_end = max(self.out.slowest_end, round(time.monotonic() - ended, 2))
        if left:
            self.out.wrong.append(f"left after {self.out.kills[-1:]}: {left}")
            wait_until(lambda: not _left(), "they are gone", PATIENCE)
        if "Traceback" in self.driver.stderr:
            self.out.wrong.append(f"traceback after {self.out.kills[-1:]}: {self.driver.stderr[-2000:]}")
        return status

    def _reach(self, step: int) -> None:
        while True:
            wait_until(lambda: len(self.driver.steps()) >= step or self.ended(), f"step {step}", 3 * PATIENCE)
            if not self.ended():
                return
            self._again()

    def _again(self) -> None:
        if self.end() == 0:
            raise AssertionError(f"finished too early, after {self.out.kills}")
        if self.out.launches >= _MOST_LAUNCHES:
            raise AssertionError(f"does not go on: {self.driver.stderr[-2000:]}")
        self.driver = self.begin()

    def strike(self, number: int, victim: str) -> None:
        """One kill: at a step, or while the driver comes up, where it has just been started."""
        _let_through(self.hold, _GROUPS * (number + _AHEAD))
        if self.ended():
            self._again()
        at_launch = not self.driver.steps() and self.dice.random() < 0.5
        delay = self.dice.uniform(0.0, _LAUNCH_SECONDS if at_launch else 1.0)
        if at_launch:
            time.sleep(max(0.0, self.began + delay - time.monotonic()))
        else:
            self._reach(number)
            time.sleep(delay)
        while True:
            if self.ended():
                self._again()
            since, steps = time.monotonic() - self.began, len(self.driver.steps())
            self.scores.kills.append(time.time())
            if strike(self.driver, victim):
                self.out.kills.append(f"{victim} at step {steps}" if steps else f"{victim} {since:.1f} s after a start")
                return
            self.scores.kills.pop()  # it is not there yet
            time.sleep(0.05)

    def run(self, expected: dict[str, torch.Tensor]) -> Outcome:
        began = time.monotonic()
        try:
            for number in range(_KILLS):
                self.strike(number, self.dice.choice(list(VICTIMS)))
            (self.hold / "hold-groups-from").unlink()
            while self.end() != 0:
                assert self.out.launches < _MOST_LAUNCHES, self.driver.stderr[-2000:]
                self.driver = self.begin()
            self._compare(expected)
        except AssertionError as error:
            self.out.wrong.append(str(error))
        finally:
            self.driver.clean_up()
        self.out.seconds = round(time.monotonic() - began, 1)
        return self.out

    def _compare(self, expected: dict[str, torch.Tensor]) -> None:
        wrong, driver = self.out.wrong, self.driver
        if driver.steps() != list(range(1, self.length + 1)):
            wrong.append(f"steps {driver.steps()}")
        if twice := self.scores.generated_twice():
            wrong.append(f"groups {twice} were generated twice")
        if trained_indices(driver, self.length) != list(range(self.length * _GROUPS * _SAMPLES)):
            wrong.append("samples were lost or trained on twice")
        weights = load_file(driver.path / "model" / "model.safetensors")
        different = [name for name in expected if not torch.equal(weights[name], expected[name])]
        if different or set(weights) != set(expected):
            wrong.append(f"{len(different)} of {len(expected)} weights differ")


def undisturbed(world: World, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the run that nothing happens to; kept in ``folder``."""
    script, flags = KINDS[kind]
    ranks = 2 if _TWO_RANKS[0] in flags else 1
    kept = folder / f"{script}-{ranks}.safetensors"
    if not kept.exists():
        struck = Struck(world, kind, 0)
        status = struck.end()
        assert status == 0 and not struck.out.wrong, (struck.out.wrong, struck.driver.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_bytes((struck.driver.path / "model" / "model.safetensors").read_bytes())
    return load_file(kept)


def _left() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if is_running(process):
                found.append(" ".join(process.cmdline())[:150] or process.name())
        except psutil.NoSuchProcess:
            continue
    return found


def plan() -> Iterator[tuple[str, int]]:
    for seed in range(1, 100):
        for kind in KINDS:
            yield kind, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs and what is compared with")
    parser.add_argument("--seconds", type=float, default=300.0, help="no run begins later")
    parser.add_argument("--kills", type=int, default=60)
    given = parser.parse_args()
    adopt_orphans()
    began = time.monotonic()
    lines = given.output.read_text().splitlines() if given.output.exists() else []
    done: list[dict[str, Any]] = [json.loads(line) for line in lines]
    world = World.create(given.folder / str(int(time.time())))
    for kind, seed in plan():
        if time.monotonic() - began > given.seconds or sum(len(row["kills"]) for row in done) >= given.kills:
            break
        if any((row["kind"], row["seed"]) == (kind, seed) for row in done):
            continue
        expected = undisturbed(world, kind, given.folder / "undisturbed")
        done.append(asdict(Struck(world, kind, seed).run(expected)))
        with open(given.output, "a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(done[-1], flush=True)


if __name__ == "__main__":
    main()
