"""Directories whose experts are not in the published layout: written by transformers, they load
into trainer and embedded engine, and an export has the published layout again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.hf_io import load_hf
from slime.engines.kinds import engine_kind
from slime.errors import UserError
from slime.models import family_of
from slime.weights.source import ModelSource
from tests.support import tiny_models
from tests.support.embedded_models import make_scheduler
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import MegatronStub, random_hf
from tests.support.tiny_models import save_tiny

FAMILIES = ["qwen3_5_moe", "qwen3_vl_moe"]
Tensors = dict[str, torch.Tensor]


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def one_by_one(tensors: Tensors, is_transposed: bool) -> Tensors:
    """Write [experts, out, in] (``is_transposed``: [experts, in, out]) expert by expert."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            found[name] = tensor
            continue
        for number, one in enumerate(tensor.transpose(1, 2) if is_transposed else tensor):
            parts = {"down_proj": one}
            if leaf == "gate_up_proj":
                parts = dict(zip(["gate_proj", "up_proj"], one.chunk(2)))
            for piece, matrix in parts.items():
                found[f"{prefix}.{number}.{piece}.weight"] = matrix.contiguous()
    return found


def transposed(tensors: Tensors) -> Tensors:
    return {
        name: one.transpose(1, 2).contiguous() if ".mlp.experts." in name else one
        for name, one in tensors.items()
    }


@pytest.mark.parametrize("family_name", FAMILIES)
@pytest.mark.parametrize("layout", ["one by one", "transposed"])
def test_other_layouts_fill_the_trainer_alike(
    family_name: str, layout: str, tmp_path: Path
) -> None:
    config = config_of(family_name)
    family = family_of(config)
    spec = family.model_spec(config)
    tensors = random_hf(family, spec, 0)
    is_vision = family_name == "qwen3_vl_moe"
    other = transposed(tensors) if layout == "transposed" else one_by_one(tensors, is_vision)
    directory = write(tmp_path / "m", config, other)
    model = MegatronStub(family, spec, random_hf(family, spec, 1))
    load_hf([model], directory)
    exported = dict(ModelSource([model], config).tensors())
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())
    reader = HfReader(directory)
    reader.verify(family, spec)
    assert reader.has_transposed_stacks == (layout == "transposed")
    name = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    for index in [(slice(1, 2), slice(1, -1), slice(0, 2)), (slice(0, 2), slice(3, 5)), ...]:
        assert torch.equal(reader[name][index], tensors[name][index])


def test_a_missing_piece_of_an_expert_is_named(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe")
    family = family_of(config)
    spec = family.model_spec(config)
    tensors = one_by_one(random_hf(family, spec, 0), is_transposed=False)
    name = next(name for name in tensors if name.endswith("experts.1.up_proj.weight"))
    whole = tensors.pop(name)
    with pytest.raises(UserError) as missing:
        HfReader(write(tmp_path / "m", config, tensors)).verify(family, spec)
    assert f"1 tensor missing in layers {name.split('.layers.')[1][0]}" in missing.value.why
    assert missing.value.why.endswith(name)
    cut = write(tmp_path / "m", config, {**tensors, name: whole[:, 1:].contiguous()})
    with pytest.raises(UserError, match="not of the shape"):
        HfReader(cut).verify(family, spec)


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_vl_moe"])
def test_what_transformers_writes_serves_alike(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(kind, tmp_path / "published")
    for rewrites in ("stack_experts", "transpose_experts"):
        monkeypatch.setattr(tiny_models, rewrites, lambda directory: None)
    save_tiny(kind, tmp_path / "written")
    there = HfReader(tmp_path / "written").names() ^ HfReader(tmp_path / "published").names()
    is_one_by_one = any(name.endswith(".experts.0.gate_proj.weight") for name in there)
    assert is_one_by_one == (kind == "qwen3_5_moe_text")
    stores = [
        make_scheduler(tmp_path / name, max_length=16).store for name in ("published", "written")
    ]
    assert stores[0].fingerprints() == stores[1].fingerprints()


def test_sglang_is_not_started_on_transposed_stacks(tmp_path: Path) -> None:
    engine_kind("embedded").check_transposed_experts(tmp_path)
    with pytest.raises(UserError, match=r"--rollout-engine embedded") as refused:
        engine_kind("sglang").check_transposed_experts(tmp_path)
    assert "[experts, out, in]" in str(refused.value)


def test_a_square_stack_is_as_its_layer(tmp_path: Path) -> None:
    """With gate and up together as wide as the model, shapes alone do not tell of that stack."""
    config = config_of("qwen3_vl_moe")
    text = config["text_config"]
    text["moe_intermediate_size"] = text["hidden_size"] // 2
    family = family_of(config)
    spec = family.model_spec(config)
    tensors = random_hf(family, spec, 0)
    for number, stored in enumerate([tensors, transposed(tensors)]):
        reader = HfReader(write(tmp_path / str(number), config, stored))
        reader.verify(family, spec)
        assert all(torch.equal(reader[name][...], one) for name, one in tensors.items())
