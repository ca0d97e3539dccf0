"""Every model family computes in the trainer what transformers computes, and goes to Hugging Face
form and back."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.config import make_config
from slime.embedded.architecture import Architecture, Rope
from slime.errors import UserError
from slime.models import FAMILIES, family_of
from slime.models.flops import sequence_cost
from slime.models.mixers import mixer_of
from slime.models.model_flags import check_model_flags, merge_transformer
from slime.models.not_trained import NOT_TRAINED, NotTrained
from slime.models.parameters import ModelParameters
from slime.models.rotary import layer_frequencies
from slime.models.spec import check_same_model, check_trainable
from slime.trainer.megatron.moe_layer import expert_layers
from tests.support.hf_configs import NESTED, PUBLISHED
from tests.support.public_models import PUBLIC, public_config
from tests.support.tiny_models import HYBRIDS, OTHER_FAMILIES, WITH_IMAGES, save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import gradients, trainer


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", *OTHER_FAMILIES, *WITH_IMAGES, "mistral, window", "qwen2, window"]
)
def test_log_probs_equal_transformers_and_weights_come_back(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path / "hf")
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), save_hf=str(tmp_path / "back"))
    try:
        batch = make_batch()
        scores = backend.log_probs(batch)
        backend.save(0)
    finally:
        backend.close()
    assert scores is not None
    for tokens, response, ours in zip(batch.tokens, batch.response_lengths, scores):
        with torch.no_grad():
            logp = (model(tokens[None]).logits[0] / 0.8).log_softmax(-1)
        theirs = logp[:-1].gather(1, tokens[1:, None])[-response:, 0]
        tolerance = 5e-4 if kind in HYBRIDS else 5e-6
        assert torch.allclose(ours, theirs, atol=tolerance, rtol=0)
    saved, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    arch = Architecture.from_dir(tmp_path / "hf")
    served = ModelParameters(arch.family, arch.spec).served  # the names of a push
    family = arch.family
    trained = {name: one for name, one in saved.items() if not family.is_carried(name, arch.spec)}
    assert served == {name: ("", tuple(tensor.shape)) for name, tensor in trained.items()}
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]
        == kind.split(",")[0]
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)},
        {"recompute_activations": True},
    ],
    ids=["up projection", "layers"],
)
def test_recomputation_changes_no_gradient(flags: dict[str, Any], tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    results = []
    for options in ({}, flags):
        backend = trainer(hf_checkpoint=str(tmp_path), **options)
        try:
            results.append(gradients(backend, make_batch()))
            attention = backend.model_chunks[0].get_submodule(
                "module.decoder.layers.0.self_attention"
            )
            assert attention.recompute_up_proj == ("recompute_modules" in options)
        finally:
            backend.close()
    for name, gradient in results[0].items():
        assert torch.equal(results[1][name], gradient), name
        assert gradient.abs().max() > 0, name


def test_the_trainer_refuses_sequences_that_longrope_is_not_computed_for(tmp_path: Path) -> None:
    save_tiny("phi3, longrope", tmp_path)
    batch = make_batch()
    longest = max(map(len, batch.tokens))
    config = json.loads((tmp_path / "config.json").read_text())
    for limit, is_refused in ((longest, False), (longest - 1, True)):
        config["original_max_position_embeddings"] = limit
        config["rope_parameters"]["original_max_position_embeddings"] = limit
        (tmp_path / "config.json").write_text(json.dumps(config))
        backend = trainer(hf_checkpoint=str(tmp_path))
        try:
            if is_refused:
                with pytest.raises(UserError, match=f"has {longest} tokens(.|\n)*{limit}"):
                    backend.log_probs(batch)
            else:
                assert backend.log_probs(batch) is not None
        finally:
            backend.close()


def test_the_expert_bias_is_kept_in_checkpoints_and_moves_only_when_asked(tmp_path: Path) -> None:
    save_tiny("glm4_moe", tmp_path / "hf")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    original = load_file(tmp_path / "hf" / "model.safetensors")[name]
    for rate, moves in ((None, False), (0.01, True)):
        save = tmp_path / f"run {rate}"
        backend = trainer(
            hf_checkpoint=str(tmp_path / "hf"),
            save=str(save),
            save_hf=str(tmp_path / "back"),
            moe_router_bias_update_rate=rate,
        )
        try:
            backend.train(make_batch())
            backend.save(0)
        finally:
            backend.close()
        after = load_file(tmp_path / "back" / "model.safetensors")[name]
        step = (after - original).abs().max().item()
        assert step == pytest.approx(0.01 if moves else 0.0, abs=1e-7)
        resumed = trainer(
            hf_checkpoint=str(tmp_path / "hf"), load=str(save), save_hf=str(tmp_path / "again")
        )
        try:
            resumed.save(1)
        finally:
            resumed.close()
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], after)


def test_the_reference_has_its_own_expert_bias(tmp_path: Path) -> None:
    save_tiny("glm4_moe, as Air", tmp_path)
    backend = trainer(hf_checkpoint=str(tmp_path), use_kl_loss=True, kl_loss_coef=0.1)
    try:
        batch = make_batch()
        before = backend.log_probs(batch)
        for layer in expert_layers(backend.model_chunks):
            assert layer.router.expert_bias is not None
            layer.router.expert_bias.copy_(layer.router.expert_bias.flip(0) * 3)
        policy, reference = backend.log_probs(batch), backend.log_probs(batch, "reference")
    finally:
        backend.close()
    assert before is not None and policy is not None and reference is not None
    assert all(torch.equal(a, b) for a, b in zip(before, reference))
    assert not all(torch.equal(a, b) for a, b in zip(before, policy))


def test_an_updated_reference_goes_on_with_its_expert_bias(tmp_path: Path) -> None:
    save_tiny("glm4_moe, as Air", tmp_path / "hf")
    save = str(tmp_path / "run")
    flags = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "ref_update_interval": 1,
        "moe_router_bias_update_rate": 0.05,
    }
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), save=save, **flags)
    try:
        backend.train(make_batch())
        saved = [tensor.clone() for tensor in backend.copies["reference"].tensors]
        backend.save(0)
    finally:
        backend.close()
    resumed = trainer(hf_checkpoint=str(tmp_path / "hf"), load=save, save=save, **flags)
    try:
        assert resumed.copies["reference"].iteration == 0
        assert len(resumed.copies["reference"].tensors) == len(saved)
        assert all(torch.equal(a, b) for a, b in zip(resumed.copies["reference"].tensors, saved))
    finally:
        resumed.close()


def test_a_model_that_only_model_name_tells_is_exported_as_it_was_loaded(tmp_path: Path) -> None:
    save_tiny("glm4", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "model_type": "not_known_here", "architectures": ["NotKnownHere"]})
    )
    backend = trainer(
        hf_checkpoint=str(tmp_path / "hf"), model_name="glm4", save_hf=str(tmp_path / "back")
    )
    try:
        backend.save(0)
    finally:
        backend.close()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


# -- published models ------------------------------------------------------------------------------


def spellings(model: str) -> list[dict[str, Any]]:
    """config.json as published, and as transformers 5 writes it."""
    old = PUBLISHED[model]["config"]
    moved = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
    new = {key: value for key, value in old.items() if key not in moved}
    return [old, {**new, "rope_parameters": PUBLISHED[model]["rope_parameters"]}]


def rotary_module(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' own; it has MiMo's under the name of Qwen2."""
    if config["model_type"] == "mimo":
        config = {**config, "model_type": "qwen2"}
    filled = transformers.AutoConfig.for_model(**config)
    one_layer = {**config, "num_hidden_layers": 1}
    if "layer_types" in config:
        one_layer["layer_types"] = config["layer_types"][-1:]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(filled.__class__(**one_layer))
    return type(model.rotary_emb)(filled)


