"""Mistral 7B, Mistral Nemo, Zephyr, Ministral 8B: Llama without biases; all layers have a window of
``sliding_window`` tokens if the field is set."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, windows_everywhere
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily

#: Defaults of transformers' MistralConfig for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def mistral_spec(config: dict[str, Any], family: str) -> ModelSpec:
    """Read the decoder of a Mistral; raises as `decoder_spec`."""
    config = {**_DEFAULTS, **config}
    return decoder_spec(config, family, **windows_everywhere(config))


def _spec(config: dict[str, Any]) -> ModelSpec:
    return mistral_spec(config, "mistral")


MISTRAL = ModelFamily(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
