"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    ATTENTION_RULES,
    COMPUTED_BUFFERS,
    MLP_RULES,
    OUTER_RULES,
    QKV_BIAS_RULES,
    decoder_spec,
    refuse,
)
from slime.models.family import ModelFamily
from slime.models.spec import ModelSpec


def _spec(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "use_sliding_window", "the trainer's attention sees the whole sequence")
    return decoder_spec(config, "qwen2", add_qkv_bias=True)


QWEN2 = ModelFamily(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    rules=OUTER_RULES + ATTENTION_RULES + QKV_BIAS_RULES + MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
