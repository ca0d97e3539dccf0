"""Load a Megatron checkpoint at any layout. All functions are collective.

    load()   check files by the manifest ─► check names of all weights
             ─► model ─► optimizer, schedule ─► reference model ─► random states ─► extra state

Values do not depend on the layout that saved them.
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
from slime.checkpoints.trainer_state import ADAPTERS, BASE, REFERENCE, TrainerState, adapter_facts
from slime.errors import UserError, first_few
from slime.models.adapters import is_adapter_parameter
from slime.processes.json_collectives import all_gather

logger = logging.getLogger(__name__)

#: First parts of names of tensors that are not the policy's weights.
_OTHER = ("optimizer", REFERENCE, CRITIC, "rng_state", "rerun_state_machine_state")
#: Name part of Transformer Engine's scaling factors, which other layers do not have.
_TE_STATE = "_extra_state"


@dataclass(frozen=True)
class LoadReport:
    """The result of a load on this rank.

    Attributes:
        directory: directory of the iteration.
        num_loaded: number of parameters (Megatron tensors) of this rank, all loaded.
        num_elements: number of their elements.
        files: number of data files in the checkpoint.
        num_ignored: number of unused tensors of Transformer Engine.
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
        if self.num_ignored:
            text += f"; {self.num_ignored} entries of Transformer Engine are not used"
        return text


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The return value of `load`.

    Attributes:
        extra_state: as given to `save`; {} if there is none, or if only weights were loaded.
        report: summary of the load.
    """

    extra_state: dict[str, Any]
    report: LoadReport


def load(
    plan: LoadPlan, state: TrainerState, *, seed: int = 0, is_compared: bool = False
) -> LoadedCheckpoint:
    """Fill the trainer from a Megatron checkpoint. Collective.

    Args:
        plan: of kind "megatron".
        state: as for `save`; the saved parallel layout may differ. ``reference`` is read if it is
            given. A critic is loaded by a call of its own, without random states and extra state.
        seed: --seed. If the saved random states are not loaded, it and the iteration seed the run.
        is_compared: the files' contents were already compared with the manifest (`agreed_plan`).
    Raises:
        UserError: a file is corrupt, or a tensor is missing, surplus or of a wrong shape.
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
            fix="pass --no-load-optim to continue with a fresh optimizer",
        )
    if state.adapters is not None:
        _check_adapters(state, common.get(ADAPTERS, {}), plan.path)
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
    """Tell whether the plan's checkpoint holds only adapters."""
    return plan.kind == "megatron" and ADAPTERS in read_common(plan.path)


def critic_in(plan: LoadPlan) -> LoadPlan | None:
    """Return the plan for the critic in a checkpoint; None if there is no critic."""
    if plan.kind != "megatron":
        return None
    own = plan.path / CRITIC
    if own.is_dir():  # written by a critic on its own ranks
        return replace(plan, path=own)
    names = read_contents(plan.path).state_dict_metadata
    return plan if any(name.startswith(f"{CRITIC}.") for name in names) else None


@dataclass(frozen=True)
class SavedCritic:
    """How the critic of a checkpoint was trained.

    Attributes:
        rank: of its adapters; 0 if it was trained as a whole.
        base: absolute path of the frozen weights beside its adapters; None: the policy's.
    """

    rank: int
    base: str | None


def saved_critic(plan: LoadPlan) -> SavedCritic:
    """Read how the critic was trained.

    Args:
        plan: the critic's, see `critic_in`.
    """
    saved = read_common(plan.path).get(CRITIC, {})
    return SavedCritic(saved.get(ADAPTERS, {}).get("rank", 0), saved.get(BASE))


#: Setting of adapters → its flags.
_ADAPTER_FLAGS = {
    "rank": "--lora-rank",
    "alpha": "--lora-alpha",
    "targets": "--lora-target-modules, --lora-exclude-modules",
    "experts": "--lora-experts",
    "expert_rank": "--lora-rank-by-topk",
}


