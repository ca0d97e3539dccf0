"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, windows_from_layer
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily

#: transformers' Qwen2Config, where config.json is silent.
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return decoder_spec(config, "qwen2", add_qkv_bias=True, **windows_from_layer(config))


QWEN2 = ModelFamily(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
