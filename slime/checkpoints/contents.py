"""Which tensors a checkpoint holds against which the model needs: none missing, none left over, all counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.errors import UserError

#: Not the policy's weights: what else a checkpoint may hold, by the first part of its name.
_OTHER = ("optimizer", "reference", "rng_state", "rerun_state_machine_state")
#: Transformer Engine's scaling factors, which other layers do not have.
TE_STATE = "_extra_state"


@dataclass(frozen=True)
class LoadReport:
    """What a load took from a checkpoint, on this rank.

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
        return text + (f"; {self.num_ignored} entries of Transformer Engine are not used" if self.num_ignored else "")


def account_for(model_state: dict[str, Any], contents: Any, directory: Path) -> LoadReport:
    """Compare what all ranks want of the policy's weights with what is there. Collective.

    Args:
        model_state: this rank's sharded state dict of the model.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names tensors that are missing, and tensors that no parameter takes.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    entries = [entry for entry in nested_values(model_state) if not isinstance(entry, ShardedObject)]
    wanted: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(wanted, {entry.key for entry in entries})
    needed = set().union(*wanted)
    present = {name for name in contents.state_dict_metadata if name.split(".")[0].split("/")[0] not in _OTHER}
    ignored = {name for name in present if TE_STATE in name}
    missing, left_over = sorted(needed - present), sorted(present - ignored - needed)
    if missing or left_over:
        raise UserError(
            f"{directory} cannot be loaded into this model",
            why="; ".join(_named(missing, "missing") + _named(left_over, "that no parameter takes")),
            fix="it must be a checkpoint of the same model; pass --load with another directory, or the flags that the"
            " model was saved with",
        )
    files = {info.relative_path for info in contents.storage_data.values()}
    num_elements = sum(entry.data.numel() for entry in entries)
    return LoadReport(directory, len(entries), num_elements, len(files), len(ignored))


def account_for_optimizer(entries: list[Any], contents: Any, directory: Path) -> None:
    """Is there a state for all that is trained? Collective.

    Args:
        entries: this rank's sharded tensors of the optimizer.
        contents: torch's table of contents of the checkpoint.
    Raises:
        UserError: names states that are missing on any rank, on every rank.
    """
    own = {entry.key for entry in entries} - contents.state_dict_metadata.keys()
    missing: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(missing, own)
    names = sorted(set().union(*missing))
    if names:
        raise UserError(
            f"{directory} has no optimizer states for {len(names)} tensors that are trained now",
            why=f"{', '.join(names[:4])}{' …' if len(names) > 4 else ''}: they were frozen when it was saved, or"
            " --optimizer was another one",
            fix="pass the flags that it was saved with (--optimizer, --freeze-params-name-list,"
            " --only-train-params-name-list), or --no-load-optim to go on with a fresh optimizer",
        )


def _named(names: list[str], what: str) -> list[str]:
    if not names:
        return []
    listed = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return [f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {listed}"]
