"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, refuse_sliding_window
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    refuse_sliding_window(config)
    return decoder_spec(config, "qwen2", add_qkv_bias=True)


QWEN2 = ModelFamily(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
