"""Qwen3-Next (``Qwen3NextForCausalLM``): gated delta nets in three of four layers, attention whose
output is gated in the fourth, norms that multiply by 1 + weight, and Qwen2-MoE's experts."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import FULL, decoder_spec, moe_layer_freq, softmax_router
from slime.models.mixers import GATED_ATTENTION, GATED_DELTA_NET
from slime.models.qwen2_moe import GATED_MOE_RULES
from slime.models.spec import ModelSpec, refuse, require
from slime.models.table import COMPUTED_BUFFERS, MLP_RULES, OUTER_RULES, ModelFamily

LINEAR = "linear_attention"

#: transformers' Qwen3NextConfig, where config.json is silent.
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}
_DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
#: Layers for multi-token prediction: counted, not trained.
MTP = (r"mtp\..*",)


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(int(require(config, "num_hidden_layers")))
    return hybrid_spec(
        config,
        "qwen3_next",
        moe_layer_freq=moe_layer_freq(
            [layer not in dense and (layer + 1) % step == 0 for layer in layers]
        ),
        moe_shared_expert_intermediate_size=int(config["shared_expert_intermediate_size"]),
        moe_shared_expert_gate=True,
        **softmax_router(config),
    )


def hybrid_spec(config: dict[str, Any], family: str, **extra: Any) -> ModelSpec:
    """Describe a decoder of gated delta nets and gated attention; arguments as of `decoder_spec`.

    Raises:
        UserError: as `decoder_spec`; heads of values that those of keys do not divide; kinds of
            layers that contradict each other.
    """
    refuse(config, "attention_bias", "gated attention has no biases here")
    delta = {key: int(config.get(key) or value) for key, value in _DELTA_DEFAULTS.items()}
    if delta["linear_num_value_heads"] % delta["linear_num_key_heads"]:
        raise UserError(
            "the model's heads of values do not belong to whole heads of keys",
            why=f"linear_num_value_heads is {delta['linear_num_value_heads']}, "
            f"linear_num_key_heads {delta['linear_num_key_heads']}",
            fix="use the config.json that belongs to the weights",
        )
    return decoder_spec(
        config,
        family,
        qk_layernorm=True,
        default_rotary_percent=0.25,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=_delta_nets(config),
        **delta,
        **extra,
    )


def _delta_nets(config: dict[str, Any]) -> list[int]:
    """Return a 1 for each layer that is a gated delta net, else 0.

    ``layer_types`` says so layer by layer, ``full_attention_interval`` every how many layers there
    is attention. transformers reads the first, SGLang the second alone.

    Raises:
        UserError: an unknown kind, another number of layers than the model has, or the two fields
            mean different models.
    """
    layers = int(require(config, "num_hidden_layers"))
    interval = config.get("full_attention_interval")
    every = int(interval or 4)
    regular = [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(layers)]
    kinds = list(config.get("layer_types") or regular)
    if not set(kinds) <= {FULL, LINEAR} or len(kinds) != layers:
        raise UserError(
            f"the model's config.json sets layer_types to {kinds}, which cannot be trained "
            "faithfully",
            why=f"the model has {layers} layers; its family has {LINEAR} and {FULL}",
            fix="use the config.json that belongs to the weights",
        )
    if interval is not None and kinds != regular:
        raise UserError(
            "the model config contradicts itself on the kinds of its layers",
            why=f"full_attention_interval is {interval}, layer_types is {kinds}: transformers "
            "reads the list, SGLang the interval",
            fix="correct config.json; without full_attention_interval the list alone counts",
        )
    return [int(kind == LINEAR) for kind in kinds]


def write_interval(config: dict[str, Any]) -> None:
    """Add ``full_attention_interval`` to a config that a model is exported with, where the kinds of
    its layers are regular. transformers leaves it out, and SGLang reads nothing else."""
    described = config.get("text_config", config)
    kinds = described.get("layer_types") or []
    if LINEAR not in kinds or described.get("full_attention_interval") is not None:
        return
    every = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    if kinds == [LINEAR if (layer + 1) % every else FULL for layer in range(len(kinds))]:
        described["full_attention_interval"] = every


QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    rules=(
        *OUTER_RULES,
        *GATED_ATTENTION.rules,
        *GATED_DELTA_NET.rules,
        *MLP_RULES,
        *GATED_MOE_RULES,
    ),
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS + MTP,
    carried=MTP,
)
