"""Qwen3 (dense): no biases, an RMS norm over each query and key head."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, refuse_sliding_window
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    refuse_sliding_window(config)
    bias = bool(config.get("attention_bias"))
    # transformers' Qwen3Config has a head size of its own, 128, not hidden_size / heads
    config = {**config, "head_dim": config.get("head_dim") or 128}
    return decoder_spec(config, "qwen3", qk_layernorm=True, add_qkv_bias=bias, output_bias=bias)


QWEN3 = ModelFamily(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
