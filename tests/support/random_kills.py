"""Runs that are killed at random moments and resumed, compared with runs that nothing happened to.

    python -m tests.support.random_kills FOLDER --seconds 300      goes on with the plan
    python -m tests.support.random_kills FOLDER --compare          says how it stands

Each run of the plan takes some kills (SIGKILL) of any process, also while it comes up, and is begun
again whenever it ended of one. A line of FOLDER/kills.jsonl says what was killed when, and
everything that is wrong with the end: steps, samples, what was generated twice, and processes that
were left 5 s after an end. Its weights are kept, to be compared bit by bit with those of an
undisturbed run, which the plan makes too. What is not finished when the seconds are over is killed,
and goes on with the next call."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from slime.processes.tree import adopt_orphans, end_all, has_ended
from tests.support.moments import LIMIT_SECONDS, running_below
from tests.support.processes import PATIENCE, Driver, World, start, wait_until

SAMPLES = 2  # per group, in the world of these runs
GROUPS = 4  # per rollout
#: Between the last score of a group and the record of it in the journal.
NOTING_SECONDS = 0.3
#: Between a kill and the end of the processes that its run ends with.
_DYING_SECONDS = 1.0


@dataclass
class Scores:
    """What `reward_and_count` wrote: per group and process, when each of its samples was scored."""

    folder: Path
    kills: list[float] = field(default_factory=list)

    def by_group(self) -> dict[int, dict[str, list[float]]]:
        found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in (self.folder / "scored").read_text().splitlines():
            index, pid, at = line.split()
            found[int(index) // SAMPLES][pid].append(float(at))
        return found

    def generated_twice(self) -> list[int]:
        """Groups that were finished more than once. One whose process was ended right when it had
        been scored, by a kill or by what another's kill led to, was not finished yet."""
        twice = []
        for group, times in self.by_group().items():
            whole = [max(own) for own in times.values() if len(own) >= SAMPLES]
            late = [
                at
                for at in whole
                if any(-_DYING_SECONDS < kill - at < NOTING_SECONDS for kill in self.kills)
            ]
            surplus = sum(len(own) // SAMPLES for own in times.values()) - len(late)
            if surplus > 1:
                twice.append(group)
        return sorted(twice)


VICTIMS = {
    "driver": "",
    "all": "",
    "trainer": "ray::TrainerActor",
    "engine": "slime.embedded",
    "rollout actor": "ray::RolloutActor",
    "router": "sglang::router",
    "reward worker": "slime.rollout.rewards.math_grading",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
    "holder": "slime/processes/tree.py",
}
#: A reward that asks them.
GRADED = ("--custom-rm-path", "tests.support.hold.reward_by_worker", "--rm-num-workers", 1)


def strike(driver: Driver, victim: str, seconds: float = 0.0) -> bool:
    """Kill it, or stop it for so many seconds; false where it is not there."""
    found = [psutil.Process(driver.process.pid)] if victim in ("driver", "all") else []
    if victim != "driver":
        found += driver.family(VICTIMS[victim])
    driver.family("")  # from now on it is known, whoever dies
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP if seconds else signal.SIGKILL)
    time.sleep(seconds)
    for process in found if seconds else ():
        with suppress(psutil.NoSuchProcess):  # whoever noticed has killed it
            process.send_signal(signal.SIGCONT)
    return bool(found)


#: Rollouts beyond the step at which a victim is to be struck that go on, so that it is struck in
#: their midst.
AHEAD = 4


def length_of(num_victims: int, pace: int) -> int:
    """Rollouts of a run in which so many are struck, about one in ``pace`` rollouts."""
    return pace * num_victims + AHEAD


def let_through(folder: Path, groups: int) -> None:
    """So many groups get a reward; the others wait."""
    (folder / "hold-groups-from.new").write_text(str(groups))
    (folder / "hold-groups-from.new").rename(folder / "hold-groups-from")


def trained_indices(driver: Driver, num_rollouts: int) -> list[int]:
    """Of all samples that were trained on, sorted; one that was trained on twice is there twice."""
    return sorted(
        sample["index"] for samples in trained_on(driver, num_rollouts) for sample in samples
    )


def trained_on(driver: Driver, num_rollouts: int) -> list[list[dict[str, Any]]]:
    """Of each rollout: the samples of its record."""
    files = [
        driver.path / "samples" / f"rollout_{number:06d}.jsonl" for number in range(num_rollouts)
    ]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


# -- runs that are killed --------------------------------------------------------------------------

