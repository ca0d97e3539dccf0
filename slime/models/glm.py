"""GLM-4 before 0414 (``GlmForCausalLM``: glm-4-9b-chat-hf): as GLM-4, without the norms behind
attention and MLP."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.mixers import GROUPED_ATTENTION
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, OUTER_RULES, STACKED_MLP_RULES, ModelFamily

#: transformers' GlmConfig, where config.json is silent.
_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return decoder_spec(
        config,
        "glm",
        add_qkv_bias=bool(config["attention_bias"]),
        default_rotary_percent=0.5,
        rotary_interleaved=True,
    )


GLM = ModelFamily(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    rules=OUTER_RULES + GROUPED_ATTENTION.rules + STACKED_MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
