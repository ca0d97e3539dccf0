"""Granite 3.x, dense (``GraniteForCausalLM``): Llama with factors on embeddings, attention scores,
residual branches and logits."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def _spec(config: dict[str, Any]) -> ModelSpec:
    # the defaults of transformers' GraniteConfig are 1
    embedding, scores, residual, logits = (
        1.0 if config.get(name) is None else float(config[name]) for name in _MULTIPLIERS
    )
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config,
        add_qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        embedding_scale=embedding,
        softmax_scale=scores,
        residual_scale=residual,
        logits_scale=1.0 / logits,
        honours=_MULTIPLIERS,
    )


GRANITE = ModelFamily(
    name="granite", architectures=("GraniteForCausalLM",), rules=DENSE_RULES, make_spec=_spec
)