_TOLERANT = ("--use-fault-tolerance", "--max-restarts", 99)
_TWO_RANKS = ("--actor-num-gpus-per-node", 2)
_APART = ("--no-colocate",)
#: Name → script and flags.
KINDS: dict[str, tuple[str, tuple[object, ...]]] = {
    "sync, tolerant": ("train.py", _TOLERANT),
    "sync, two ranks, async save, tolerant": (
        "train.py",
        (*_TWO_RANKS, "--async-save", *_TOLERANT),
    ),
    "async, async save": ("train_async.py", (*_APART, "--async-save")),
    "async, two ranks, async save, tolerant": (
        "train_async.py",
        (*_APART, *_TWO_RANKS, "--async-save", *_TOLERANT),
    ),
    "sync": ("train.py", ()),
}
#: Kills of a run.
_KILLS = 6
_MAX_LAUNCHES = 20
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


class OutOfTimeError(Exception):
    """The seconds of this call are over."""


class Struck:
    """A run that is struck.

    Args:
        deadline: `time.monotonic` from which on `OutOfTimeError` is raised.
    """

    def __init__(self, world: World, kind: str, seed: int, deadline: float) -> None:
        self.deadline = deadline
        script, flags = KINDS[kind]
        self.script, self.world = script, world
        self.dice = random.Random(f"{kind} {seed}")
        self.out = Outcome(kind, seed)
        self.length = length_of(_KILLS, 1)
        self.name = "".join(letter if letter.isalnum() else "-" for letter in f"{kind}-{seed}")
        self.hold = world.outputs / f"{self.name}.hold"
        self.state = self.hold / "state.json"
        self.hold.mkdir(parents=True, exist_ok=True)
        length: tuple[object, ...] = ("--num-rollout", self.length, "--save-interval", 3)
        self.flags = (*length, "--deterministic-rollout", "--rollout-shuffle", *GRADED, *flags)
        self.scores = Scores(self.hold)
        if self.state.exists():
            state = json.loads(self.state.read_text())
            self.out, self.scores.kills = Outcome(**state["out"]), state["kills"]
            self.dice.seed(f"{kind} {seed} {len(self.out.kills)}")
        self.driver = self.begin()

    def begin(self) -> Driver:
        self.out.launches += 1
        words = self.world.resumable(self.name, *self.flags)
        self.began = time.monotonic()
        return start(
            words,
            self.world.outputs / self.name,
            self.script,
            prefix=("env",),  # no fork, whose server would count as left behind
            SLIME_TEST_HOLD=str(self.hold),
        )

    def ended(self) -> bool:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        return self.driver.process.poll() is not None or has_ended(self.driver.process.pid)

    def end(self) -> int:
        """Wait for the driver's end; says what it leaves."""
        wait_until(self.ended, "the driver ends", 3 * PATIENCE)
        status = self.driver.end()
        ended = time.monotonic()
        while (left := running_below()) and time.monotonic() - ended < LIMIT_SECONDS:
            time.sleep(0.05)
        self.out.slowest_end = max(self.out.slowest_end, round(time.monotonic() - ended, 2))
        if left:
            self.out.wrong.append(f"left after {self.out.kills[-1:]}: {left}")
            end_all()
        if "Traceback" in self.driver.stderr:
            self.out.wrong.append(
                f"traceback after {self.out.kills[-1:]}: {self.driver.stderr[-2000:]}"
            )
        return status

    def _reach(self, step: int) -> None:
        while True:
            wait_until(
                lambda: len(self.driver.steps()) >= step or self.ended(),
                f"step {step}",
                3 * PATIENCE,
            )
            if not self.ended():
                return
            self._again()

    def _again(self) -> None:
        if self.end() == 0:
            raise AssertionError(f"finished too early, after {self.out.kills}")
        if self.out.launches >= _MAX_LAUNCHES:
            raise AssertionError(f"does not go on: {self.driver.stderr[-2000:]}")
        self.driver = self.begin()

    def strike(self, number: int, victim: str) -> None:
        """One kill: at a step, or while the driver comes up, where it has just been started."""
        let_through(self.hold, GROUPS * (number + AHEAD))
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
                self.out.kills.append(
                    f"{victim} at step {steps}"
                    if steps
                    else f"{victim} {since:.1f} s after a start"
                )
                return
            self.scores.kills.pop()  # it is not there yet
            time.sleep(0.05)

    def run(self, kept: Path) -> Outcome:
        """Strike it, let it finish, and keep its weights.

        Raises:
            OutOfTimeError: it is not finished; it was killed, and goes on another time.
        """
        began = time.monotonic()
        try:
            for number in range(len(self.out.kills), _KILLS if self.out.seed else 0):
                self.strike(number, self.dice.choice(list(VICTIMS)))
            (self.hold / "hold-groups-from").unlink(missing_ok=True)
            while self.end() != 0:
                assert self.out.launches < _MAX_LAUNCHES, self.driver.stderr[-2000:]
                self.driver = self.begin()
            self._check()
            shutil.copyfile(self.driver.path / "model" / "model.safetensors", kept)
        except AssertionError as error:
            self.out.wrong.append(str(error))
        except OutOfTimeError:
            self._put_off(time.monotonic() - began)
            raise
        finally:
            self.driver.clean_up()
        self.out.seconds = round(self.out.seconds + time.monotonic() - began, 1)
        return self.out

    def _put_off(self, seconds: float) -> None:
        self.deadline = math.inf
        if not self.ended():
            since, steps = time.monotonic() - self.began, len(self.driver.steps())
            self.scores.kills.append(time.time())
            strike(self.driver, "driver")
            self.out.kills.append(
                f"driver at step {steps}" if steps else f"driver {since:.1f} s after a start"
            )
            self.end()
        if not self.out.seed:  # it is to be undisturbed
            shutil.rmtree(self.driver.path)
            shutil.rmtree(self.hold)
            return
        self.out.seconds = round(self.out.seconds + seconds, 1)
        self.state.write_text(json.dumps({"out": asdict(self.out), "kills": self.scores.kills}))

    def _check(self) -> None:
        wrong, driver = self.out.wrong, self.driver
        if driver.steps() != list(range(1, self.length + 1)):
            wrong.append(f"steps {driver.steps()}")
        if twice := self.scores.generated_twice():
            wrong.append(f"groups {twice} were generated twice")
        if trained_indices(driver, self.length) != list(range(self.length * GROUPS * SAMPLES)):
            wrong.append("samples were lost or trained on twice")


