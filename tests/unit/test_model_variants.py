"""Every field of a config.json is honoured, without effect, or refused by name; none is silently
computed otherwise.

The oracle is transformers: each field that its config classes know is set to other values in a tiny
model. If the family's spec does not change, transformers' log-probs may not change either; if it
does, trainer and embedded engine compute what transformers computes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import UserError
from slime.models import FAMILIES, family_of
from slime.models.spec import ModelSpec
from slime.samples.batch import TrainBatch
from tests.support.embedded_models import make_scheduler, make_sequence, run
from tests.support.tiny_models import DENSE_YARN, HYBRIDS, LLAMA3, OTHER_FAMILIES
from tests.support.trainer_ranks import VOCAB, make_batch
from tests.support.trainers import trainer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}
SIGMOID = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
#: Of families with a rotary embedding for each kind of layer.
BY_KIND = {
    **{key: value for key, value in SHAPE.items() if key != "rope_theta"},
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
BASE: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "head_dim": 8, "sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 16},
    "qwen3_moe": {**SHAPE, **EXPERTS, "head_dim": 16, "num_experts": 4},
    "glm4": {**SHAPE, "head_dim": 8},
    "gemma3_text": {
        **BY_KIND,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2_moe": {
        **SHAPE,
        **EXPERTS,
        "num_experts": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40,
    },
    "olmo2": SHAPE,
    "olmo3": {
        **BY_KIND,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {**SHAPE, "no_rope_layers": [1, 0]},
    "ministral3": {
        **SHAPE,
        "head_dim": 12,
        "sliding_window": None,
        "rope_parameters": {
            **DENSE_YARN,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "phi3": {**SHAPE, "sliding_window": 9},
    "granite": {
        **SHAPE,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
    "exaone4": {
        **SHAPE,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {**SHAPE, "head_dim": 8},
    "hunyuan_v1_dense": {**SHAPE, "head_dim": 12},
    "minimax_m2": {
        **SHAPE,
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {
        **SHAPE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
    },
    "gpt_oss": {
        **SHAPE,
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 0.7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "glm4_moe": {
        **SHAPE,
        **SIGMOID,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        **{**SHAPE, **SIGMOID, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16},
        **{
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_group": 4,
            "topk_group": 2,
        },
    },
    "deepseek_v2": {
        **{**SHAPE, **SIGMOID, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16},
        **{
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "norm_topk_prob": False,
            "topk_method": "greedy",
        },
    },
}
#: Of families whose models in tests/support/tiny_models.py count on four layers.
TWO_LAYERS = {name: {"layer_types": ["linear_attention", "full_attention"]} for name in HYBRIDS}
TWO_LAYERS["glm4_moe_lite"] = {"mlp_layer_types": ["dense", "sparse"]}
BASE |= {
    name: {**SHAPE, **fields, **TWO_LAYERS.get(name, {})}
    for name, (_, fields) in OTHER_FAMILIES.items()
    if "," not in name and name not in BASE
}
THETA = {"rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {key: value for key, value in DENSE_YARN.items() if key != "rope_theta"}
#: Values to try, where another one than the class's default is not telling enough. Each is a set of
#: changes.
VALUES: dict[str, list[dict[str, Any]]] = {
    "rope_parameters": [
        {"rope_parameters": THETA | change}
        for change in (
            *(LINEAR, LLAMA3, YARN, {**YARN, "attention_factor": 0.7}, {**YARN, "truncate": False}),
            *(
                {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
                {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
            ),
            *(
                {**YARN, "original_max_position_embeddings": None},
                {**LINEAR, "mscale_all_dim": 0.9},
            ),
            *(
                {"rope_theta": 50.0},
                {"rope_type": "dynamic", "factor": 2.0},
                {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0},
                {"partial_rotary_factor": 0.25},
            ),
            {"rope_type": "default", "factor": 3.0},
        )
    ],
    "rope_scaling": [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {**YARN, "rope_theta": 1000.0}},
        {"rope_scaling": {**LINEAR, "rope_theta": 77.0}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": None},
        {"rope_parameters": {**THETA, **YARN}, "rope_scaling": LINEAR},
    ],
    "original_max_position_embeddings": [
        {"original_max_position_embeddings": 16},
        {
            "original_max_position_embeddings": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        {"original_max_position_embeddings": 16, "rope_parameters": {**THETA, **YARN}},
    ],
    "rope_theta": [{"rope_theta": 77.0}, {"rope_theta": None}],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.3},
        {"partial_rotary_factor": 1.0},
        {"partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
    ],
    "rotary_dim": [{"rotary_dim": 6}],
    "hidden_act": [
        {"hidden_act": "gelu"},
        {"hidden_act": "relu"},
        {"hidden_act": "gelu_pytorch_tanh"},
    ],
    "sliding_window": [
        {"sliding_window": window, "use_sliding_window": on, "max_window_layers": first}
        for window in (3, 64, 4096, None)
        for on, first in ((True, 0), (True, 1), (True, 2), (False, 0))
    ],
    "layer_types": [
        {"layer_types": kinds, "sliding_window": 5, "use_sliding_window": on}
        for kinds in (
            ["full_attention"] * 2,
            ["full_attention", "sliding_attention"],
            ["full_attention"],
        )
        for on in (True, False)
    ],
    "num_key_value_heads": [{"num_key_value_heads": heads} for heads in (1, 4, None)],
    "head_dim": [{"head_dim": 4}, {"head_dim": None}],
    "moe_layer_start_index": [{"moe_layer_start_index": 0}],
    "moe_layer_end_index": [{"moe_layer_end_index": 0, "moe_layer_start_index": 0}],
    "moe_layer_interval": [{"moe_layer_interval": 2}],
    "moe_num_shared_experts": [{"moe_num_shared_experts": 2}, {"moe_num_shared_experts": 0}],
    "moe_k": [{"moe_k": 3}],
    "moe_norm_min": [{"moe_norm_min": 0.9}],
    "first_k_dense_replace": [{"first_k_dense_replace": 0}],
    "mlp_only_layers": [{"mlp_only_layers": [1]}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}],
    "q_lora_rank": [{"q_lora_rank": None}, {"q_lora_rank": 8}],
    "num_experts_per_tok": [
        {"num_experts_per_tok": 3},
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
    ],
    "n_group": [
        {"n_group": 2, "topk_group": 1},
        {"n_group": 4, "topk_group": 3, "num_experts_per_tok": 5},
    ],
    "topk_group": [{"topk_group": 1}],
    "norm_topk_prob": [{"norm_topk_prob": False}],
    "hidden_size": [{"hidden_size": 48}],
    "num_attention_heads": [{"num_attention_heads": 2, "num_key_value_heads": 2}],
    "num_hidden_layers": [{"num_hidden_layers": 3}],
    "max_position_embeddings": [{"max_position_embeddings": 48}],
    "rms_norm_eps": [{"rms_norm_eps": 0.1}],
    "vocab_size": [{"vocab_size": VOCAB + 1}],
}
#: Fields that every family reads with the same code: the trainer runs on them in some families
#: only.
SHARED = {
    *(
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "original_max_position_embeddings",
        "max_position_embeddings",
    ),
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("hidden_act", "rms_norm_eps", "vocab_size", "moe_intermediate_size"),
}
#: Families of which every run tries every field; of the others, the full run alone.
COMMON = {"llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"}
COMPUTE_SHARED = ("llama",)
#: What must not be refused.
SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("deepseek_v3", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    ("deepseek_v3", {"num_experts_per_tok": 3}),
    ("mistral", {"sliding_window": 64}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention"] * 2},
    ),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}),
    ("minimax_m2", {"rotary_dim": 6}),
    ("minimax_m2", {"partial_rotary_factor": 0.5}),
    (
        "hunyuan_v1_dense",
        {"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    ),
]


def class_of(family: str) -> type[transformers.PreTrainedConfig]:
    return transformers.CONFIG_MAPPING[family]


def own_fields(family: str) -> set[str]:
    """Of transformers' config class, and other names it takes for them."""
    own = {field.name for field in dataclasses.fields(class_of(family))}
    base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    return (own - base) | set(class_of(family).attribute_map) | {"tie_word_embeddings"}


