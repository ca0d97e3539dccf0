"""Llama 2, Llama 3, SmolLM2 and all other models saved as ``LlamaForCausalLM``: biases on attention
(``attention_bias``) and MLP (``mlp_bias``) if config.json sets these fields."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config, add_qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias"))
    )


LLAMA = ModelFamily(
    name="llama", architectures=("LlamaForCausalLM",), rules=DENSE_RULES, make_spec=_spec
)