def weights_of(folder: Path, kind: str, seed: int) -> Path:
    """Where the weights of a run are kept; seed 0: those of the undisturbed one, which kinds
    share."""
    script, flags = KINDS[kind]
    ranks = 2 if _TWO_RANKS[0] in flags else 1
    name = f"{kind}-{seed}" if seed else f"undisturbed-{script}-{ranks}"
    return folder / f"{name.replace(' ', '-').replace(',', '')}.safetensors"


def compare(folder: Path) -> str:
    """Say what the kills have done, in a few lines."""
    rows = [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]
    compared, differ, wrong = 0, [], []
    for row in rows:
        kept, calm = (
            weights_of(folder, row["kind"], row["seed"]),
            weights_of(folder, row["kind"], 0),
        )
        wrong += row["wrong"]
        if kept.exists() and calm.exists():
            compared += len(row["kills"])
            mine, theirs = load_file(kept), load_file(calm)
            if set(mine) != set(theirs) or not all(
                torch.equal(mine[name], theirs[name]) for name in theirs
            ):
                differ.append(f"{row['kind']} {row['seed']}")
    kills = [kill for row in rows for kill in row["kills"]]
    by_victim = {victim: sum(kill.startswith(victim) for kill in kills) for victim in VICTIMS}
    lines = [
        f"{len(kills)} kills in {len(rows)} runs with {sum(row['launches'] for row in rows)} "
        f"launches: {by_victim}"
    ]
    lines += [f"weights compared bit by bit behind {compared} of them: {differ or 'all equal'}"]
    lines += [
        f"slowest end of all processes: {max((row['slowest_end'] for row in rows), default=0)} s"
    ]
    return "\n".join([*lines, *(f"wrong: {one}" for one in wrong)])


def plan() -> Iterator[tuple[str, int]]:
    """A round of all kinds, then the undisturbed runs, then further rounds."""
    for seed in (1, 0, *range(2, 100)):
        for kind in KINDS:
            yield kind, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="nothing is begun or killed later"
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    folder: Path = given.folder
    if given.compare:
        print(compare(folder))
        return
    adopt_orphans()
    deadline = time.monotonic() + given.seconds
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "kills.jsonl"
    lines = output.read_text().splitlines() if output.exists() else []
    done: list[dict[str, Any]] = [json.loads(line) for line in lines]
    world = World(folder / "world" / "inputs", folder / "world" / "outputs")
    if not world.inputs.exists():
        World.create(folder / "world")
    with suppress(OutOfTimeError):
        for kind, seed in plan():
            kept = weights_of(folder, kind, seed)
            if kept.exists() or any((row["kind"], row["seed"]) == (kind, seed) for row in done):
                continue
            if seed and sum(len(row["kills"]) for row in done) >= given.kills:
                break
            struck = Struck(world, kind, seed, deadline)
            done.append(asdict(struck.run(kept)))
            if seed:
                with open(output, "a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            print(done[-1], flush=True)


if __name__ == "__main__":
    main()
