"""Tiny models of plain weights in several shards, and the reference that conversions are compared
with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime.checkpoints.hf_files import INDEX, SINGLE
from slime.checkpoints.quantised_check import verify_quantised
from slime.models import family_of, read_hf_config
from slime.models.quantised import Int4, Quantisation
from tests.support.hf_configs import config_of

INT4 = Quantisation(
    "compressed-tensors", Int4(8), ("lm_head", "model.embed_tokens.weight", r"re:.*mlp\.gate\..*")
)
#: Sizes that groups of 8 and blocks of 16 divide, and blocks of 128 do not.
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "moe_intermediate_size": 24}


def make_plain(
    directory: Path, family: str, shards: int = 1, seed: int = 0, **changes: object
) -> Path:
    """Random bfloat16 weights of the smallest model of ``family``; no transformers, no
    tokenizer."""
    config = config_of(family, dtype="bfloat16", **{**_SIZES, **changes})
    table = family_of(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.05).bfloat16()
        for name, shape in table.hf_tensors(table.describe(config))
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    write_shards(directory, tensors, shards)
    return directory


def write_shards(directory: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    for old in directory.glob("*.safetensors"):
        old.unlink()
    if shards == 1:
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
        return
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    where = {name: files[number * shards // len(tensors)] for number, name in enumerate(tensors)}
    for file in files:
        part = {name: tensors[name] for name in tensors if where[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit; float8 knows no comparison."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def verify(directory: Path) -> str:
    """What `verify_quantised` counts in a directory, by its own config.json."""
    config = read_hf_config(directory)
    family, quantisation = family_of(config), Quantisation.read(config)
    assert quantisation is not None
    return verify_quantised(directory, family, family.describe(config), quantisation)