@pytest.mark.parametrize("model", PUBLISHED)
def test_rotary_frequencies_of_published_models(model: str) -> None:
    module = rotary_module(PUBLISHED[model]["config"])
    for config, kind in product(spellings(model), ("main", "local", "none")):
        spec = family_of(config).model_spec(config)
        if kind not in spec.rotary_kinds:
            continue
        prefix = ""
        if "local" in spec.rotary_kinds:
            prefix = "full_attention_" if kind == "main" else "sliding_attention_"
        expected = getattr(module, f"{prefix}inv_freq")
        scaling = getattr(module, f"{prefix}attention_scaling")
        if kind == "none":
            expected = torch.zeros_like(expected)
            scaling = 1.0
        inverse, factor = layer_frequencies(spec, kind)
        assert torch.allclose(inverse, expected, rtol=1e-6, atol=0)
        assert factor == pytest.approx(scaling, rel=1e-6)
        rope = Rope(spec, kind)
        assert rope.interleaved == (spec.transformer["rotary_interleaved"] or spec.is_mla)
        cos, sin = rope.tables(2, torch.float32)
        pairs = slice(0, None, 2) if rope.interleaved else slice(len(inverse), None)
        assert torch.allclose(cos[1, 0, pairs], expected.cos() * factor, rtol=1e-6, atol=0)
        sign = -1 if rope.interleaved else 1  # of each pair the first has the negative sine
        assert torch.allclose(sign * sin[1, 0, pairs], expected.sin() * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("google/gemma-3-1b-pt", ["local"] * 5 + ["main"]),
        ("allenai/Olmo-3-1025-7B", ["local"] * 3 + ["main"]),
        ("HuggingFaceTB/SmolLM3-3B", ["main"] * 3 + ["none"]),
        ("LGAI-EXAONE/EXAONE-4.0-32B", ["main"] * 3 + ["none"]),
    ],
)
def test_which_rotary_embedding_layers_have(model: str, kinds: list[str]) -> None:
    config = PUBLISHED[model]["config"]
    spec = family_of(config).model_spec(config)
    assert [spec.rotary_kind(layer) for layer in range(len(kinds))] == kinds


