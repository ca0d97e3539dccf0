"""Megatron checkpoints: model, optimizer, schedule, random numbers and the run's own state, at any parallel layout.

    save(root, iteration, state)  ─► root/iter_0000010/ (complete or not there) ─► latest_checkpointed_iteration.txt
    load(plan, state)             ─► the same numbers, whatever layout saved them

A save writes into a hidden directory, lists every file with its size and fingerprint, renames it, and only then moves
the tracker: a crash or a full disk at any point leaves the previous checkpoint loadable. All functions are collective.
"""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from slime.errors import UserError
from slime.weights.checkpoint_dir import (
    RELEASE,
    FileRecord,
    check_contents,
    file_fingerprint,
    iteration_name,
    partial_dir,
    publish,
    retain,
    set_latest,
    write_manifest,
)
from slime.weights.load_plan import LoadPlan
from slime.weights.megatron_names import unwrapped
from slime.weights.optimizer_state import ensure_state, loading
from slime.weights.sharded_store import StateDict, agreed, read, read_common, write

logger = logging.getLogger(__name__)

EXTRA_STATE = "extra_state.pt"


@dataclass
class TrainerState:
    """What a checkpoint covers on this rank.

    Attributes:
        model_chunks: one per virtual pipeline stage, wrapped or not.
        optimizer: Megatron's (distributed or not); None leaves it out.
        scheduler: learning-rate schedule with ``state_dict`` / ``load_state_dict``.
    """

    model_chunks: Sequence[nn.Module]
    optimizer: Any = None
    scheduler: Any = None


def save(
    root: str | Path,
    iteration: int | str,
    state: TrainerState,
    *,
    extra_state: dict[str, Any] | None = None,
    save_optimizer: bool = True,
    save_rng: bool = True,
    keep: int | None = None,
) -> Path:
    """Save after training rollout ``iteration`` and make it the latest. Collective.

    Args:
        root: the --save directory.
        iteration: rollout id; "release" for converted weights without a past.
        extra_state: small state of the run (data position, weight version, …), given back by `load`.
        save_optimizer: False leaves optimizer and schedule out (--no-save-optim).
        keep: checkpoints to keep, the newest ones (--save-retain); None keeps all.
    Returns:
        The checkpoint's directory.
    Raises:
        UserError: on every rank, when any rank could not write. Nothing visible has changed then.
    """
    started = time.perf_counter()
    root, final = Path(root), Path(root) / iteration_name(iteration)
    partial = final.with_name(f".{final.name}.partial")
    with agreed(f"preparing {final}"):
        if dist.get_rank() == 0:
            partial_dir(final)
    try:
        write(_state_dict(state, iteration, save_optimizer, save_rng), partial)
        nbytes = _complete(partial, extra_state or {})
        with agreed(f"publishing {final}"):
            if dist.get_rank() == 0:
                publish(partial, final)
                set_latest(root, iteration)
    except UserError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if dist.get_rank() == 0:
        removed = retain(root, keep)
        if removed:
            logger.info("removed checkpoints %s (--save-retain %s)", ", ".join(map(str, removed)), keep)
    seconds = time.perf_counter() - started
    logger.info("saved %s (%.2f GB) in %.1f s", final, nbytes / 1e9, seconds)
    return final


def load(plan: LoadPlan, state: TrainerState) -> dict[str, Any]:
    """Fill the trainer from a Megatron checkpoint. Collective.

    Args:
        plan: of kind "megatron".
        state: as for `save`; saved at any parallel layout.
    Returns:
        The ``extra_state`` that was saved; {} when there is none.
    Raises:
        UserError: a file is corrupt, a tensor is missing or does not fit.
    """
    assert plan.kind == "megatron", plan
    started = time.perf_counter()
    check_contents(plan.path, dist.get_rank(), dist.get_world_size())
    common = read_common(plan.path)
    load_optimizer = plan.load_optimizer and state.optimizer is not None
    if load_optimizer and "optimizer" not in common:
        raise UserError(
            f"{plan.path} has no optimizer state",
            why="it was saved with --no-save-optim, or by a converter",
            fix="pass --no-load-optim to go on with a fresh optimizer",
        )
    load_rng = plan.load_rng and _same_rng_layout(common)
    wanted = _model_state(state)
    if load_optimizer:
        ensure_state(state.optimizer)
        wanted["optimizer"] = state.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=_metadata())
    if load_rng:
        wanted["rng_state"] = _rng_object(None)
    loaded = read(wanted, plan.path)
    for key, chunk in zip(_model_keys(state.model_chunks), unwrapped(state.model_chunks), strict=True):
        chunk.load_state_dict(loaded[key], strict=True)
    if load_optimizer:
        settings_of_checkpoint = state.scheduler is not None and state.scheduler.use_checkpoint_opt_param_scheduler
        with loading(state.optimizer, settings_of_checkpoint):
            state.optimizer.load_state_dict(loaded["optimizer"])
        if state.scheduler is not None and "opt_param_scheduler" in common:
            state.scheduler.load_state_dict(common["opt_param_scheduler"])
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()
    if load_rng:
        _set_rng_state(loaded["rng_state"])
    logger.info("loaded %s in %.1f s", plan.path, time.perf_counter() - started)
    return read_extra_state(plan.path) if plan.iteration is not None else {}


