"""Mistral 7B, Zephyr, Mistral Nemo, Ministral 8B (``MistralForCausalLM``): Llama with a window of
``sliding_window`` tokens in all layers, 4,096 if config.json does not have the field."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, windows_everywhere
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' MistralConfig for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def mistral_spec(config: dict[str, Any]) -> ModelSpec:
    """Read the decoder of a Mistral; raises as `decoder_spec`."""
    config = {**_DEFAULTS, **config}
    return decoder_spec(config, **windows_everywhere(config))


MISTRAL = ModelFamily(
    name="mistral", architectures=("MistralForCausalLM",), rules=DENSE_RULES, make_spec=mistral_spec
)
