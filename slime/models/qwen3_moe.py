"""Qwen3-30B-A3B, Qwen3-235B-A22B (``Qwen3MoeForCausalLM``): Qwen3's attention; experts in all
layers or some, chosen by a softmax router, without shared experts."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    decoder_spec,
    softmax_router,
    sparse_step_layers,
    windows_everywhere,
)
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, MOE_RULES, ModelFamily

#: Defaults of transformers' Qwen3MoeConfig for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4}


def qwen3_moe_spec(config: dict[str, Any], default_base: float = 10000.0) -> ModelSpec:
    """Read the decoder of a Qwen3-MoE; raises as `decoder_spec`.

    Args:
        default_base: default of theta.
    """
    config = {**_DEFAULTS, **config}
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config,
        default_rotary_base=default_base,
        qk_layernorm=True,
        add_qkv_bias=bias,
        output_bias=bias,
        moe_layer_freq=sparse_step_layers(config),
        **softmax_router(config),
        **windows_everywhere(config, "use_sliding_window"),
    )


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    rules=DENSE_RULES + MOE_RULES,
    make_spec=qwen3_moe_spec,
)