@pytest.mark.parametrize("model", PUBLISHED)
def test_weights_with_another_rope_are_another_model(model: str) -> None:
    """They fit, and would be computed with the rope of --hf-checkpoint."""
    old, new = (family_of(config).model_spec(config) for config in spellings(model))
    check_same_model(old, new, Path("same"))
    settings = {"rope_type": "linear", "factor": 2.0}
    for change in (
        {"rope_theta": 12345.0, "rope_scaling": None},
        {"rope_theta": 1e4, "rope_scaling": settings},
    ):
        published = PUBLISHED[model]["config"]
        kept = {key: value for key, value in published.items() if key != "rope_parameters"}
        config = {**kept, **change}
        if config["model_type"] == "phi3" and change["rope_scaling"]:
            continue  # refused by itself
        if config["model_type"] == "ministral3":  # which has no other spelling
            settings = {"rope_type": "default", **(change["rope_scaling"] or {})}
            theta = {"rope_theta": change["rope_theta"]}
            config = {**kept, "rope_parameters": settings | theta}
        with pytest.raises(
            UserError, match=r"other is another model than --hf-checkpoint(.|\n)*rotary_"
        ):
            check_same_model(old, family_of(config).model_spec(config), Path("other"))


def test_a_reference_with_another_rope_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_tiny("glm4", tmp_path / "hf")
    shutil.copytree(tmp_path / "hf", tmp_path / "ref")
    path = tmp_path / "ref" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="ref is another model than --hf-checkpoint"):
        trainer(
            hf_checkpoint=str(tmp_path / "hf"),
            ref_load=str(tmp_path / "ref"),
            use_kl_loss=True,
            kl_loss_coef=0.1,
        )


def test_rotary_settings_that_go_into_the_attention() -> None:
    """YaRN's factor on the scores of DeepSeek-V3: (0.1 · ln 40 + 1)² / √192; pairs of neighbours in
    GLM-4 and ERNIE only."""
    from megatron.core.models.common.embeddings import _yarn_get_mscale

    for model, scale in (
        ("deepseek-ai/DeepSeek-V3", 0.13523377886),
        ("moonshotai/Moonlight-16B-A3B", 192**-0.5),
    ):
        for config in spellings(model):
            facts = family_of(config).model_spec(config).transformer
            size = facts["qk_head_dim"] + facts["qk_pos_emb_head_dim"]
            mscale = _yarn_get_mscale(facts["rotary_scaling_factor"], facts["mscale_all_dim"])
            assert mscale**2 * size**-0.5 == pytest.approx(scale, rel=1e-9)
    for model in PUBLISHED:
        config = PUBLISHED[model]["config"]
        spec = family_of(config).model_spec(config)
        assert spec.transformer["rotary_interleaved"] == (
            spec.family in ("glm", "glm4", "ernie4_5_moe")
        )
        percent = 0.5 if spec.family in ("glm", "glm4", "glm4_moe", "minimax_m2") else 1.0
        percent = 0.75 if "Phi-4-mini" in model else percent
        assert spec.rotary_percent == (0.25 if spec.family in HYBRIDS else percent)


@pytest.mark.parametrize("model", PUBLISHED)
def test_numbers_of_parameters_of_published_models(model: str) -> None:
    """All of them, as the model cards say; and those that a token passes, which the costs count,
    too."""
    config = PUBLISHED[model]["config"]
    family = family_of(config)
    spec = family.model_spec(config)
    total = passed = 0
    for name, shape in family.hf_tensors(spec):
        total += torch.Size(shape).numel()
        is_matrix = len(shape) > 1 and not name.endswith("_bias")
        if is_matrix and ("embed_tokens" not in name or spec.tie_embeddings):
            chosen = (
                spec.transformer["moe_router_topk"] / spec.num_experts if ".experts." in name else 1
            )
            passed += round(torch.Size(shape).numel() * chosen)
    assert total == pytest.approx(PUBLISHED[model]["parameters"], rel=2e-3)
    layers = range(spec.num_layers)
    beside = sum(mixer_of(spec.transformer, layer).token_flops(spec) for layer in layers)
    assert sequence_cost(family, config).linear == pytest.approx(2 * passed + beside, rel=1e-6)