@functools.cache
def all_fields() -> list[str]:
    """Those of every family, since a class keeps what it does not know, and its module may read it;
    and old names."""
    names = set(VALUES).union(
        *map(own_fields, BASE), {"rope_theta", "scoring_func", "topk_method", "moe_layer_freq"}
    )
    return sorted(names)


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, int):
        return (value or 0) + 8
    return value * 1.5 if isinstance(value, float) else "something else"


def changes_of(field: str, family: str) -> list[dict[str, Any]]:
    if field in VALUES:
        return VALUES[field]
    default = BASE[family].get(field, getattr(class_of(family)(), field, None))
    return [{field: other_value(default)}]


def changed(family: str, change: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": [_architecture(family)],
        **copy.deepcopy({**BASE[family], **change}),
    }


def _architecture(family: str) -> str:
    return next(table.architectures[0] for table in FAMILIES if table.name == family)


@functools.cache
def _weights(family: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same for every variant of a family that has this tensor."""
    torch.manual_seed(sum(map(ord, name)))
    if len(shape) == 1:
        return 0.3 * torch.randn(shape) + (1.0 if "norm" in name else 0.0)
    return torch.randn(shape) * (0.6 if "gate.weight" in name else 0.15)


def reference(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' model of a config.json, with weights that depend on names and shapes alone.

    Raises:
        Exception: of any type, where transformers cannot make it.
    """
    family = config["model_type"]
    read = class_of(family).from_dict(copy.deepcopy(config))
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_weights(family, name, tuple(tensor.shape)))
    return model