def read_extra_state(directory: Path) -> dict[str, Any]:
    """The run's own state beside a checkpoint; {} for one that has none."""
    path = directory / EXTRA_STATE
    # samples in it are plain objects, so this unpickles; the directory is the run's own
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}


# -- what is in it -----------------------------------------------------------------------------------------


def _metadata() -> dict[str, Any]:
    """How megatron-core shards: so that every layout can read it, with one namespace for all optimizers."""
    from megatron.core.parallel_state import get_data_parallel_group

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": get_data_parallel_group(with_context_parallel=True),
    }


def _model_keys(model_chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(model_chunks) == 1 else [f"model{number}" for number in range(len(model_chunks))]


def _model_state(state: TrainerState) -> StateDict:
    chunks = unwrapped(state.model_chunks)
    return {
        key: chunk.sharded_state_dict(metadata=_metadata())  # type: ignore[operator]
        for key, chunk in zip(_model_keys(chunks), chunks, strict=True)
    }


def _state_dict(state: TrainerState, iteration: int | str, save_optimizer: bool, save_rng: bool) -> StateDict:
    from megatron.core import parallel_state as ps

    saved = _model_state(state)
    if save_optimizer and state.optimizer is not None:
        ensure_state(state.optimizer)
        saved["optimizer"] = state.optimizer.sharded_state_dict(saved, metadata=_metadata())
        if state.scheduler is not None:
            saved["opt_param_scheduler"] = state.scheduler.state_dict()
    if save_rng:
        saved["rng_state"] = _rng_object(_rng_state())
    saved["iteration"], saved["checkpoint_version"] = 0 if iteration == RELEASE else iteration, 3.0
    saved["layout"] = {
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": ps.get_pipeline_model_parallel_world_size(),
        "has_rng_state": save_rng,
    }
    return saved


def _complete(partial: Path, extra_state: dict[str, Any]) -> int:
    """Add the run's state and the manifest; each rank fingerprints its share of the files. Returns all bytes."""
    with agreed(f"writing {partial}", on_disk=partial):
        if dist.get_rank() == 0:
            torch.save(extra_state, partial / EXTRA_STATE)
    records: list[FileRecord] = []
    with agreed(f"reading back {partial}"):
        names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            path = partial / name
            records.append(FileRecord(name, path.stat().st_size, file_fingerprint(path)))
    gathered: list[list[FileRecord]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, records)
    everything = sorted((record for part in gathered for record in part), key=lambda record: record.path)
    with agreed(f"writing {partial}", on_disk=partial):
        if dist.get_rank() == 0:
            write_manifest(partial, everything)
    return sum(record.nbytes for record in everything)


# -- random numbers ----------------------------------------------------------------------------------------


def _rng_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(states: list[dict[str, Any]]) -> None:
    from megatron.core import tensor_parallel

    state = states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _rng_object(state: dict[str, Any] | None) -> Any:
    """One entry per (pipeline, tensor) rank; data-parallel replicas share it."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(
        "rng_state",
        [state],
        (ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()),
        (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()),
        replica_id=ps.get_data_parallel_rank(with_context_parallel=True),
    )


def _same_rng_layout(common: StateDict) -> bool:
    """Random states belong to a layout; at another one the run draws new numbers and says so."""
    from megatron.core import parallel_state as ps

    layout = common.get("layout")
    if layout is None or not layout["has_rng_state"]:
        return False
    here = (ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size())
    there = (layout["tensor_model_parallel_size"], layout["pipeline_model_parallel_size"])
    if here != there:
        logger.info("random states were saved at TP %d × PP %d: not loaded at TP %d × PP %d", *there, *here)
    return here == there
