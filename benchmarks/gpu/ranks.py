"""Ranks as processes, for measurements without a cluster around them."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.processes.host import reserve_port


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that `run` started; ``port`` is free on 127.0.0.1."""

    rank: int
    world: int
    port: int


Answer = Callable[[Any], None]
"""Hands a result to the process that called `run`, at once."""


def run(
    job: Callable[..., None],
    world: int,
    *arguments: Any,
    on_answer: Callable[[Any], None] = lambda value: None,
) -> Any:
    """``job(place, answer, *arguments)`` in ``world`` fresh processes; the last thing that one of
    them answered.

    Args:
        on_answer: called here with each answer as it comes.
    Raises:
        RankFailed: one ended with an error; carries its traceback. The others are ended.
    """
    reservation = reserve_port("127.0.0.1")
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(job, Place(rank, world, reservation.port), results, arguments)
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answer = None
    try:
        while _alive(processes) or not results.empty():
            try:
                failure, value = results.get(timeout=0.1)
            except queue.Empty:
                failure = _ended_badly(processes)
            else:
                if not failure:
                    answer = value
                    on_answer(value)
            if failure:
                raise RankFailed(failure)
        return answer
    finally:
        # not `join`: it waits for a pipe that processes started by a rank hold open, too
        for process in processes:
            if process.is_alive():
                process.kill()
        while _alive(processes):
            time.sleep(0.05)
        reservation.release()


class RankFailed(Exception):
    """Carries the traceback of the rank, where it left one."""


def _alive(processes: list[Any]) -> bool:
    return any(process.is_alive() for process in processes)


def _ended_badly(processes: list[Any]) -> str:
    codes = [process.exitcode for process in processes if process.exitcode]
    return f"a rank ended with exit status {codes[0]}" if codes else ""


def _rank(job: Callable[..., None], place: Place, results: Any, arguments: tuple[Any, ...]) -> None:
    # as SGLang sets it for its own processes: one communicator needs one setting
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    try:
        job(place, lambda value: results.put(("", value)), *arguments)
    except BaseException:
        results.put((f"rank {place.rank}: {traceback.format_exc()}", None))
        raise


def trainer(place: Place, **flags: Any) -> Any:
    """This rank's `MegatronBackend`, yet to be set up.

    Args:
        flags: of `make_config`.
    """
    from slime.config import make_config

    # first: it prepares a host without a GPU
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.trainer.megatron.parallel import RankInfo

    counts = {
        "actor_num_gpus_per_node": place.world,
        "rollout_batch_size": place.world,
        "num_rollout": 1,
    }
    config = make_config(**{**counts, **flags})
    return MegatronBackend(
        config, RankInfo(place.rank, place.world, place.rank, "127.0.0.1", place.port)
    )
