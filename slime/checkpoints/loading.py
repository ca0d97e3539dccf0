"""Load a Megatron checkpoint at any layout. All functions are collective.

    load()   files as the manifest says ─► every weight is there, none is left over
             ─► model ─► optimizer, schedule ─► reference model ─► random numbers ─► extra state

The same numbers come back, whatever layout saved them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime.checkpoints.directory import CRITIC, EXTRA_STATE
from slime.checkpoints.load_plan import LoadPlan
from slime.checkpoints.megatron_names import belongs
from slime.checkpoints.optimizer_state import ensure_state, optimizer_tensors, restore
from slime.checkpoints.random_state import (
    seed_after,
    set_random_state,
    sharded_random_state,
    why_not_continued,
)
from slime.checkpoints.resuming import first_corrupt
from slime.checkpoints.sharded_store import StateDict, read, read_common, read_contents
from slime.checkpoints.trainer_state import (
    ADAPTERS,
    REFERENCE,
    TrainerState,
    adapter_facts,
)
from slime.errors import UserError
from slime.models.adapters import is_adapter_parameter
from slime.processes.json_collectives import all_gather

logger = logging.getLogger(__name__)

#: Not the policy's weights: what else a checkpoint may hold, by the first part of its name.
_OTHER = ("optimizer", REFERENCE, CRITIC, "rng_state", "rerun_state_machine_state")
#: Transformer Engine's scaling factors, which other layers do not have.
_TE_STATE = "_extra_state"


@dataclass(frozen=True)
class LoadReport:
    """The result of a load on this rank.

    Attributes:
        directory: of the iteration.
        num_loaded: parameters (Megatron tensors) of this rank, all of them loaded.
        num_elements: numbers in them.
        files: data files in the checkpoint.
        num_ignored: tensors of Transformer Engine's own that are not used.
        parts: what was loaded besides the weights.
        seconds: wall time.
    """

    directory: Path
    num_loaded: int
    num_elements: int
    files: int
    num_ignored: int
    parts: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        amount = f"{self.num_loaded} parameters ({self.num_elements / 1e6:,.1f} M numbers)"
        text = ", ".join((f"loaded {amount}", *self.parts))
        text += f" from {self.files} file(s) of {self.directory} in {self.seconds:.1f} s"
        return text + (
            f"; {self.num_ignored} entries of Transformer Engine are not used"
            if self.num_ignored
            else ""
        )


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The return value of `load`.

    Attributes:
        extra_state: what was given to `save`; {} when there is none, or when only weights were
            wanted.
        report: what came from where.
    """

    extra_state: dict[str, Any]
    report: LoadReport


def load(
    plan: LoadPlan, state: TrainerState, *, seed: int = 0, is_compared: bool = False
) -> LoadedCheckpoint:
    """Fill the trainer from a Megatron checkpoint. Collective.

    Args:
        plan: of kind "megatron".
        state: as for `save`; saved at any parallel layout. ``reference`` is read if it is given.
            A critic's is loaded by a call of its own, which leaves random numbers and extra state
            to the policy's.
        seed: --seed. A run that goes on without the saved random states is seeded by it and the
            iteration.
        is_compared: the files' contents were compared with the manifest (`agreed_plan`).
    Raises:
        UserError: a file is corrupt, a tensor is missing, left over or does not fit.
    """
    assert plan.kind == "megatron", plan
    started = time.perf_counter()
    if not is_compared and (corrupt := first_corrupt(plan)) is not None:
        raise corrupt
    common = read_common(plan.path)
    is_policy = not state.prefix
    if not is_policy:
        common = common.get(CRITIC, {})
    load_optimizer = plan.load_optimizer and state.optimizer is not None
    if load_optimizer and "optimizer" not in common:
        raise UserError(
            f"{plan.path} has no optimizer state",
            why="it was saved with --no-save-optim, or by a converter",
            fix="pass --no-load-optim to go on with a fresh optimizer",
        )
    if state.adapters is not None and state.part == "adapters":
        _check_adapters(adapter_facts(state.adapters), common.get(ADAPTERS, {}), plan.path)
    report = _account_for(state, read_contents(plan.path), plan.path)
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
        read({"wanted": state.reference_model()}, plan.path)  # in place
        parts.append(f"reference model of rollout {common['reference_iteration']}")
    extra_state: dict[str, Any] = {}
    if plan.iteration is not None and is_policy:
        extra_state = read_extra_state(plan.path)
        because = why_not_continued(common.get("layout")) if plan.load_rng else "--no-load-rng"
        if because is None:
            set_random_state(
                read({"rng_state": sharded_random_state(None)}, plan.path)["rng_state"]
            )
            parts.append("random states")
        else:
            seed_after(plan.iteration, seed, because)
    report = replace(report, parts=tuple(parts), seconds=time.perf_counter() - started)
    logger.info("%s", report)
    return LoadedCheckpoint(extra_state, report)


