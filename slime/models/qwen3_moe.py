"""Qwen3-MoE: Qwen3's attention, experts in all layers or some, chosen by a softmax router; no
shared experts."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, moe_layer_freq, softmax_router, windows_everywhere
from slime.models.spec import ModelSpec, require
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, MOE_RULES, ModelFamily

#: Defaults of transformers' Qwen3MoeConfig for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4}


def qwen3_moe_spec(config: dict[str, Any], family: str, default_base: float = 10000.0) -> ModelSpec:
    """Read the decoder of a Qwen3-MoE; raises as `decoder_spec`.

    Args:
        default_base: default of theta.
    """
    config = {**_DEFAULTS, **config}
    bias = bool(config.get("attention_bias"))
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(int(require(config, "num_hidden_layers")))
    has_experts = [layer not in dense and (layer + 1) % step == 0 for layer in layers]
    return decoder_spec(
        config,
        family,
        default_rotary_base=default_base,
        qk_layernorm=True,
        add_qkv_bias=bias,
        output_bias=bias,
        moe_layer_freq=moe_layer_freq(has_experts),
        **softmax_router(config),
        **windows_everywhere(config, "use_sliding_window"),
    )


def _spec(config: dict[str, Any]) -> ModelSpec:
    return qwen3_moe_spec(config, "qwen3_moe")


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    rules=DENSE_RULES + MOE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
