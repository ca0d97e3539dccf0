"""Qwen3-MoE: Qwen3's attention, experts in all layers or some, chosen by a softmax router; no shared experts."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    ATTENTION_RULES,
    COMPUTED_BUFFERS,
    MLP_RULES,
    OUTER_RULES,
    QK_NORM_RULES,
    decoder_spec,
    refuse,
    require,
)
from slime.models.experts import EXPERT_RULES, ROUTER_RULES, moe_layer_freq, softmax_router
from slime.models.family import ModelFamily
from slime.models.spec import ModelSpec


def _spec(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "use_sliding_window", "the trainer's attention sees the whole sequence")
    refuse(config, "attention_bias", "Megatron has no bias on the attention output alone")
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    layers = range(int(require(config, "num_hidden_layers")))
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in layers]
    return decoder_spec(
        config,
        "qwen3_moe",
        qk_layernorm=True,
        moe_layer_freq=moe_layer_freq(has_experts),
        **softmax_router(config),
    )


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    rules=OUTER_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES + ROUTER_RULES + EXPERT_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