def _check_adapters(state: TrainerState, saved: dict[str, Any], directory: Path) -> None:
    """Compare the flags' adapter settings with those of a checkpoint. With another alpha, for
    example, the same tensors would be another policy.

    Raises:
        UserError: settings differ; names the flags.
    """
    assert state.adapters is not None
    own = adapter_facts(state.adapters)
    of_critic = {"rank": "--critic-lora-rank"} if state.prefix else {}
    differing = [
        f"{flags} gave {saved.get(name)}, now {own[name]}"
        for name, flags in (_ADAPTER_FLAGS | of_critic).items()
        if own[name] != saved.get(name)
    ]
    if differing:
        raise UserError(
            f"the {'critic' if state.prefix else 'adapters'} of {directory} "
            f"{'has other adapters' if state.prefix else 'are others'} than those of the flags",
            why="; ".join(differing),
            fix="pass the --lora-* flags of the run that saved them",
        )


def read_extra_state(directory: Path) -> dict[str, Any]:
    """Return the run's own state in a checkpoint; {} if there is none."""
    path = directory / EXTRA_STATE
    # unpickles arbitrary objects, as it contains samples; the run's own directory is trusted
    return torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}


def saved_reference(plan: LoadPlan) -> int | None:
    """Return the rollout after which the reference model in the checkpoint was copied; None: the
    checkpoint has no reference model, or only its weights are loaded (--finetune).
    """
    if plan.kind != "megatron" or plan.iteration is None:
        return None
    return read_common(plan.path).get("reference_iteration")


# -- reading ---------------------------------------------------------------------------------------


def _read_model(plan: LoadPlan, state: TrainerState) -> None:
    """Read the model. Layers of Transformer Engine also have an extra state (history of FP8 scaling
    factors), which is new if the checkpoint was saved by other layers."""
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
        bad = [name for name in (*missing, *result.unexpected_keys) if not name.endswith(_TE_STATE)]
        assert not bad, bad  # `_account_for` has compared the names


def _read_optimizer(plan: LoadPlan, state: TrainerState, saved: StateDict) -> float:
    """Read the optimizer, after the model: master weights may share memory with float32 parameters,
    and are more precise."""
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
    """Compare the weights that all ranks need with those of the checkpoint. Collective.

    Args:
        state: this rank's state.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names missing tensors, and tensors without a parameter.
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
            fix="it holds only adapters: pass the --lora-* flags of the run that trained them"
            if needed and left_over and all(map(is_adapter_parameter, left_over))
            else "it must be a checkpoint of the same model; pass --load with another directory, "
            "or the flags that the model was saved with",
        )
    files = {info.relative_path for info in contents.storage_data.values()}
    num_elements = sum(entry.data.numel() for entry in entries)
    return LoadReport(directory, len(entries), num_elements, len(files), len(ignored))


def _is_of(name: str, state: TrainerState) -> bool:
    """Tell whether a tensor of a checkpoint is a weight of the model of ``state``."""
    if state.prefix:
        return name.startswith(state.prefix)
    is_weight = name.split(".")[0].split("/")[0] not in _OTHER
    return is_weight and (state.part != "trunk" or belongs(name, state.part))


def _account_for_optimizer(entries: list[Any], contents: Any, directory: Path) -> None:
    """Check that the checkpoint has optimizer states for all trained parameters. Collective.

    Args:
        entries: this rank's sharded tensors of the optimizer.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names the states that any rank misses; raised on every rank.
    """
    own = {entry.key for entry in entries} - contents.state_dict_metadata.keys()
    names = sorted(set().union(*all_gather(sorted(own))))
    if names:
        raise UserError(
            f"{directory} has no optimizer states for {len(names)} tensors that are trained now",
            why=f"{first_few(names)}: they were frozen when it "
            "was saved, or --optimizer was another one",
            fix="pass the flags that it was saved with (--optimizer, --freeze-params-name-list, "
            "--only-train-params-name-list), or --no-load-optim for a fresh optimizer",
        )


def _named(names: list[str], what: str) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {first_few(names)}"]
