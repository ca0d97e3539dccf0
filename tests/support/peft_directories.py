"""Adapters with random numbers on both sides, as a PEFT directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.checkpoints.peft_files import write_adapter
from slime.config.groups_lora import LoraConfig
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family


def adapters_for(model: Path, **flags: Any) -> AdapterConfig:
    family = family_of(model)
    return AdapterConfig.for_model(LoraConfig(**flags), family, family.model_spec(model))


def random_adapter(model: Path, directory: Path, **flags: Any) -> dict[str, Tensor]:
    """Write an adapter for the model of a directory, by the --lora-* flags; returns its tensors."""
    family = family_of(model)
    spec = family.model_spec(model)
    chosen = adapters_for(model, **flags)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: 0.1 * torch.randn(shape, generator=generator)
        for name, shape in adapter_family(family, spec, chosen).hf_tensors(spec)
    }
    write_adapter(directory, tensors, chosen, spec, base=str(model))
    return tensors
