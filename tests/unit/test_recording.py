"""When samples are written: beside the training on them, one rollout after the other."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from slime.cluster.rollout_actor import RolloutActor
from slime.config import make_config
from slime.log import untold
from slime.processes.footprint import Footprint


def an_actor() -> RolloutActor:
    """Return one without data or engines."""
    actor = object.__new__(RolloutActor)
    actor.config = make_config(rollout_batch_size=1, num_rollout=1)
    actor.source = SimpleNamespace(mark_consumed=lambda groups: None)
    actor.loop = actor.references = actor.journal = None
    actor.run_path = Path("outputs/run")
    actor._writer = ThreadPoolExecutor(1)
    actor._written = []
    actor._groups_of = {}
    actor._footprint = Footprint()
    return actor


def test_a_batch_does_not_wait_until_its_samples_are_written() -> None:
    actor = an_actor()
    may_end = threading.Event()
    written: list[str] = []

    def slowly(what: str) -> None:
        may_end.wait()
        written.append(what)

    actor._record(slowly, "samples")
    actor._record(written.append, "samples of the next")
    assert not written
    may_end.set()
    asyncio.run(actor.mark_consumed(0))
    assert written == ["samples", "samples of the next"]


def test_samples_that_cannot_be_written_cost_their_record_alone() -> None:
    actor = an_actor()
    written: list[str] = []

    def fails() -> None:
        raise OSError(28, "No space left on device")

    untold()
    for _ in range(2):
        actor._record(fails)
        actor._record(written.append, "samples of the next")
        asyncio.run(actor.mark_consumed(0))
    assert len(written) == 2
    assert [line for line in untold() if "No space left" in line and "outputs/run" in line] != []