def test_every_family_has_a_published_model_and_a_tiny_one() -> None:
    names = {family.name for family in FAMILIES}
    names -= NESTED.keys()  # the same decoder, described inside
    assert {config["config"]["model_type"] for config in PUBLISHED.values()} == names
    assert {kind.split(",")[0] for kind in OTHER_FAMILIES} >= names - {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mimo",  # transformers has none: it is Qwen2 by another name
    }


def test_mimo_is_qwen2_with_layers_that_are_not_used() -> None:
    config = PUBLISHED["XiaomiMiMo/MiMo-7B-RL"]["config"]
    family = family_of(config)
    spec = family.model_spec(config)
    qwen2 = family_of({"model_type": "qwen2"})
    assert spec == replace(qwen2.model_spec(config), family="mimo")
    assert list(family.hf_tensors(spec)) == list(qwen2.hf_tensors(spec))
    assert family.is_ignored("model.mtp_layers.0.input_proj.weight", spec)


# -- flags that describe the model -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("Qwen/Qwen3-4B", {"num_layers": 28}, "--num-layers 28.* is 36"),
        ("Qwen/Qwen3-4B", {"num_experts": 8}, "--num-experts 8.* has none"),
        ("Qwen/Qwen3-4B", {"rotary_interleaved": True}, "--rotary-interleaved.* is False"),
        (
            "zai-org/GLM-4.5-Air",
            {"moe_layer_freq": [1] * 46},
            r"--moe-layer-freq \[1, 1,.* is \[0, 1, 1",
        ),
        ("zai-org/GLM-4.5-Air", {"qk_layernorm": True}, "--qk-layernorm.* is False"),
        (
            "deepseek-ai/DeepSeek-V3",
            {"moe_router_group_topk": 2},
            "--moe-router-group-topk 2.* is 4",
        ),
        ("moonshotai/Moonlight-16B-A3B", {"moe_router_topk_scaling_factor": 2.5}, "2.5.* is 2.446"),
    ],
)
def test_flags_that_contradict_the_model(model: str, flags: dict[str, Any], said: str) -> None:
    config = PUBLISHED[model]["config"]
    described = family_of(config).model_spec(config).transformer
    with pytest.raises(UserError) as caught:
        merge_transformer(described, make_config(**flags).megatron.transformer)
    assert re.search(said, str(caught.value).replace("\n", " "))


def test_flags_that_agree_with_the_model() -> None:
    config = PUBLISHED["Qwen/Qwen3-30B-A3B"]["config"]
    described = family_of(config).model_spec(config).transformer
    flags = {
        "moe_layer_freq": [1] * 48,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_router_dtype": "fp32",
    }
    assert (
        merge_transformer(described, make_config(**flags).megatron.transformer)["num_moe_experts"]
        == 128
    )
    # of its latents, not of its heads
    deepseek = {**PUBLISHED["deepseek-ai/DeepSeek-V3"]["config"], "head_dim": 64}
    check_model_flags(
        make_config(kv_channels=128).megatron, family_of(deepseek).model_spec(deepseek)
    )


def test_of_69_public_models_59_train_and_the_others_have_a_reason() -> None:
    refused = {}
    for name in PUBLIC:
        config = public_config(name)
        try:
            family = family_of(config)
            spec = family.model_spec(config)
            check_trainable(spec)
            assert dict(family.hf_tensors(spec)), name
        except UserError as error:
            refused[name] = error.why
    assert (len(PUBLIC), len(PUBLIC) - len(refused)) == (69, 59)
    assert all("Missing: " in why for why in refused.values())


@pytest.mark.parametrize("one", NOT_TRAINED, ids=lambda one: one.models)
def test_a_family_that_is_not_trained_has_no_table(one: NotTrained) -> None:
    tabled = {name for family in FAMILIES for name in (*family.model_types, *family.architectures)}
    assert not tabled & set(one.names)
    for name in one.names:
        with pytest.raises(UserError) as caught:
            family_of({"model_type": name, "architectures": [name]})
        assert one.needs in caught.value.why
