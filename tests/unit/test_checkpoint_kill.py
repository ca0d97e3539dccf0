"""SIGKILL at every file operation of a save and within writes of tensors: the run resumes from a
whole checkpoint.

Each point is a trainer of its own, forked from a server that has imported everything, which resumes
from iteration 0, trains, saves iteration 1 and kills itself on the way.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.directory import check_contents
from slime.checkpoints.load_plan import resolve_load
from slime.processes.host import free_port
from tests.support import megatron_jobs as jobs
from tests.support.megatron_jobs import parameters, single
from tests.support.trainer_ranks import trainer_config

SECONDS = 60
Point = tuple[str, int]
"""("change", 3): at the third file that is made, opened for writing, renamed, removed or brought to
the disk; ("write", 3): with a part of the third piece of tensor data in the file."""
NOWHERE: Point = ("change", 0)
_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}


class Killer:
    """Counts what changes files below ``root`` in this process, and ends the process at the point
    ``at``."""

    def __init__(self, root: Path, at: Point) -> None:
        self.root, self.at, self.armed = str(root), at, False
        self.count = {"change": 0, "write": 0}
        self.random = random.Random(at[1])
        sys.addaudithook(self._on_event)
        self._replace_calls()

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or not arguments:
            return
        is_write = (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        if (is_write or event in _CHANGES) and str(arguments[0]).startswith(self.root):
            self._step("change")

    def _replace_calls(self) -> None:
        from slime.checkpoints import sharded_store

        fsync, write = os.fsync, sharded_store.FingerprintedFile.write

        def counted_fsync(descriptor: int) -> None:
            self._step("change")
            fsync(descriptor)

        def counted_write(file: Any, data: Any) -> int:
            # a part of it reaches the file
            if self.armed and ("write", self.count["write"] + 1) == self.at:
                view = memoryview(data).cast("B")
                write(file, view[: self.random.randint(0, len(view))])
                file.flush()
            self._step("write")
            return write(file, data)

        os.fsync = counted_fsync
        sharded_store.FingerprintedFile.write = counted_write  # type: ignore[method-assign]

    def _step(self, kind: str) -> None:
        if self.armed:
            self.count[kind] += 1
            if (kind, self.count[kind]) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(
    model: Path, root: Path, asynchronous: bool, at: Point, place: tuple[int, int, int], told: Any
) -> None:
    """Resume, train, save iteration 1, dying at ``at`` of this rank; tells how often what happened
    if it lives."""
    from slime.trainer.megatron.parallel import RankInfo, shut_down

    torch.set_num_threads(1)
    rank, ranks, port = place
    killer = Killer(root, at)
    flags: dict[str, Any] = {
        "save": str(root),
        "load": str(root),
        "async_save": asynchronous,
        "bf16": True,
    }
    flags |= {"tensor_model_parallel_size": ranks, "save_retain": 1}
    backend = jobs.backend_of(RankInfo(rank, ranks, rank, "127.0.0.1", port), model, **flags)
    jobs.fake_step(backend, 2)
    killer.armed = True
    backend.save(1)
    backend.finish_saving()
    killer.armed = False
    told.put((rank, killer.count))
    shut_down()


class Range:
    """Where trainers die: a run with iteration 0 saved, and what its weights are after iterations 0
    and 1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.origin = (
            folder,
            jobs.make_model(folder / "model"),
            folder / "origin",
        )
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["slime.trainer.megatron.backend", "tests.support.megatron_jobs"]
        )
        with single(self.model, save=str(self.origin), bf16=True) as backend:
            jobs.fake_step(backend, 1)
            backend.save(0)
            before = parameters(backend)
            jobs.fake_step(backend, 2)
            self.weights = {(1, 0): before, (2, 0): before, (1, 1): parameters(backend)}

    def run(
        self, name: str, asynchronous: bool, at: Point, ranks: int = 1, victim: int = 0
    ) -> tuple[Path, dict[str, int] | None]:
        """A trainer that dies at ``at``; the run it leaves, and how often what happened on that
        rank if it lived."""
        root, told = self.folder / name, self.context.Queue()
        shutil.copytree(self.origin, root)
        port = free_port()
        processes = []
        for rank in range(ranks):
            deadly = at if rank == victim else NOWHERE
            place = (rank, ranks, port)
            process = self.context.Process(
                target=save_and_die, args=(self.model, root, asynchronous, deadly, place, told)
            )
            process.start()
            processes.append(process)
        processes[victim].join(SECONDS)
        code = processes[victim].exitcode
        for process in processes:
            process.kill()  # the others wait for the dead one, or have noticed
            process.join(SECONDS)
        assert code in (0, -signal.SIGKILL), (name, code)
        while code == 0:
            rank, counts = told.get(timeout=SECONDS)
            if rank == victim:
                return root, counts
        return root, None

    def survives(self, root: Path, ranks: int = 1) -> int:
        """Resume from what is left, check every bit, save again; returns the iteration that was
        found.

        What two ranks make of the weights differs in rounding: it is taken from their first run,
        the unharmed one.
        """
        flags = {"save": str(root), "load": str(root), "bf16": True}
        plan = resolve_load(trainer_config(hf_checkpoint=str(self.model), **flags))
        assert plan.is_resume and plan.iteration is not None
        check_contents(plan.path)
        with single(self.model, **flags) as backend:
            expected = self.weights.setdefault((ranks, plan.iteration), parameters(backend))
            assert all(
                torch.equal(a, b) for a, b in zip(parameters(backend), expected, strict=True)
            )
            assert backend.next_rollout_id == plan.iteration + 1
            backend.save(2)
        return plan.iteration


@pytest.fixture(scope="module")
def shooting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    yield Range(tmp_path_factory.mktemp("kill"))


def points(counts: dict[str, int], changes: int | None, writes: int) -> list[Point]:
    """Of the changes all or so many, of the writes so many, in the order of a save as far as it is
    known."""
    chosen = random.Random(0)
    every = range(1, counts["change"] + 1)
    some = every if changes is None else sorted(chosen.sample(every, min(changes, len(every))))
    within = sorted(chosen.sample(range(1, counts["write"] + 1), min(writes, counts["write"])))
    return [("write", n) for n in within] + [("change", n) for n in some]


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_killed_at_every_file_operation(shooting: Range, asynchronous: bool) -> None:
    name = "async" if asynchronous else "sync"
    root, counts = shooting.run(f"{name} unharmed", asynchronous, NOWHERE)
    assert counts is not None and counts["change"] > 20 and shooting.survives(root) == 1
    found: dict[str, list[int]] = {"change": [], "write": []}
    for at in points(counts, changes=None, writes=20):
        root, alive = shooting.run(f"{name} {at}", asynchronous, at)
        assert alive is None, f"{at} of {counts} was not reached"
        found[at[0]].append(shooting.survives(root))
        shutil.rmtree(root)
    assert set(found["write"]) == {0}
    assert found["change"] == sorted(found["change"]), (
        "the old one until the tracker moves, then the new one"
    )
    assert set(found["change"]) == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_killed(shooting: Range, victim: int) -> None:
    root, counts = shooting.run(f"two {victim} unharmed", True, NOWHERE, ranks=2, victim=victim)
    assert counts is not None and shooting.survives(root, ranks=2) == 1
    for at in points(counts, changes=6, writes=4):
        root, alive = shooting.run(f"two {victim} {at}", True, at, ranks=2, victim=victim)
        assert alive is None and shooting.survives(root, ranks=2) in (0, 1)
        shutil.rmtree(root)