def holds_adapters(plan: LoadPlan) -> bool:
    """Tell whether a plan leads to a checkpoint of adapters alone."""
    return plan.kind == "megatron" and ADAPTERS in read_common(plan.path)


def critic_in(plan: LoadPlan) -> LoadPlan | None:
    """The plan that leads to the critic of a checkpoint; None if there is none in it."""
    if plan.kind != "megatron":
        return None
    own = plan.path / CRITIC
    if own.is_dir():  # of ranks of its own
        return replace(plan, path=own)
    names = read_contents(plan.path).state_dict_metadata
    return plan if any(name.startswith(f"{CRITIC}.") for name in names) else None


#: The flag behind each fact of the adapters that training goes on with.
_ADAPTER_FLAGS = {
    "rank": "--lora-rank",
    "alpha": "--lora-alpha",
    "targets": "--lora-target-modules, --lora-exclude-modules",
    "experts": "--lora-experts",
    "expert_rank": "--lora-rank-by-topk",
}


def _check_adapters(own: dict[str, Any], saved: dict[str, Any], directory: Path) -> None:
    """Compare the adapters of the flags with those of a checkpoint. With another alpha the same
    numbers would be another policy.

    Raises:
        UserError: they differ; names the flags.
    """
    differing = [
        f"{flags} gave {saved.get(name)}, now {own[name]}"
        for name, flags in _ADAPTER_FLAGS.items()
        if own[name] != saved.get(name)
    ]
    if differing:
        raise UserError(
            f"the adapters of {directory} are others than those of the flags",
            why="; ".join(differing),
            fix="pass the --lora-* flags that they were saved with",
        )


def read_extra_state(directory: Path) -> dict[str, Any]:
    """The run's own state beside a checkpoint; {} for one that has none."""
    path = directory / EXTRA_STATE
    # samples in it are plain objects, so this unpickles; the directory is the run's own
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}


def saved_reference(plan: LoadPlan) -> int | None:
    """The rollout after which the reference model in the checkpoint was taken; None: it has none,
    --ref-load does.

    A run that only takes the weights (--finetune) starts with its own reference.
    """
    if plan.kind != "megatron" or plan.iteration is None:
        return None
    return read_common(plan.path).get("reference_iteration")


# -- reading ---------------------------------------------------------------------------------------


