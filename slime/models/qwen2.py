"""Qwen2, Qwen2.5 (``Qwen2ForCausalLM``): Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, windows_from_layer
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' Qwen2Config for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def qwen2_spec(config: dict[str, Any], default_base: float = 10000.0) -> ModelSpec:
    """Read the decoder of a Qwen2; raises as `decoder_spec`.

    Args:
        default_base: default of theta.
    """
    config = {**_DEFAULTS, **config}
    return decoder_spec(
        config, add_qkv_bias=True, default_rotary_base=default_base, **windows_from_layer(config)
    )


QWEN2 = ModelFamily(
    name="qwen2", architectures=("Qwen2ForCausalLM",), rules=DENSE_RULES, make_spec=qwen2_spec
)