def batch_of_responses() -> TrainBatch:
    """Few, since hundreds of models score them: of 5, 21 and 9 tokens, the longest beyond every
    window."""
    return make_batch([[0, 1, 2]], num_samples=3, seed=9)


def logits_of(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            model(tokens[None]).logits[0, :-1].float() for tokens in batch_of_responses().tokens
        ]


def log_probs(logits: list[torch.Tensor], temperature: float = 0.8) -> list[torch.Tensor]:
    """Of the batch's responses."""
    batch, found = batch_of_responses(), []
    for one, tokens, response in zip(logits, batch.tokens, batch.response_lengths):
        scores = (one / temperature).log_softmax(-1)
        found.append(scores.gather(1, tokens[1:, None])[-response:, 0])
    return found


@functools.cache
def base_of(family: str) -> tuple[ModelSpec, list[torch.Tensor]]:
    config = changed(family, {})
    return family_of(config).model_spec(config), log_probs(logits_of(reference(config)))


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


def check(family: str, change: dict[str, Any], directory: Path, compute: bool = True) -> str:
    """What becomes of a change: "refused"; "same", as without it; "computed", by trainer and engine
    as by transformers; or "meaningless", to transformers.

    Args:
        compute: False compares specs alone.
    """
    config = changed(family, change)
    before, unchanged = base_of(family)
    try:
        spec = family_of(config).model_spec(config)
    except UserError:
        return "refused"
    try:
        model = reference(config)
        logits = logits_of(model)
    except Exception:
        return "meaningless"
    theirs = log_probs(logits)
    if spec == before:
        assert worst(unchanged, theirs) == 0, (
            f"{family}: {change} changes transformers' numbers alone"
        )
        return "same"
    if not compute:
        return "computed"
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    near = 5e-4 if family in HYBRIDS else 1e-5
    assert worst(_by_trainer(directory), theirs) <= near, (family, change)
    assert worst(_by_engine(directory), log_probs(logits, 1.0)) <= near, (family, change)
    return "computed"


