"""gpt-oss-20b, gpt-oss-120b (``GptOssForCausalLM``): attention with sinks, a window in every second
layer, YaRN; experts in all layers, as stacks, with clamped gated units; biases on every matrix of a
layer. Files in MXFP4 are read as plain weights (docs/quantisation.md#mxfp4)."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    FULL,
    SLIDING,
    decoder_spec,
    layer_kinds,
    num_experts,
    softmax_router,
    windows,
)
from slime.models.layouts import INTERLEAVED_GATE_UP, REPLICATED, ROW, ParamMapping, Transposed
from slime.models.mixers import GROUPED_ATTENTION
from slime.models.rules import HF_MLP, MLP, Rule, Size
from slime.models.spec import ModelSpec, refuse, require
from slime.models.table import MLP_NORM, OUTER_RULES, ModelFamily

#: Defaults of transformers' GptOssConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_scaling"] = _ROTARY
    alpha = _DEFAULTS["swiglu_alpha"]
    reason = f"trainer and embedded engine compute gates with {alpha}"
    refuse(config, "swiglu_alpha", reason, supported=alpha)
    layers = int(require(config, "num_hidden_layers"))
    kinds = layer_kinds(config, [FULL if layer % 2 else SLIDING for layer in range(layers)])
    bias = bool(config["attention_bias"])
    routed = {
        "num_experts": num_experts(config, "num_local_experts", "num_experts"),
        "moe_intermediate_size": config["intermediate_size"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "norm_topk_prob": True,
    }
    return decoder_spec(
        {**config, "hidden_act": "quick_gelu"},
        default_rotary_base=150000.0,
        add_qkv_bias=bias,
        output_bias=bias,
        expert_biases=True,
        softmax_type="learnable",
        activation_func_clamp_value=float(config["swiglu_limit"]),
        glu_linear_offset=1.0,
        moe_layer_freq=1,
        honours=("swiglu_limit",),
        **softmax_router(routed),
        **windows(config, kinds),
    )


def _expert(
    name: str, hf: str, layout: ParamMapping, rows: Size, columns: Size | None = None
) -> Rule:
    layer, _, leaf = name.partition(".")
    spellings = (
        f"{MLP}experts.{name}{{expert}}",
        f"{MLP}experts.local_experts.{{expert}}.{layer}.{leaf}",
    )
    return Rule(spellings, f"{HF_MLP}experts.{hf}", layout, rows, columns)


_EXPERT_RULES = (
    Rule(MLP + "router.weight", HF_MLP + "router.weight", REPLICATED, "experts", "hidden"),
    Rule(MLP + "router.bias", HF_MLP + "router.bias", REPLICATED, "experts"),
    _expert(
        "linear_fc1.weight",
        "gate_up_proj",
        Transposed(INTERLEAVED_GATE_UP),
        "hidden",
        "expert gate and up",
    ),
    _expert("linear_fc1.bias", "gate_up_proj_bias", INTERLEAVED_GATE_UP, "expert gate and up"),
    _expert("linear_fc2.weight", "down_proj", Transposed(ROW), "expert inner", "hidden"),
    _expert("linear_fc2.bias", "down_proj_bias", REPLICATED, "hidden"),
)

GPT_OSS = ModelFamily(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    rules=(*OUTER_RULES, *GROUPED_ATTENTION.rules, MLP_NORM, *_EXPERT_RULES),
    make_spec=_spec,
)
