"""Loading says what it did, and fails by name on any parameter or tensor that has no
counterpart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.checkpoints.hf_io import load_hf
from slime.checkpoints.megatron_names import Placement, global_parameters
from slime.errors import UserError
from slime.models import family_of
from slime.models.layouts import Shard
from slime.models.quantised import Fp8, Quantisation
from slime.weights.source import ModelSource, QuantisedSource
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import MegatronStub, random_hf


def model_of(family_name: str, seed: int = 0, **changes: object) -> tuple[dict, dict, MegatronStub]:
    config = config_of(family_name, **changes)
    family = family_of(config)
    spec = family.model_spec(config)
    tensors = random_hf(family, spec, seed)
    return config, tensors, MegatronStub(family, spec, tensors)


def write(directory: Path, config: dict, tensors: dict) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_the_report(tmp_path: Path) -> None:
    config, tensors, _ = model_of("llama", seed=1)
    extra = {"model.rotary_emb.inv_freq": torch.ones(2)}
    directory = write(tmp_path / "m", config, {**tensors, **extra})
    _, _, model = model_of("llama", seed=2)
    report = load_hf([model], directory)
    parameters = list(model.parameters())
    assert report.num_loaded == len(parameters) and report.num_elements == sum(
        p.numel() for p in parameters
    )
    assert report.nbytes == 4 * report.num_elements and report.files == {
        "model.safetensors": len(parameters)
    }
    assert report.ignored == tuple(extra) and "1 tensors are not used" in str(report)
    exported = dict(ModelSource([model], config).tensors())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported.items())
    layers = [int(found[1]) for name in exported if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers) and len(set(layers)) > 1
    assert next(iter(exported)) == "model.embed_tokens.weight"


def test_layers_for_multi_token_prediction_are_counted(tmp_path: Path) -> None:
    """One more than config.json announces is not such a layer but a checkpoint of another model."""
    config, tensors, model = model_of("deepseek_v3", num_nextn_predict_layers=1)
    mtp = {
        f"model.layers.2.{name}": torch.ones(2)
        for name in ("eh_proj.weight", "mlp.gate.weight", "enorm.weight")
    }
    report = load_hf([model], write(tmp_path / "m", config, {**tensors, **mtp}))
    assert set(report.ignored) == set(mtp) and "3 tensors are not used" in str(report)
    with pytest.raises(UserError, match=r"1 tensor unknown in layers 3 of 2"):
        load_hf(
            [model],
            write(
                tmp_path / "m", config, {**tensors, "model.layers.3.enorm.weight": torch.ones(2)}
            ),
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q_a_proj.weight_scale_inv", "FP8"),
        ("q_a_proj.qweight", "INT4"),
        ("o_proj.weight_packed", "I"),
    ],
)
def test_quantised_checkpoints_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    config, tensors, model = model_of("deepseek_v3")
    name = f"model.layers.1.self_attn.{name}"
    with pytest.raises(UserError, match=rf"quantised to {kind}(.|\n)*{name}"):
        load_hf([model], write(tmp_path / "m", config, {**tensors, name: torch.ones(2, 2)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    config, tensors, model = model_of("qwen3")
    name = "model.layers.1.self_attn.q_proj.weight"
    odd = tensors[name].clone()
    odd[3, 5] = value
    with pytest.raises(UserError, match=f"{name} has values that are not finite"):
        load_hf([model], write(tmp_path / "m", config, {**tensors, name: odd}))


def test_the_files_dtype_is_cast_to_the_models(tmp_path: Path) -> None:
    config, tensors, model = model_of("qwen3")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    load_hf([model], write(tmp_path / "m", config, half))
    assert all(
        torch.equal(t, half[name].float()) for name, t in ModelSource([model], config).tensors()
    )


def test_a_parameter_that_the_table_does_not_know(tmp_path: Path) -> None:
    config, tensors, _ = model_of("llama")
    _, _, with_biases = model_of("qwen2")
    with pytest.raises(
        UserError, match=r"linear_qkv\.bias \[32\] that the table of llama does not know"
    ):
        load_hf([with_biases], write(tmp_path / "m", config, tensors))


def test_a_tensor_that_no_parameter_takes(tmp_path: Path) -> None:
    config, tensors, _ = model_of("qwen3")
    _, _, without_norms = model_of("llama")
    with pytest.raises(UserError, match=r"4 tensors of .* were taken by no parameter(.|\n)*k_norm"):
        load_hf([without_norms], write(tmp_path / "m", config, tensors))


def test_matrices_of_zeros_are_named_one_expert_of_a_run_is_enough() -> None:
    config, _, model = model_of("llama")
    quantisation = Quantisation("fp8", Fp8((8, 8)), ("lm_head", "model.embed_tokens"))
    export = QuantisedSource(ModelSource([model], config), quantisation, torch.float32)
    scattered = torch.eye(2)[:, :, None].repeat(1, 1, 3)  # each row is zero in one expert
    one_empty = torch.ones(2, 2, 3)
    one_empty[1] = 0.0
    given = {
        "scattered": scattered,
        "one empty": one_empty,
        "row": torch.tensor([[0.0, 0.0], [0.0, 1.0]]),
        "zeros": torch.zeros(2, 3),
        "norm": torch.zeros(3),
    }
    inner: Any = SimpleNamespace(tensors=lambda: iter(given.items()))
    export._source = inner
    assert [name for name, _ in export.tensors()] == list(given)
    assert export.zeros == ["one empty", "zeros"]


def test_names_are_global_on_every_pipeline_stage_and_expert_rank() -> None:
    config = config_of("llama", num_hidden_layers=4)
    family = family_of(config)
    spec = family.model_spec(config)
    chunks = [
        MegatronStub(family, spec, random_hf(family, spec), layers=range(n, n + 1)) for n in (1, 3)
    ]
    layers = {name.split(".")[2] for name, _ in global_parameters(chunks) if "layers" in name}
    assert layers == {"1", "3"}

    stub = MegatronStub(family, spec, random_hf(family, spec), layers=range(2, 3))
    stub._place("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", torch.ones(1))
    stub._place("decoder.layers.0.mlp.experts.linear_fc2.weight1", torch.ones(1))
    names = [
        name
        for name, _ in global_parameters([stub], 8, Placement(ep_rank=3, ep_size=4))
        if "experts" in name
    ]
    assert sorted(names) == [
        "decoder.layers.2.mlp.experts.linear_fc2.weight7",
        "decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight",
    ]


def test_a_stub_piece_is_what_a_rank_would_hold() -> None:
    """The stand-in that these tests rest on cuts as the layouts say."""
    config = config_of("llama")
    family = family_of(config)
    spec = family.model_spec(config).padded(2)
    stub = MegatronStub(family, spec, random_hf(family, spec), shard=Shard(1, 2))
    assert stub.get_parameter("embedding.word_embeddings.weight").shape == (25, 16)