def _by_trainer(directory: Path) -> list[torch.Tensor]:
    backend = trainer(hf_checkpoint=str(directory))
    try:
        scores = backend.log_probs(batch_of_responses())
    finally:
        backend.close()
    assert scores is not None
    return scores


def _by_engine(directory: Path) -> list[torch.Tensor]:
    scheduler, batch, found = make_scheduler(directory, max_length=48), batch_of_responses(), []
    for tokens, response in zip(batch.tokens, batch.response_lengths):
        sequence = make_sequence(tokens.tolist(), max_new_tokens=0, logprob_start=0)
        run(scheduler, [sequence])
        found.append(torch.tensor(sequence.input_logprobs[-response:]))
    return found


def _fields() -> Iterator[Any]:
    for family in BASE:
        for shared in (False, True):
            rare = (shared and family not in COMPUTE_SHARED) or family not in COMMON
            name = f"{family}, {'shared' if shared else 'own'} fields"
            yield pytest.param(family, shared, id=name, marks=[pytest.mark.full] if rare else [])


@pytest.mark.parametrize(("family", "shared"), list(_fields()))
def test_no_field_is_silently_computed_otherwise(family: str, shared: bool, tmp_path: Path) -> None:
    found: dict[str, int] = {}
    for field in all_fields():
        if (field in SHARED) == shared:
            for number, change in enumerate(changes_of(field, family)):
                outcome = check(family, change, tmp_path / f"{field} {number}")
                found[outcome] = found.get(outcome, 0) + 1
    assert found.get("computed", 0) + found.get("same", 0) >= 10, found  # not all refused


@settings(max_examples=25)
@given(
    st.sampled_from(list(BASE)),
    st.lists(st.sampled_from(all_fields()), min_size=2, max_size=4),
    st.integers(0),
)
def test_no_combination_of_fields_is_ignored(family: str, fields: list[str], number: int) -> None:
    change: dict[str, Any] = {}
    for field in fields:
        values = changes_of(field, family)
        change |= values[number % len(values)]
    check(family, change, Path(), compute=False)


@pytest.mark.parametrize(("family", "change"), SUPPORTED)
def test_variants_that_are_supported(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert check(family, change, tmp_path) in ("computed", "same")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "'longrope' lacks short_factor, long_factor"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "1 entries in short_factor(.|\n)*4 rotated pairs",
        ),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor to 0.5"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act to 'gelu'(.|\n)*convolution"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping to 50"),
    ],
)
def test_what_is_refused_is_told_with_its_numbers(
    family: str, change: dict[str, Any], said: str
) -> None:
    config = changed(family, change)
    with pytest.raises(UserError, match=said):
        family_of(config).model_spec(config)


@pytest.mark.parametrize(
    "field", ["final_logit_softcapping", "residual_multiplier", "alibi", "no_rope_layers"]
)
def test_leftovers_that_change_nothing_are_accepted(field: str) -> None:
    for value in {"residual_multiplier": (None, 1.0), "no_rope_layers": (None, [])}.get(
        field, (None, 0)
    ):
        config = changed("llama", {field: value})
        assert family_of(config).model_spec(config) == base_of("llama")[0]


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_a_default_beside_the_kinds_of_layers_is_not_read(family: str) -> None:
    """transformers 5.12 writes it; another type there contradicts the two kinds."""
    config = {"model_type": family, **BASE[family]}
    written = {**config["rope_parameters"], "rope_type": "default", "rope_theta": 1e6}
    found = family_of(config).model_spec({**config, "rope_parameters": written})
    assert found == family_of(config).model_spec(config)
    other = {**written, "rope_type": "linear"}
    with pytest.raises(UserError, match="contradicts itself"):
        family_of(config).model_spec({**config, "rope_parameters": other})
