"""What a trainer rank does in the tests of pushes by pipeline stages."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from slime.engines.api import EngineError
from slime.errors import UserError
from slime.weights import route, source
from slime.weights.receipt import Receipt
from slime.weights.sync import WeightSync
from slime.weights.trainer_ranks import StageError, TrainerRanks
from slime.weights.transport import EngineSlots
from tests.support.megatron_jobs import backend_of
from tests.support.trainer_ranks import trainer_config

Engines = Sequence[EngineSlots]


def sync_of(info: Any, model: Path, flags: dict[str, Any]) -> WeightSync:
    """Built on weights that differ from the checkpoint's, in the same way on every layout."""
    backend = backend_of(info, model, **{"update_weight_buffer_size": 20_000, **flags})
    with torch.no_grad():
        for chunk in backend.model_chunks:
            for parameter in chunk.parameters():
                parameter.mul_(2)
    return WeightSync(
        backend.config,
        backend.model_chunks,
        backend.hf_config,
        rank=info.rank,
        world_size=info.world_size,
    )


def push_twice(info: Any, model: Path, flags: dict[str, Any], engines: Engines) -> dict[str, Any]:
    """Push; returns the receipts' contents, and all parameters that were on this rank, its own and
    gathered ones."""
    seen: set[str] = set()
    gather, broadcast, crossing = source.gather, dist.broadcast, []

    def noted(batch: Any, local: Any, place: Any, device: Any) -> Any:
        found = gather(batch, local, place, device)
        seen.update(local, found)
        return found

    def watched(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not None and group is route.Placement.current().pp_group:
            crossing.append(tensor.numel())
        return broadcast(tensor, *args, group=group, **kwargs)

    is_local = route.is_local
    source.gather, dist.broadcast, route.is_local = noted, watched, lambda url: False
    try:
        sync = sync_of(info, model, flags)
        sync.connect(engines, on_this_node=False)
        receipts = [sync.push() for _ in range(2)]
        sync.close()
    finally:
        source.gather, dist.broadcast, route.is_local = gather, broadcast, is_local
    return {
        "receipts": receipts,
        "seen": seen,
        "crossing": sum(crossing),
        "stage": sync._ranks.stage,
    }


def push_with_a_fault(
    info: Any, model: Path, flags: dict[str, Any], engines: Engines, fault: str
) -> list[str]:
    """Push with stage 1 in trouble ("error", "silent" or ""), then once more without; what each
    push ended with."""
    sync = sync_of(
        info, model, {**flags, "distributed_timeout_minutes": 0.05 if fault == "silent" else 10}
    )
    sync.connect(engines, on_this_node=False)
    said = []
    try:
        for attempt in (1, 2):
            if attempt == 1 and info.rank == 1 and fault:
                _break(sync, fault)
            try:
                said.append(str(sync.push()))
            except (UserError, RuntimeError) as error:
                said.append(str(error))
            if fault == "silent":
                break
    finally:
        sync.close()
    return said


def push_quantised(info: Any, served: Path, plain: Path, engines: Engines) -> list[Receipt | str]:
    """A push to the engines on the ranks' own GPUs that fails before anything travels, and another
    one."""
    shared = {
        "rollout_engine": "sglang",
        "colocate": True,
        "sglang_fp8_gemm_backend": "triton",
        "ref_load": str(plain),
    }
    sync = sync_of(
        info, served, {**shared, "sglang_dtype": "bfloat16", "check_weight_update_equal": True}
    )
    sync.connect(engines)
    if info.rank == 0:
        _fail_once(
            sync._check, "open_layers", EngineError(engines[0].url, "no memory for another layer")
        )
    said: list[Receipt | str] = []
    for _ in range(2):
        try:
            said.append(sync.push())
        except UserError as error:
            said.append(str(error))
    sync.close()
    return said


def _fail_once(owner: Any, name: str, error: Exception) -> None:
    def fail(*_: Any) -> None:
        delattr(owner, name)
        raise error

    setattr(owner, name, fail)


def _break(sync: WeightSync, fault: str) -> None:
    send = sync._transport.send

    def broken(*args: Any) -> Any:
        sync._transport.send = send
        if fault == "silent":
            sync._ranks._send_report = lambda *words: None
        raise RuntimeError("the GPU fell off the bus")

    sync._transport.send = broken


def push_and_die(
    info: Any, model: Path, flags: dict[str, Any], engines: Engines, note: Path
) -> None:
    """The process of stage 1 ends in the middle of its turn; what rank 0 says to that goes to
    ``note``."""
    sync = sync_of(info, model, {**flags, "distributed_timeout_minutes": 0.05})
    sync.connect(engines, on_this_node=False)
    if info.rank == 1:
        sync._transport._start = lambda *args: os._exit(1)
    try:
        sync.push()
    except UserError as error:
        note.write_text(str(error))


class Touch:
    """In a pickle: whoever reads it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hear_a_stranger(info: Any, trace: Path) -> str:
    """Rank 0 says something, a process that reached the store puts a pickle in its place, and rank
    1 listens.

    Returns:
        What rank 1 made of it.
    """
    # megatron is imported once it can run on a CPU
    from slime.trainer.megatron.parallel import initialise

    initialise(info, trainer_config(actor_num_gpus_per_node=info.world_size))
    ranks = TrainerRanks(info.rank, info.world_size)
    with ranks.round("the first", 30) as outcome:
        outcome.value = {"heard": True}
    assert outcome.value == {"heard": True}
    try:
        with ranks.round("the second", 30):
            if info.rank == 1:
                dist.barrier()  # rank 0 has said it
                store: Any = dist.TCPStore(
                    info.master_addr, info.master_port, is_master=False, wait_for_workers=False
                )
                [key] = [key for key in store.list_keys() if key.endswith("2/outcome")]
                store.set(key, pickle.dumps(Touch(trace)))
        if info.rank == 0:
            dist.barrier()
    except StageError as error:
        return str(error)
    return "nothing"


def hear_late(info: Any, rounds: int) -> tuple[list[int], list[str]]:
    """Rank 1 fetches its first word when rank 0 has been through all rounds.

    Returns:
        What each round had for this rank, and what is left in the store at the end.
    """
    # megatron is imported once it can run on a CPU
    from slime.trainer.megatron.parallel import initialise

    initialise(info, trainer_config(actor_num_gpus_per_node=info.world_size))
    ranks, heard = TrainerRanks(info.rank, info.world_size), []
    store = ranks._store
    if info.rank == 1:
        hear: Any = ranks._receive
        later: Any = lambda *words: store.wait(["ahead"]) or hear(*words)  # noqa: E731
        ranks._receive = later
    for number in range(rounds):
        with ranks.round("words", 30) as outcome:
            outcome.value = number if info.rank == 0 else None
        heard.append(outcome.value)
    if info.rank == 0:
        store.set("ahead", "yes")
    dist.barrier()
    with ranks.round("the last", 30):
        pass
    return heard, sorted(key.rpartition("/")[2] for key in store.list_keys() if "/outcome" in key)


def time_outs_of_groups(info: Any, minutes: float) -> tuple[set[float], float]:
    """Seconds of every process group that a trainer makes at its start, and of the one that pushes
    by handles use."""
    # megatron is imported once it can run on a CPU
    from slime.trainer.megatron.parallel import initialise

    config = trainer_config(
        actor_num_gpus_per_node=info.world_size, distributed_timeout_minutes=minutes
    )
    initialise(info, config)
    at_start = {_seconds(group) for group in _world.pg_map}
    sync = WeightSync(config, [], {}, rank=info.rank, world_size=info.world_size)
    return at_start, _seconds(sync._gloo_group())


def _seconds(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
