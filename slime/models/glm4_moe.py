"""GLM-4.5, GLM-4.5-Air (``Glm4MoeForCausalLM``): dense layers first, then shared and routed experts
behind a sigmoid router whose bias affects only the choice; half of each head rotated, its first
against its second quarter. GLM-4.5 has biases and norms on queries and keys."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, moe_layer_freq, mtp_layers, sigmoid_router
from slime.models.spec import ModelSpec, require
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, MOE_RULES, MTP_LAYERS, ModelFamily

#: Defaults of transformers' Glm4MoeConfig for fields that config.json lacks.
_DEFAULTS = {
    "attention_bias": False,
    "use_qk_norm": False,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    layers = range(int(require(config, "num_hidden_layers")))
    return decoder_spec(
        config,
        add_qkv_bias=bool(config["attention_bias"]),
        qk_layernorm=bool(config["use_qk_norm"]),
        default_rotary_percent=0.5,
        moe_layer_freq=moe_layer_freq(
            [layer >= config["first_k_dense_replace"] for layer in layers]
        ),
        num_mtp_layers=mtp_layers(config),
        **sigmoid_router(config),
    )


GLM4_MOE = ModelFamily(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    rules=DENSE_RULES + MOE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS + MTP_LAYERS,
)
