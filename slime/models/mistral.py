"""Mistral 7B from v0.2 on, Mistral Nemo and what else attends to whole sequences: computed as
Llama, without biases."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, refuse_windows
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily

#: transformers' MistralConfig, where config.json is silent.
_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    refuse_windows(config)
    return decoder_spec(config, "mistral")


MISTRAL = ModelFamily(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
