"""GLM-4 (``Glm4ForCausalLM``: GLM-4-9B/32B-0414, GLM-Z1): norms before and behind attention and MLP, half of each head
rotated in neighbouring pairs, gate and up projection stored in one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.models.decoder import (
    ATTENTION_RULES,
    COMPUTED_BUFFERS,
    HF_LAYER,
    MEGATRON_LAYER,
    MLP_NORM_RULES,
    OUTER_RULES,
    QKV_BIAS_RULES,
    decoder_spec,
)
from slime.models.family import ModelFamily, Rule
from slime.models.layouts import REPLICATED, ROW, STACKED_GATE_UP
from slime.models.spec import ModelSpec

#: transformers' Glm4Config, where config.json is silent.
_DEFAULTS = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-07}

_MLP_RULES = (
    Rule(MEGATRON_LAYER + "mlp.linear_fc1.weight", HF_LAYER + "mlp.gate_up_proj.weight", STACKED_GATE_UP),
    Rule(MEGATRON_LAYER + "mlp.linear_fc2.weight", HF_LAYER + "mlp.down_proj.weight", ROW),
)

_POST_NORM_RULES = tuple(
    Rule(MEGATRON_LAYER + f"{name}.weight", HF_LAYER + f"{name}.weight", REPLICATED)
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    spec = decoder_spec(
        config,
        "glm4",
        add_qkv_bias=bool(config["attention_bias"]),
        default_rotary_percent=0.5,
        rotary_interleaved=True,
    )
    return replace(spec, post_norms=True)


GLM4 = ModelFamily(
    name="glm4",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    rules=OUTER_RULES + ATTENTION_RULES + QKV_BIAS_RULES + MLP_NORM_RULES + _MLP_RULES + _POST_NORM_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
