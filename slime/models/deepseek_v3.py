"""DeepSeek-V3, R1, Moonlight-16B-A3B, Kimi-K2 (``DeepseekV3ForCausalLM``): multi-latent attention
with or without low-rank queries, YaRN, dense layers first, then shared experts and groups of routed
ones.

    hidden ─► q_a ─► norm ─► q_b ─► queries, per head [without position | with position]
              (without q_lora_rank: one q_proj)
    hidden ─► kv_a ─► [latent | key with position, one for all heads]
                       └─► norm ─► kv_b ─► per head [key without position | value]
"""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import decoder_spec, moe_layer_freq, mtp_layers, sigmoid_router
from slime.models.fused_loading import FusedLoad
from slime.models.mixers import LATENT_ATTENTION, has_query_rank
from slime.models.rules import HF_ATTENTION
from slime.models.spec import ModelSpec, refuse, require, rotary_settings
from slime.models.table import (
    COMPUTED_BUFFERS,
    MLP_RULES,
    MOE_RULES,
    MTP_LAYERS,
    OUTER_RULES,
    ModelFamily,
)

#: Defaults of transformers' DeepseekV3Config for fields that config.json lacks.
_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 2.5,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return latent_spec(config, sigmoid_router(config))


def latent_spec(config: dict[str, Any], router: dict[str, Any]) -> ModelSpec:
    """Make the spec of a family with multi-latent attention; ``config`` includes its defaults."""
    _refuse_other_models(config)
    layers = range(int(require(config, "num_hidden_layers")))
    freq = int(config.get("moe_layer_freq") or 1)
    first = int(config["first_k_dense_replace"])
    spec = decoder_spec(
        {**config, "num_key_value_heads": config.get("num_attention_heads"), "head_dim": None},
        qk_layernorm=True,
        moe_layer_freq=moe_layer_freq([layer >= first and layer % freq == 0 for layer in layers]),
        **router,
        num_mtp_layers=mtp_layers(config),
        **_latent_attention(config),
    )
    del spec.transformer["kv_channels"]  # heads have other widths in multi-latent attention
    return spec


def _refuse_other_models(config: dict[str, Any]) -> None:
    refuse(config, "attention_bias", "Megatron's multi-latent attention has no biases")
    if not config.get("rope_interleave", True):
        raise UserError(
            "the model rotates the first against the second half of each head",
            why="config.json sets rope_interleave to false; published models of this family rotate "
            "neighbouring pairs",
            fix="choose another model",
        )


def _latent_attention(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's ``MLATransformerConfig``."""
    base, _, scaling = rotary_settings(config)
    rank = config.get("q_lora_rank")
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": int(rank) if rank is not None else None,
        "kv_lora_rank": int(require(config, "kv_lora_rank")),
        "qk_head_dim": int(require(config, "qk_nope_head_dim")),
        "qk_pos_emb_head_dim": int(require(config, "qk_rope_head_dim")),
        "v_head_dim": int(require(config, "v_head_dim")),
        "rope_type": "rope",
        "rotary_base": base,
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    # mscale_all_dim scales attention scores with every type of rotary scaling
    if scaling is not None and scaling.get("mscale_all_dim"):
        fields |= {
            "rotary_scaling_factor": float(scaling["factor"]),
            "mscale_all_dim": float(scaling["mscale_all_dim"]),
        }
    if scaling is not None and scaling["rope_type"] == "yarn":
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(scaling["factor"]),
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": float(scaling.get("beta_fast") or 32),
            "beta_slow": float(scaling.get("beta_slow") or 1),
            "mscale": float(scaling.get("mscale") or 1.0),
        }
    return fields


#: The two projections to latents have the same input; SGLang computes them with one matrix.
_FUSED_DOWN_PROJECTIONS = FusedLoad(
    fused=HF_ATTENTION + "fused_qkv_a_proj_with_mqa",
    parts=(HF_ATTENTION + "q_a_proj", HF_ATTENTION + "kv_a_proj_with_mqa"),
    source="SGLang 0.5.12 to 0.5.16: do_load_weights of "
    "models/deepseek_common/deepseek_weight_loader.py",
    when=has_query_rank,
)

DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    other_model_types=("kimi_k2",),
    architectures=("DeepseekV3ForCausalLM",),
    rules=OUTER_RULES + LATENT_ATTENTION.rules + MLP_RULES + MOE_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS + MTP_LAYERS,
    fused=(_FUSED_DOWN_PROJECTIONS,),
)
