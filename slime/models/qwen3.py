"""Qwen3, dense (``Qwen3ForCausalLM``): a norm over each query and key head; ``attention_bias`` puts
biases on all four projections of attention."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, windows_from_layer
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' Qwen3Config for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config, qk_layernorm=True, add_qkv_bias=bias, output_bias=bias, **windows_from_layer(config)
    )


QWEN3 = ModelFamily(
    name="qwen3", architectures=("Qwen3ForCausalLM",), rules=DENSE_RULES, make_spec=_spec
)
