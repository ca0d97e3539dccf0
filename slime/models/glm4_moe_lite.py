"""GLM-4.7-Flash (``Glm4MoeLiteForCausalLM``): DeepSeek-V3's attention, router and tensors, with
other defaults. SGLang 0.5.16 computes the norms of its latents with epsilon 1e-5, transformers and
the trainer with 1e-6."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import moe_layer_freq, sigmoid_router
from slime.models.deepseek_v3 import DEEPSEEK_V3, latent_spec
from slime.models.spec import ModelSpec, refuse, require, rotary_settings
from slime.models.table import ModelFamily

#: Defaults of transformers' Glm4MoeLiteConfig for fields that config.json lacks.
_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    key = "partial_rotary_factor"
    reason = "models of this family rotate all dimensions of qk_rope_head_dim"
    refuse({key: rotary_settings(config)[1]}, key, reason, supported=1.0)
    spec = latent_spec(config, sigmoid_router(config))
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        sparse = _sparse_layers(kinds, int(require(config, "num_hidden_layers")))
        spec.transformer["moe_layer_freq"] = moe_layer_freq(sparse)
    return spec


def _sparse_layers(kinds: list[str], num_layers: int) -> list[bool]:
    """Read which layers have experts from ``mlp_layer_types``."""
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown or len(kinds) != num_layers:
        raise UserError(
            "mlp_layer_types of the model's config.json cannot be used",
            why=f"it names {', '.join(unknown)}"
            if unknown
            else f"it has {len(kinds)} of {num_layers} layers",
            fix="use the config.json that belongs to the weights",
        )
    return [kind == "sparse" for kind in kinds]


GLM4_MOE_LITE = ModelFamily(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    rules=DEEPSEEK_V3.rules,
    make_spec=_spec,
    ignored=DEEPSEEK_V3.ignored,
    fused=DEEPSEEK_V3.fused,
)
