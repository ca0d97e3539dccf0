"""Megatron checkpoints: model, optimizer, schedule, random numbers and the run's own state, at any parallel layout.

    save(root, iteration, state)  ─► root/iter_0000010/ (complete or not there) ─► latest_checkpointed_iteration.txt
    load(plan, state)             ─► the same numbers, whatever layout saved them

A save writes into a hidden directory, lists every file with its size and fingerprint, renames it, and only then moves
the tracker: a crash or a full disk at any point leaves the previous checkpoint loadable. `CheckpointWriter` does the
writing, behind training with --async-save. All functions are collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.checkpoints.contents import TE_STATE, LoadReport, account_for, account_for_optimizer
from slime.checkpoints.directory import RELEASE, check_contents
from slime.checkpoints.load_plan import LoadPlan
from slime.checkpoints.megatron_names import stored_tensors, unwrapped
from slime.checkpoints.optimizer_state import ensure_state, optimizer_tensors, restore, sharded_optimizer_state
from slime.checkpoints.random_state import (
    random_layout,
    random_state,
    seed_after,
    set_random_state,
    sharded_random_state,
    why_not_continued,
)
from slime.checkpoints.sharded_store import StateDict, read, read_common, read_contents
from slime.errors import UserError

logger = logging.getLogger(__name__)

EXTRA_STATE = "extra_state.pt"
REFERENCE = "reference"


@dataclass
class TrainerState:
    """What a checkpoint covers on this rank.

    Attributes:
        model_chunks: one per virtual pipeline stage, wrapped or not.
        optimizer: Megatron's (distributed or not); None leaves it out.
        scheduler: learning-rate schedule with ``state_dict`` / ``load_state_dict``.
        reference: weights of the reference model, one for each of the chunks' `stored_tensors`; None unless the run
            has changed them (--ref-update-interval), as otherwise --ref-load has them.
        reference_iteration: the rollout after which they were the policy's.
        moments_on_host: Adam's moments live in host memory (--offload-optimizer-states).
    """

    model_chunks: Sequence[nn.Module]
    optimizer: Any = None
    scheduler: Any = None
    reference: Sequence[Tensor] | None = None
    reference_iteration: int | None = None
    moments_on_host: bool = False


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load` gives back.

    Attributes:
        extra_state: what was given to `save`; {} when there is none, or when only weights were wanted.
        report: what came from where.
    """

    extra_state: dict[str, Any]
    report: LoadReport


def load(plan: LoadPlan, state: TrainerState, *, seed: int = 0) -> LoadedCheckpoint:
    """Fill the trainer from a Megatron checkpoint. Collective.

    Args:
        plan: of kind "megatron".
        state: as for `save`; saved at any parallel layout. ``reference`` is read if it is given.
        seed: --seed. A run that goes on without the saved random states is seeded by it and the iteration.
    Raises:
        UserError: a file is corrupt, a tensor is missing, left over or does not fit.
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
    report = account_for(_model_state(state), read_contents(plan.path), plan.path)
    _read_model(plan, state)
    parts = []
    if load_optimizer:
        step = _read_optimizer(plan, state, common["optimizer"])
        parts.append(f"optimizer at step {step:.0f}")
        if state.scheduler is not None and "opt_param_scheduler" in common:
            state.scheduler.load_state_dict(common["opt_param_scheduler"])
            parts.append("schedule")
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()
    if state.reference is not None:
        read({"wanted": _reference_state(state)}, plan.path)  # in place
        parts.append(f"reference model of rollout {common['reference_iteration']}")
    if plan.iteration is not None:
        because = why_not_continued(common.get("layout")) if plan.load_rng else "--no-load-rng"
        if because is None:
            set_random_state(read({"rng_state": sharded_random_state(None)}, plan.path)["rng_state"])
            parts.append("random states")
        else:
            seed_after(plan.iteration, seed, because)
    report = replace(report, parts=tuple(parts), seconds=time.perf_counter() - started)
    logger.info("%s", report)
    return LoadedCheckpoint(read_extra_state(plan.path) if plan.iteration is not None else {}, report)


def read_extra_state(directory: Path) -> dict[str, Any]:
    """The run's own state beside a checkpoint; {} for one that has none."""
    path = directory / EXTRA_STATE
    # samples in it are plain objects, so this unpickles; the directory is the run's own
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}


