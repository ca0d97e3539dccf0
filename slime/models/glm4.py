"""GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1 (``Glm4ForCausalLM``): norms before and after attention and
MLP; half of each head rotated, in neighbouring pairs; gate and up projection in one tensor."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.layouts import REPLICATED
from slime.models.mixers import GROUPED_ATTENTION
from slime.models.rules import HF_LAYER, MEGATRON_LAYER, Rule
from slime.models.spec import ModelSpec
from slime.models.table import OUTER_RULES, STACKED_MLP_RULES, ModelFamily

#: Defaults of transformers' Glm4Config and GlmConfig for fields that config.json lacks.
_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
}

_POST_NORM_RULES = tuple(
    Rule(MEGATRON_LAYER + f"{name}.weight", HF_LAYER + f"{name}.weight", REPLICATED)
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)


def _spec(config: dict[str, Any]) -> ModelSpec:
    return glm_spec(config, post_norms=True)


def glm_spec(config: dict[str, Any], **extra: Any) -> ModelSpec:
    """Make the spec of a dense GLM; ``extra`` as of `decoder_spec`."""
    config = {**_DEFAULTS, **config}
    return decoder_spec(
        config,
        add_qkv_bias=bool(config["attention_bias"]),
        default_rotary_percent=0.5,
        rotary_interleaved=True,
        **extra,
    )


GLM4 = ModelFamily(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    rules=OUTER_RULES + GROUPED_ATTENTION.rules + STACKED_MLP_RULES + _POST_NORM_RULES,
    make_spec=_spec,
)
