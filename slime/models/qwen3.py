"""Qwen3 (dense): no biases, an RMS norm over each query and key head."""

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
)
from slime.models.family import ModelFamily
from slime.models.spec import ModelSpec


def _spec(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "use_sliding_window", "the trainer's attention sees the whole sequence")
    refuse(config, "attention_bias", "Megatron has no bias on the attention output alone")
    # transformers' Qwen3Config has a head size of its own, 128, not hidden_size / heads
    config = {**config, "head_dim": config.get("head_dim") or 128}
    return decoder_spec(config, "qwen3", qk_layernorm=True)


QWEN3 = ModelFamily(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    rules=OUTER_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
