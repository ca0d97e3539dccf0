"""Random adapters (LoRA) of tiny models: as PEFT's files, as what SGLang's route takes, and merged
into the base."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slime.models import family_of
from slime.models.adapters import AdapterConfig, adaptable, adapter_family, split_peft_name

Tensors = dict[str, torch.Tensor]


def peft_config(rank: int, alpha: float, targets: Sequence[str], **fields: Any) -> dict[str, Any]:
    """``adapter_config.json`` with the fields that every reader needs."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "target_parameters": None,
        **fields,
    }


def random_adapter(
    directory: Path,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] | None = None,
    size: float = 0.15,
    **fields: Any,
) -> tuple[dict[str, Any], Tensors]:
    """Config and float32 tensors of an adapter of the model in ``directory``, one name per expert.

    Args:
        targets: last parts of the layers' names; None: all that can have one.
        size: of the entries.
    """
    family = family_of(directory)
    spec = family.describe(directory)
    chosen = list(targets or adaptable(family, spec))
    table = adapter_family(family, spec, AdapterConfig(rank, 8.0, frozenset(chosen)))
    noise = torch.Generator().manual_seed(seed)
    tensors = {
        name: size * torch.randn(shape, generator=noise) for name, shape in table.hf_tensors(spec)
    }
    return peft_config(rank, 8.0, chosen, **fields), tensors


def save_adapter(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge_adapter(base: Path, config: Mapping[str, Any], tensors: Tensors, directory: Path) -> Path:
    """A copy of the model in ``base`` with W + s·B·A in place of each W; ``tensors`` have one name
    per expert."""
    shutil.copytree(base, directory)
    weights = load_file(base / "model.safetensors")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, down in tensors.items():
        split = split_peft_name(name)
        if split is not None and split[1] == "A":
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            delta = (scale * up.double() @ down.double()).float()
            if f"{split[0]}.weight" in weights:
                weights[f"{split[0]}.weight"] += delta
            else:
                _part_of_stack(weights, split[0], delta.shape).add_(delta)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _part_of_stack(weights: Tensors, module: str, shape: torch.Size) -> torch.Tensor:
    """An expert's layer of this shape, [out, in], in a stack [experts, out, in] with gate above up,
    or in one of gpt-oss: [experts, in, out], in which gate and up alternate."""
    owner, number, leaf = module.rsplit(".", 2)
    if leaf == "down_proj":
        whole = weights[f"{owner}.down_proj"][int(number)]
        return whole if whole.shape == shape else whole.t()
    whole = weights[f"{owner}.gate_up_proj"][int(number)]
    first = ("gate_proj", "up_proj").index(leaf)
    return whole.chunk(2)[first] if whole.shape[1] == shape[1] else whole[:, first::2].t()


def stacked_experts(tensors: Tensors, shares: bool = False, fuses: bool = False) -> Tensors:
    """The same adapter with the experts of a layer in one tensor of three axes, as SGLang takes it.

    Args:
        shares: outer sides have one expert, the first one's; see `with_shared_sides`.
        fuses: gate and up are one ``gate_up_proj`` with the A of gate.
    """
    found: dict[str, list[torch.Tensor]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name)
        if expert is None:
            others[name] = tensor
        else:
            found.setdefault(f"{expert[1]}.{expert[2]}", []).append(tensor)
    stacked = {
        name: torch.stack(whole[:1] if shares and is_outer_side(name) else whole)
        for name, whole in found.items()
    }
    if fuses:
        for name in [name for name in stacked if ".gate_proj." in name]:
            up = stacked.pop(name.replace(".gate_proj.", ".up_proj."))
            gate = stacked.pop(name)
            one = gate if ".lora_A." in name else torch.cat([gate, up], dim=1)
            stacked[name.replace(".gate_proj.", ".gate_up_proj.")] = one
    return others | stacked


def with_shared_sides(tensors: Tensors) -> Tensors:
    """Every expert has the first one's outer sides: A of gate (also up's) and B of down."""
    return {
        name: tensors[_first_of(name)] if is_outer_side(name) else tensor
        for name, tensor in tensors.items()
    }


def is_outer_side(name: str) -> bool:
    side = ".lora_B." if ".down_proj." in name else ".lora_A."
    return ".experts." in name and side in name


def _first_of(name: str) -> str:
    name = re.sub(r"\.experts\.\d+\.", ".experts.0.", name)
    return name.replace(".up_proj.", ".gate_proj.")


def serialized(tensors: Mapping[str, torch.Tensor]) -> str:
    """``serialized_tensors`` of SGLang's route."""
    return base64.b64encode(pickle.dumps(dict(tensors))).decode()


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """``expected_checksums`` of SGLang's route."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def load_body(
    name: str, config: Mapping[str, Any], tensors: Tensors, **fields: Any
) -> dict[str, Any]:
    """The body of ``/load_lora_adapter_from_tensors``."""
    content = {"config_dict": config, "serialized_tensors": serialized(tensors)}
    return {"lora_name": name, **content, **fields}
