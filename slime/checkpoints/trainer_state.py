"""The content of a trainer's checkpoint, as megatron-core's sharded state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from slime.checkpoints.directory import CRITIC, RELEASE
from slime.checkpoints.megatron_names import ModelPart, belongs, stored_tensors, unwrapped
from slime.checkpoints.optimizer_state import sharded_optimizer_state
from slime.checkpoints.random_state import random_layout, random_state, sharded_random_state
from slime.checkpoints.sharded_store import StateDict
from slime.models.adapters import AdapterConfig

REFERENCE = "reference"
ADAPTERS = "adapters"
BASE = "base"


def adapter_facts(adapters: AdapterConfig) -> dict[str, Any]:
    """Return a checkpoint's record of its adapters, as plain values."""
    return asdict(adapters) | {"targets": sorted(adapters.targets)}


@dataclass
class TrainerState:
    """This rank's part of a checkpoint.

    Attributes:
        model_chunks: one per virtual pipeline stage, wrapped or not.
        optimizer: Megatron's (distributed or not); None omits it.
        scheduler: learning-rate schedule with ``state_dict`` / ``load_state_dict``.
        reference: weights of the reference model, one for each of the chunks' `stored_tensors`;
            None unless the run has changed them (--ref-update-interval): otherwise they are those
            of --ref-load.
        reference_iteration: the rollout after which the policy had the reference's weights.
        part: the part of the model to save or load.
        adapters: the model's adapters, if it has any.
        base: absolute path of the frozen weights beside a critic's adapters, a Hugging Face
            directory or one iteration of a checkpoint; None: those of the policy.
        prefix: prefix of all tensor names: "critic." for the critic's.
        critic: the state of a critic that is trained on the same ranks.
        layout: enters a context in which Megatron's groups are those of this model's layout.
    """

    model_chunks: Sequence[nn.Module]
    optimizer: Any = None
    scheduler: Any = None
    reference: Sequence[Tensor] | None = None
    reference_iteration: int | None = None
    part: ModelPart = "everything"
    adapters: AdapterConfig | None = None
    base: str | None = None
    prefix: str = ""
    critic: TrainerState | None = None
    layout: Callable[[], AbstractContextManager[None]] = nullcontext

    def everything(
        self, iteration: int | str, *, save_optimizer: bool = True, save_rng: bool = True
    ) -> StateDict:
        """Return the whole content of a checkpoint as a sharded state dict. Collective.

        Args:
            iteration, save_optimizer, save_rng: as for `CheckpointWriter.save`.
        """
        saved = self._trained_state(save_optimizer=save_optimizer)
        if self.prefix:
            saved = {CRITIC: saved}
        if self.critic is not None:
            with self.critic.layout():
                saved[CRITIC] = self.critic._trained_state(save_optimizer=save_optimizer)
        if self.reference is not None:
            saved[REFERENCE] = self.reference_model()
            saved["reference_iteration"] = self.reference_iteration
        if save_rng:
            saved["rng_state"] = sharded_random_state(random_state())
        saved["iteration"] = 0 if iteration == RELEASE else iteration
        saved["checkpoint_version"] = 3.0
        saved["layout"] = {**random_layout(), "has_rng_state": save_rng}
        return saved

    def _trained_state(self, *, save_optimizer: bool) -> StateDict:
        """Return the state of the model, its optimizer and its schedule. Collective."""
        saved = self.model()
        if self.adapters is not None:
            saved[ADAPTERS] = adapter_facts(self.adapters)
        if self.base is not None:
            saved[BASE] = self.base
        if save_optimizer and self.optimizer is not None:
            saved["optimizer"] = sharded_optimizer_state(self.optimizer, self.model())
            if self.scheduler is not None:
                saved["opt_param_scheduler"] = self.scheduler.state_dict()
        return saved

    def chunks(self) -> dict[str, nn.Module]:
        """Return the unwrapped model chunks, by their names in a state dict."""
        chunks = unwrapped(self.model_chunks)
        return {
            "model" if len(chunks) == 1 else f"model{number}": chunk
            for number, chunk in enumerate(chunks)
        }

    def model(self) -> StateDict:
        """Return the parameters as megatron-core shards them, which every layout can read."""
        from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
        from megatron.core.parallel_state import get_data_parallel_group

        metadata = {"dp_cp_group": get_data_parallel_group(with_context_parallel=True)}
        found = {
            key: chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
            for key, chunk in self.chunks().items()
        }
        chosen = {
            key: {name: entry for name, entry in state.items() if belongs(name, self.part)}
            for key, state in found.items()
        }
        if self.prefix:
            add_prefix_for_sharding(chosen, self.prefix)
        return chosen

    def reference_model(self) -> list[Any]:
        """Return the reference's tensors under the policy's names, prefixed with "reference."."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        assert self.reference is not None
        copy_of = {
            id(own): copy
            for own, copy in zip(stored_tensors(self.model_chunks), self.reference, strict=True)
        }
        return [
            replace(entry, key=f"{REFERENCE}.{entry.key}", data=copy_of[id(entry.data)])
            for entry in nested_values(self.model())
            if id(entry.data) in copy_of
        ]
