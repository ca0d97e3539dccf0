"""Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B (``Qwen2MoeForCausalLM``): Qwen2's attention, experts chosen by
a softmax router, and a shared expert with a gate per token."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    FULL,
    SLIDING,
    decoder_spec,
    layer_kinds,
    softmax_router,
    sparse_step_layers,
    windows,
)
from slime.models.layouts import REPLICATED
from slime.models.rules import HF_MLP, MLP, Rule, renamed
from slime.models.spec import ModelSpec, require
from slime.models.table import DENSE_RULES, MOE_RULES, ModelFamily, is_moe_layer

#: Defaults of transformers' Qwen2MoeConfig for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    layers = range(int(require(config, "num_hidden_layers")))
    is_on = bool(config.get("use_sliding_window"))
    before = int(config["max_window_layers"]) if is_on else 0
    kinds = layer_kinds(
        config, [SLIDING if layer % 2 == 0 and layer < before else FULL for layer in layers]
    )
    window = config["sliding_window"] if is_on else None
    return decoder_spec(
        config,
        add_qkv_bias=bool(config["qkv_bias"]),
        moe_layer_freq=sparse_step_layers(config),
        moe_shared_expert_intermediate_size=int(config["shared_expert_intermediate_size"]),
        moe_shared_expert_gate=True,
        **softmax_router(config),
        **windows({**config, "sliding_window": window}, kinds),
    )


#: Rules of experts with a gated shared expert.
GATED_MOE_RULES = (
    *renamed(MOE_RULES, {"shared_experts": "shared_expert"}),
    Rule(
        MLP + "shared_experts.gate_weight",
        HF_MLP + "shared_expert_gate.weight",
        REPLICATED,
        1,
        "hidden",
        is_moe_layer,
    ),
)

QWEN2_MOE = ModelFamily(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    rules=DENSE_RULES + GATED_MOE_RULES,
    make_spec=_spec,
)