def saved_reference(plan: LoadPlan) -> int | None:
    """The rollout after which the reference model in the checkpoint was taken; None: it has none, --ref-load does.

    A run that only takes the weights (--finetune) starts with its own reference.
    """
    if plan.kind != "megatron" or plan.iteration is None:
        return None
    return read_common(plan.path).get("reference_iteration")


def trainer_state_dict(
    state: TrainerState, iteration: int | str, *, save_optimizer: bool = True, save_rng: bool = True
) -> StateDict:
    """Everything that a checkpoint of ``state`` holds, as a sharded state dict. Collective."""
    saved = _model_state(state)
    if save_optimizer and state.optimizer is not None:
        saved["optimizer"] = sharded_optimizer_state(
            state.optimizer, _model_state(state), on_host=state.moments_on_host
        )
        if state.scheduler is not None:
            saved["opt_param_scheduler"] = state.scheduler.state_dict()
    if state.reference is not None:
        saved[REFERENCE] = _reference_state(state)
        saved["reference_iteration"] = state.reference_iteration
    if save_rng:
        saved["rng_state"] = sharded_random_state(random_state())
    saved["iteration"], saved["checkpoint_version"] = 0 if iteration == RELEASE else iteration, 3.0
    saved["layout"] = {**random_layout(), "has_rng_state": save_rng}
    return saved


# -- what is in it -----------------------------------------------------------------------------------------


def _model_state(state: TrainerState) -> StateDict:
    """Parameters as megatron-core shards them: so that every layout can read them."""
    from megatron.core.parallel_state import get_data_parallel_group

    metadata = {"dp_cp_group": get_data_parallel_group(with_context_parallel=True)}
    chunks = unwrapped(state.model_chunks)
    return {
        key: chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for key, chunk in zip(_model_keys(chunks), chunks, strict=True)
    }


def _model_keys(model_chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(model_chunks) == 1 else [f"model{number}" for number in range(len(model_chunks))]


def _reference_state(state: TrainerState) -> list[Any]:
    """The reference's tensors under the policy's names with "reference." in front."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    assert state.reference is not None
    copy_of = {id(own): copy for own, copy in zip(stored_tensors(state.model_chunks), state.reference, strict=True)}
    return [
        replace(entry, key=f"{REFERENCE}.{entry.key}", data=copy_of[id(entry.data)])
        for entry in nested_values(_model_state(state))
        if id(entry.data) in copy_of
    ]


# -- reading -----------------------------------------------------------------------------------------------


def _read_model(plan: LoadPlan, state: TrainerState) -> None:
    """Layers of Transformer Engine also have an extra state (the history of scaling factors with FP8), which a
    checkpoint of other layers lacks; they then start with a new one."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    saved = read_contents(plan.path).state_dict_metadata

    def is_there(entry: Any) -> bool:
        return not isinstance(entry, ShardedObject) or entry.unique_key in saved

    wanted = {
        key: {name: entry for name, entry in chunk.items() if is_there(entry)}
        for key, chunk in _model_state(state).items()
    }
    loaded = read(wanted, plan.path)
    for key, chunk in zip(_model_keys(state.model_chunks), unwrapped(state.model_chunks), strict=True):
        result = chunk.load_state_dict(loaded[key], strict=False)
        odd = [name for name in (*result.missing_keys, *result.unexpected_keys) if not name.endswith(TE_STATE)]
        assert not odd, odd  # `account_for` has compared the names


def _read_optimizer(plan: LoadPlan, state: TrainerState, saved: StateDict) -> float:
    """After the model: master weights may share memory with float32 parameters, and are the finer ones."""
    ensure_state(state.optimizer, on_host=state.moments_on_host)
    tensors = optimizer_tensors(state.optimizer, _model_state(state))
    contents = read_contents(plan.path)
    wanted = tensors.known_to(contents)
    account_for_optimizer(wanted, contents, plan.path)
    read({"wanted": wanted}, plan.path)  # in place
    tensors.put_back()
    if tensors.without_master:
        state.optimizer.reload_model_params()
    settings_of_checkpoint = state.scheduler is not None and state.scheduler.use_checkpoint_opt_param_scheduler
    return restore(state.optimizer, saved, settings_of_checkpoint)
