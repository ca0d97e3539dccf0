"""Conversion tables and layouts: Hugging Face → Megatron → Hugging Face is the identity for any
shape and split."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime.errors import UserError
from slime.models import FAMILIES, ModelFamily, Rule, family_of
from slime.models.layouts import COLUMN, GATE_UP, QKV, REPLICATED, ROW, VOCAB, Shard
from slime.models.spec import ModelSpec, read_hf_config, rotary_settings
from tests.support.hf_configs import NESTED, config_of
from tests.support.megatron_stub import megatron_names, random_hf, sources_of


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    groups, per_group = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    return {
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "hidden_size": draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([8, 24])),
        "vocab_size": draw(st.integers(5, 40)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=60)
@given(family=st.sampled_from(FAMILIES), shape=shapes(), tensor_parallel=st.sampled_from([1, 2, 4]))
def test_round_trip_is_the_identity(family: ModelFamily, shape: dict, tensor_parallel: int) -> None:
    spec = family.model_spec(config_of(family.name, **shape)).padded(tensor_parallel, 2)
    rows = spec.num_query_groups * (spec.num_heads // spec.num_query_groups + 2) * spec.head_dim
    assume(rows % tensor_parallel == 0 and not (spec.is_mla and spec.num_heads % tensor_parallel))
    original = random_hf(family, spec)
    back: dict[str, torch.Tensor] = {}
    for name in megatron_names(family, spec):
        match = family.match_megatron(name, spec)
        assert match is not None
        layout = match.rule.layout
        sources = sources_of(match, original)
        size = tensor_parallel if layout.tp_axis is not None else 1
        pieces = [layout.load(sources, Shard(rank, size), spec) for rank in range(size)]
        assert len({piece.shape for piece in pieces}) == 1
        for exported, tensor in zip(match.exports, layout.export(pieces, spec)):
            if match.rule.is_stacked:
                back.setdefault(exported, torch.zeros_like(original[exported]))
                back[exported][match.expert] = tensor
            else:
                back[exported] = tensor
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)


def test_qkv_is_interleaved_by_query_group() -> None:
    spec = family_of(config_of("llama")).model_spec(config_of("llama", head_dim=1, hidden_size=4))
    q, k, v = (
        torch.arange(4.0)[:, None],
        torch.tensor([[10.0], [11.0]]),
        torch.tensor([[20.0], [21.0]]),
    )
    fused = QKV.load([q, k, v], Shard(), spec)
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert QKV.load([q, k, v], Shard(1, 2), spec).flatten().tolist() == [2, 3, 11, 21]
    # more ranks than query groups: ranks share a group's rows
    assert QKV.load([q, k, v], Shard(3, 4), spec).flatten().tolist() == [11, 21]


def test_each_rank_holds_its_own_gate_and_up() -> None:
    spec = family_of(config_of("llama")).model_spec(config_of("llama"))
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    assert GATE_UP.load([gate, up], Shard(1, 2), spec).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zero_rows() -> None:
    spec = family_of(config_of("llama")).model_spec(config_of("llama", vocab_size=5)).padded(4)
    assert spec.padded_vocab_size == 8
    pieces = [VOCAB.load([torch.ones(5, 3)], Shard(rank, 4), spec) for rank in range(4)]
    assert [int(piece.sum()) for piece in pieces] == [6, 6, 3, 0]


@pytest.mark.parametrize(
    ("layout", "sources", "text"),
    [
        (COLUMN, [torch.zeros(5, 2)], "length 5 cannot be cut into 2"),
        (ROW, [torch.zeros(2, 5)], "length 5 cannot be cut into 2"),
        (GATE_UP, [torch.zeros(4, 2), torch.zeros(6, 2)], "gate has shape"),
        (VOCAB, [torch.zeros(3, 2)], "vocab_size 49"),
        (QKV, [torch.zeros(16, 2), torch.zeros(4, 2), torch.zeros(8, 2)], "k has 4 rows"),
    ],
)
def test_wrong_shapes_are_refused(layout, sources, text) -> None:
    spec = family_of(config_of("llama")).model_spec(config_of("llama"))
    with pytest.raises(ValueError, match=text):
        layout.load(sources, Shard(0, 2), spec)


def test_no_copy_where_the_layout_allows() -> None:
    spec = family_of(config_of("llama")).model_spec(config_of("llama"))
    weight = torch.randn(48, 16)
    gate, up = GATE_UP.export([weight], spec)
    assert gate.data_ptr() == weight.data_ptr() and up.data_ptr() == weight[24:].data_ptr()
    assert REPLICATED.export([weight], spec)[0] is weight


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (10000.0, 1.0, None)),
        ({"rope_theta": 1e6, "rope_scaling": None}, (1e6, 1.0, None)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (1e6, 1.0, None)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "partial_rotary_factor": 0.5,
            },
            (5e5, 0.5, {"rope_type": "linear", "factor": 2.0}),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "max_position_embeddings": 64},
            (5e5, 1.0, {**LLAMA3, "original_max_position_embeddings": 64}),
        ),
        (
            {"rope_scaling": {"rope_theta": 5e5, **LLAMA3}, "original_max_position_embeddings": 32},
            (5e5, 1.0, {**LLAMA3, "original_max_position_embeddings": 32}),
        ),
    ],
)
def test_both_spellings_of_the_rotary_settings(config: dict, expected: tuple) -> None:
    assert rotary_settings(config) == expected


def test_contradicting_rotary_bases_are_refused() -> None:
    with pytest.raises(UserError, match="contradicts itself"):
        rotary_settings(
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
        )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("plain", [{"rope_type": "default"}, {}])
def test_a_scaling_added_in_the_old_spelling_is_not_lost(plain: dict) -> None:
    """As model cards tell one to do for long contexts; transformers takes it, also beside
    ``rope_parameters``."""
    new = {"rope_theta": 1e6, **plain}
    with pytest.raises(UserError, match="contradicts itself on rotary scaling"):
        rotary_settings({"rope_parameters": new, "rope_scaling": YARN})
    old = {**YARN, "type": YARN["rope_type"]}
    del old["rope_type"]
    agreed = rotary_settings({"rope_parameters": {"rope_theta": 1e6, **YARN}, "rope_scaling": old})
    assert agreed == (1e6, 1.0, YARN)
    assert rotary_settings({"rope_parameters": new, "rope_scaling": {"type": "default"}}) == (
        1e6,
        1.0,
        None,
    )


def test_the_spec_agrees_with_transformers_defaults() -> None:
    import transformers

    required = (
        *(
            "model_type",
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "intermediate_size",
            "vocab_size",
        ),
        *("num_key_value_heads", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
        *("num_experts_per_tok", "norm_topk_prob"),
        "sliding_window",
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    )
    windowed = {"gemma3_text", "olmo3", "exaone4", "gpt_oss"}
    # the others describe one of these inside; transformers has no class of MiMo
    for name in {family.name for family in FAMILIES} - NESTED.keys() - {"mimo"}:
        full = transformers.CONFIG_MAPPING[name]().to_dict()
        if name not in windowed:
            full["sliding_window"] = None
        if full.get("num_experts_per_tok", 1) is None:  # DeepSeek-V2's class has no default
            full["num_experts_per_tok"] = 6
        sparse = {key: full[key] for key in required if key in full}
        from_full, from_sparse = (
            family_of(full).model_spec(full),
            family_of(full).model_spec(sparse),
        )
        assert from_full.transformer == from_sparse.transformer
        assert from_full.rotary_scaling == from_sparse.rotary_scaling
        assert from_full.query_scaling == from_sparse.query_scaling
        assert from_full.rotary_base == from_sparse.rotary_base
        assert from_full.tie_embeddings == from_sparse.tie_embeddings
        assert from_full.rotary_percent == from_sparse.rotary_percent
        assert from_full.num_mtp_layers == from_sparse.num_mtp_layers


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "apertus"}, "xIELU"),
        ({"architectures": ["DeciLMForCausalLM"]}, "Missing: widths per layer"),
        ({"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"]}, "Ling"),
        ({"architectures": ["BailingMoeV2ForCausalLM"]}, "Ling"),
        ({"model_type": "mamba"}, "the families with tables: llama"),
    ],
)
def test_a_family_without_a_table_is_refused_with_the_reason(config: dict, reason: str) -> None:
    with pytest.raises(UserError, match="no conversion table") as caught:
        family_of(config)
    assert reason in caught.value.why


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("deepseek_v3", {"attention_bias": True}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("glm4_moe", {"topk_method": "greedy"}),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("llama", {"final_logit_softcapping": 30.0}),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_settings_that_would_be_lost_are_refused(family: str, setting: dict[str, object]) -> None:
    config = config_of(family, **setting)
    with pytest.raises(UserError, match=next(iter(setting))):
        family_of(config).model_spec(config)


def test_routers_without_a_meaning_are_refused() -> None:
    grouped = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    spec = family_of(config_of("deepseek_v3")).model_spec(config_of("deepseek_v3", **grouped))
    assert (
        spec.transformer["moe_router_num_groups"] == 2
        and spec.transformer["moe_router_group_topk"] == 1
    )
    for change in ({"num_experts_per_tok": 3}, {"n_group": 3}, {"n_group": 4}):
        with pytest.raises(UserError, match=r"cannot choose \d of 4 experts from 1 of \d groups"):
            config = config_of("deepseek_v3", **{**grouped, **change})
            family_of(config).model_spec(config)
    for family in ("qwen3_moe", "glm4_moe"):
        with pytest.raises(UserError, match="no gradient"):
            config = config_of(family, num_experts_per_tok=1)
            family_of(config).model_spec(config)
    with pytest.raises(UserError, match="no layer of this model has experts"):
        config = config_of("qwen3_moe", mlp_only_layers=[0, 1])
        family_of(config).model_spec(config)


@pytest.mark.parametrize(
    ("family", "setting", "pattern"),
    [
        ("qwen3_moe", {}, 1),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ("qwen3_moe", {"mlp_only_layers": [2]}, [1, 1, 0, 1]),
        ("glm4_moe", {"first_k_dense_replace": 1}, [0, 1, 1, 1]),
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, 0, 1, 0]),
    ],
)
def test_which_layers_have_experts(
    family: str, setting: dict[str, object], pattern: object
) -> None:
    config = config_of(family, num_hidden_layers=4, **setting)
    spec = family_of(config).model_spec(config)
    assert spec.transformer["moe_layer_freq"] == pattern
    assert [int(spec.is_moe_layer(layer)) for layer in range(4)] == (
        [1] * 4 if pattern == 1 else pattern
    )


def test_unknown_families_and_missing_fields() -> None:
    with pytest.raises(UserError, match=r"mamba(.|\n)*llama, mistral, qwen2, qwen3"):
        family_of({"model_type": "mamba"})
    with pytest.raises(UserError, match="--model-name gpt"):
        family_of({}, model_name="gpt")
    assert family_of({"model_type": "mine", "architectures": ["LlamaForCausalLM"]}).name == "llama"
    config = config_of("llama")
    del config["num_hidden_layers"]
    with pytest.raises(UserError, match="num_hidden_layers"):
        family_of(config).model_spec(config)


@pytest.mark.parametrize(
    ("name", "model_type", "family"),
    [
        ("qwen3-4B", "qwen3", "qwen3"),
        ("qwen3-30B-A3B", "qwen3_moe", "qwen3_moe"),
        ("Qwen3-4B-Base", "not_known_here", "qwen3"),
        ("qwen3moeconfig", "not_known_here", "qwen3_moe"),
        ("qwen3.5-9B", "qwen3_5", "qwen3_5"),
        ("qwen3.5-9B", "qwen3_5_text", "qwen3_5_text"),
        ("Qwen3.5-35B-A3B", "qwen3_5_moe", "qwen3_5_moe"),
        ("qwen3-next-80B-A3B", "qwen3_next", "qwen3_next"),
        ("qwen3-8B", "qwen3", "qwen3"),
        ("qwen2.5-7B-Instruct", "qwen2", "qwen2"),
        ("qwen2.5-7B-Instruct", "not_known_here", "qwen2"),
        ("qwen2.5-VL-7B-Instruct", "not_known_here", "qwen2_5_vl"),
        ("Qwen3-VL-8B-Thinking", "qwen3_vl", "qwen3_vl"),
        ("Qwen3-VL-30B-A3B", "qwen3_vl_moe", "qwen3_vl_moe"),
        ("glm4-9B", "glm4", "glm4"),
        ("glm4.5-355B-A32B", "glm4_moe", "glm4_moe"),
        ("Glm4MoeForCausalLM", "not_known_here", "glm4_moe"),
        ("llama3.1-8B", "llama", "llama"),
        ("deepseekv3", "deepseek_v3", "deepseek_v3"),
        ("mistral-7B", "mistral", "mistral"),
        ("Mistral-7B-Instruct-v0.3", "not_known_here", "mistral"),
        ("Ministral-3-8B", "ministral3", "ministral3"),
        ("mistral3-24B", "mistral3", "mistral3"),
    ],
)
def test_model_name_in_the_spellings_of_launch_scripts(
    name: str, model_type: str, family: str
) -> None:
    assert family_of({"model_type": model_type}, name).name == family


def test_a_model_name_may_not_contradict_the_config() -> None:
    assert family_of({"model_type": "mine", "num_experts": 8}, "qwen3").name == "qwen3_moe"
    with pytest.raises(
        UserError, match=r"--model-name glm4-9B(.|\n)*glm4 or glm4_moe(.|\n)*'qwen3'"
    ):
        family_of({"model_type": "qwen3"}, "glm4-9B")
    for name in ("qwen3-omni-30B", "qwen", "glm4v-9B", "7B"):
        with pytest.raises(UserError, match=f"--model-name {name} is not a model family"):
            family_of({"model_type": "mine"}, name)


def test_biases_of_every_projection_are_described() -> None:
    config = config_of("llama", attention_bias=True, mlp_bias=True)
    family = family_of(config)
    names = {name for name, _ in family.hf_tensors(family.describe(config))}
    assert {
        f"model.layers.0.{name}_proj.bias" for name in ("self_attn.o", "mlp.gate", "mlp.down")
    } <= names


def test_config_files(tmp_path) -> None:
    with pytest.raises(UserError, match="no model config"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2")))
    assert family_of(tmp_path).name == "qwen2"


def test_the_language_covers_experts_and_layer_kinds() -> None:
    """A table with a dense first layer, experts, a shared expert and layers that are not used."""

    def is_moe(spec: ModelSpec, layer: int) -> bool:
        return layer >= 1

    def make_spec(config: dict) -> ModelSpec:
        transformer = {
            "num_layers": 3,
            "num_moe_experts": 4,
            "num_attention_heads": 2,
            "num_query_groups": 2,
        }
        return ModelSpec("toy", transformer | {"kv_channels": 2, "hidden_size": 4}, "silu", 10, 1e4)

    layer, there = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    rules = (
        Rule(
            layer + "linear_fc2.weight",
            there + "down_proj.weight",
            ROW,
            when=lambda s, n: not is_moe(s, n),
        ),
        Rule(layer + "router.weight", there + "gate.weight", REPLICATED, when=is_moe),
        Rule(
            (
                layer + "experts.local_experts.{expert}.linear_fc2.weight",
                layer + "experts.linear_fc2.weight{expert}",
            ),
            there + "experts.{expert}.down_proj.weight",
            ROW,
            when=is_moe,
        ),
    )
    toy = ModelFamily("toy", (), rules, make_spec, ignored=(r"model\.layers\.3\..*",))
    spec = toy.describe({})
    names = [name for name, _ in toy.hf_tensors(spec)]
    assert len(names) == 1 + 2 * (1 + 4)
    assert names[0] == "model.layers.0.mlp.down_proj.weight"
    for spelling in ("experts.local_experts.3.linear_fc2.weight", "experts.linear_fc2.weight3"):
        match = toy.match_megatron(f"decoder.layers.2.mlp.{spelling}", spec)
        assert match is not None and match.sources == (
            "model.layers.2.mlp.experts.3.down_proj.weight",
        )
    assert toy.match_megatron("decoder.layers.1.mlp.linear_fc2.weight", spec) is None
    assert toy.is_ignored("model.layers.3.eh_proj.weight", spec)
