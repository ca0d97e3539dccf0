"""Seed-OSS-36B (``SeedOssForCausalLM``): Llama with biases on query, key and value."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' SeedOssConfig for fields that config.json lacks.
_DEFAULTS = {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return decoder_spec(
        config,
        add_qkv_bias=bool(config["attention_bias"]),
        output_bias=bool(config.get("attention_out_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
    )


SEED_OSS = ModelFamily(
    name="seed_oss", architectures=("SeedOssForCausalLM",), rules=DENSE_RULES, make_spec=_spec
)
