"""Llama 2, Llama 3 and everything saved as ``LlamaForCausalLM`` (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    ATTENTION_RULES,
    COMPUTED_BUFFERS,
    MLP_RULES,
    OUTER_RULES,
    decoder_spec,
    refuse,
)
from slime.models.family import ModelFamily
from slime.models.spec import ModelSpec


def _spec(config: dict[str, Any]) -> ModelSpec:
    reason = "Megatron puts biases on all linear layers of a block or on none but query, key and value"
    refuse(config, "attention_bias", reason)
    refuse(config, "mlp_bias", reason)
    return decoder_spec(config, "llama")


LLAMA = ModelFamily(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    rules=OUTER_RULES + ATTENTION_RULES + MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
