"""Mistral 7B from v0.2 on, Mistral Nemo and what else attends to whole sequences: computed as Llama, without biases."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, refuse_sliding_window
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    # config.json of v0.1 has a window of 4096 tokens, and so have configs that do not say: transformers' default
    refuse_sliding_window({"sliding_window": 4096, **config}, "sliding_window")
    return decoder_spec(config, "mistral")


MISTRAL = ModelFamily(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    rules=DENSE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