def _read_model(plan: LoadPlan, state: TrainerState) -> None:
    """Read the model. Layers of Transformer Engine also have an extra state (the history of scaling
    factors with FP8), which a checkpoint of other layers lacks; they then start with a new one."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    saved = read_contents(plan.path).state_dict_metadata

    def is_there(entry: Any) -> bool:
        return not isinstance(entry, ShardedObject) or entry.unique_key in saved

    wanted = {
        key: {name: entry for name, entry in chunk.items() if is_there(entry)}
        for key, chunk in state.model().items()
    }
    loaded = read(wanted, plan.path)
    for key, chunk in state.chunks().items():
        result = chunk.load_state_dict(loaded[key], strict=False)
        missing = [name for name in result.missing_keys if belongs(name, state.part)]
        odd = [name for name in (*missing, *result.unexpected_keys) if not name.endswith(_TE_STATE)]
        assert not odd, odd  # `_account_for` has compared the names


def _read_optimizer(plan: LoadPlan, state: TrainerState, saved: StateDict) -> float:
    """Read the optimizer, after the model: master weights may share memory with float32 parameters,
    and are the more precise ones."""
    ensure_state(state.optimizer)
    tensors = optimizer_tensors(state.optimizer, state.model())
    contents = read_contents(plan.path)
    wanted = tensors.known_to(contents)
    _account_for_optimizer(wanted, contents, plan.path)
    read({"wanted": wanted}, plan.path)  # in place
    tensors.put_back()
    if tensors.without_master:
        state.optimizer.reload_model_params()
    settings_of_checkpoint = (
        state.scheduler is not None and state.scheduler.use_checkpoint_opt_param_scheduler
    )
    return restore(state.optimizer, saved, settings_of_checkpoint)


# -- completeness ----------------------------------------------------------------------------------


def _account_for(state: TrainerState, contents: Any, directory: Path) -> LoadReport:
    """Compare what all ranks want of a model's weights with what is there. Collective.

    Args:
        state: this rank's.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names tensors that are missing, and tensors that no parameter takes.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    entries = [
        entry for entry in nested_values(state.model()) if not isinstance(entry, ShardedObject)
    ]
    needed = set().union(*all_gather(sorted({entry.key for entry in entries})))
    present = {name for name in contents.state_dict_metadata if _is_of(name, state)}
    ignored = {name for name in present if _TE_STATE in name}
    missing = sorted(needed - present)
    left_over = sorted(present - ignored - needed)
    if missing or left_over:
        raise UserError(
            f"{directory} cannot be loaded into this model",
            why="; ".join(
                _named(missing, "missing") + _named(left_over, "that no parameter takes")
            ),
            fix="it has adapters alone: pass the --lora-* flags that they were trained with"
            if needed and left_over and all(map(is_adapter_parameter, left_over))
            else "it must be a checkpoint of the same model; pass --load with another directory, "
            "or the flags that the model was saved with",
        )
    files = {info.relative_path for info in contents.storage_data.values()}
    num_elements = sum(entry.data.numel() for entry in entries)
    return LoadReport(directory, len(entries), num_elements, len(files), len(ignored))


def _is_of(name: str, state: TrainerState) -> bool:
    """Tell whether a tensor of a checkpoint is a weight of the model that ``state`` is about."""
    if state.prefix:
        return name.startswith(state.prefix)
    is_weight = name.split(".")[0].split("/")[0] not in _OTHER
    return is_weight and (state.part != "trunk" or belongs(name, state.part))


def _account_for_optimizer(entries: list[Any], contents: Any, directory: Path) -> None:
    """Check that the checkpoint has a state for everything that is trained. Collective.

    Args:
        entries: this rank's sharded tensors of the optimizer.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names states that are missing on any rank, on every rank.
    """
    own = {entry.key for entry in entries} - contents.state_dict_metadata.keys()
    names = sorted(set().union(*all_gather(sorted(own))))
    if names:
        raise UserError(
            f"{directory} has no optimizer states for {len(names)} tensors that are trained now",
            why=f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: they were frozen when it "
            "was saved, or --optimizer was another one",
            fix="pass the flags that it was saved with (--optimizer, --freeze-params-name-list,"
            " --only-train-params-name-list), or --no-load-optim to go on with a fresh optimizer",
        )


def _named(names: list[str], what: str) -> list[str]:
    if not names:
        return []
    listed = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return [f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {listed}"]
