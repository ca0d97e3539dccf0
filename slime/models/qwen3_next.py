"""Qwen3-Next-80B-A3B (``Qwen3NextForCausalLM``): gated delta nets (docs/model-families.md#hybrids)
in three of four layers, gated attention in the fourth, norms that multiply by 1 + weight, and
Qwen2-MoE's experts."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import softmax_router, sparse_step_layers
from slime.models.hybrid import MTP, hybrid_spec
from slime.models.mixers import GATED_ATTENTION, GATED_DELTA_NET
from slime.models.qwen2_moe import GATED_MOE_RULES
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, MLP_RULES, OUTER_RULES, ModelFamily

#: Defaults of transformers' Qwen3NextConfig for fields that config.json lacks.
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return hybrid_spec(
        config,
        moe_layer_freq=sparse_step_layers(config),
        moe_shared_expert_intermediate_size=int(config["shared_expert_intermediate_size"]),
        moe_shared_expert_gate=True,
        **softmax_router(config),
    )


QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    rules=(
        *OUTER_RULES,
        *GATED_ATTENTION.rules,
        *GATED_DELTA_NET.rules,
        *MLP_RULES,
        *GATED_MOE_RULES,
    ),
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS + MTP,
    carried=MTP,
)
