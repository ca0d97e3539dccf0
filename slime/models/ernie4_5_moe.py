"""ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B (``Ernie4_5_MoeForCausalLM``): dense layers first, then
shared and routed experts behind a softmax router whose bias affects only the choice; neighbouring
pairs are rotated. Routers of published models are float32; the trainer rounds them to its own
dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.errors import UserError
from slime.models.decoder import decoder_spec, moe_layer_freq, num_experts, softmax_router
from slime.models.layouts import ONE_ROW
from slime.models.rules import HF_MLP, Rule
from slime.models.spec import ModelSpec, refuse, require
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, MOE_RULES, ModelFamily

#: Defaults of transformers' Ernie4_5_MoeConfig for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
#: The sum of the chosen experts' scores is always larger than this.
_NEGLIGIBLE = 1e-6


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    refuse(config, "use_bias", "shared experts have no biases here")
    if float(config["moe_norm_min"]) > _NEGLIGIBLE:
        raise UserError(
            f"the model's config.json sets moe_norm_min to {config['moe_norm_min']!r}, which "
            "cannot be trained faithfully",
            why="scores of the chosen experts are divided by their sum without a lower bound",
            fix=f"choose a model with {_NEGLIGIBLE:g} or less",
        )
    routed = {
        "num_experts": _either(config, "moe_num_experts", "num_experts", default=64),
        "moe_intermediate_size": config["moe_intermediate_size"],
        "num_experts_per_tok": _either(config, "moe_k", "num_experts_per_tok", default=6),
        "norm_topk_prob": True,
    }
    shared = int(config["moe_num_shared_experts"]) * int(config["moe_intermediate_size"])
    return decoder_spec(
        config,
        default_rotary_base=500000.0,
        rotary_interleaved=True,
        moe_layer_freq=moe_layer_freq(_has_experts(config)),
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=shared or None,
        **softmax_router(routed),
    )


def _either(config: dict[str, Any], name: str, alias: str, default: int) -> int:
    """Read a number of experts by the family's name, or by transformers' alias."""
    is_there = any(config.get(key) is not None for key in (name, alias))
    return num_experts(config, name, alias) if is_there else default


def _has_experts(config: dict[str, Any]) -> list[bool]:
    layers = int(require(config, "num_hidden_layers"))
    first = int(config["moe_layer_start_index"])
    last = int(config["moe_layer_end_index"])
    last = layers - 1 if last == -1 else last
    interval = int(config["moe_layer_interval"])
    return [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(layers)]


def _with_flat_bias(rule: Rule) -> Rule:
    """Return the rule; for the router's bias, one with a tensor [1, experts]."""
    if not rule.is_buffer:
        return rule
    return replace(
        rule,
        hf=HF_MLP + "moe_statics.e_score_correction_bias",
        layout=ONE_ROW,
        rows=1,
        columns="experts",
    )


ERNIE4_5_MOE = ModelFamily(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
    rules=DENSE_RULES + tuple(_with_flat_bias(rule) for rule in MOE_RULES),
    make_spec=_spec,
    ignored=(*COMPUTED_BUFFERS, r"model\.mtp_.*"),
)
