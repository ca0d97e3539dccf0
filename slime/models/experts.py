"""Layers of experts, shared by the mixture-of-experts families: rules of the table and fields of the config.

Checkpoints hold one tensor per expert and projection (transformers 5 fuses them in its modules only, and writes them
apart); so do the engines' loaders.
"""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import HF_LAYER, MEGATRON_LAYER, require
from slime.models.family import Rule
from slime.models.layouts import GATE_UP, REPLICATED, ROW
from slime.models.spec import ModelSpec

_EXPERTS, _HF_MLP = MEGATRON_LAYER + "mlp.experts.", HF_LAYER + "mlp."


def is_moe_layer(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer)


def _has_expert_bias(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer) and bool(spec.transformer.get("moe_router_enable_expert_bias"))


def _has_shared_experts(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer) and bool(spec.transformer.get("moe_shared_expert_intermediate_size"))


ROUTER_RULES = (
    Rule(MEGATRON_LAYER + "mlp.router.weight", _HF_MLP + "gate.weight", REPLICATED, when=is_moe_layer),
    Rule(
        MEGATRON_LAYER + "mlp.router.expert_bias",
        _HF_MLP + "gate.e_score_correction_bias",
        REPLICATED,
        when=_has_expert_bias,
    ),
)

EXPERT_RULES = (
    Rule(
        (_EXPERTS + "linear_fc1.weight{expert}", _EXPERTS + "local_experts.{expert}.linear_fc1.weight"),
        (_HF_MLP + "experts.{expert}.gate_proj.weight", _HF_MLP + "experts.{expert}.up_proj.weight"),
        GATE_UP,
        when=is_moe_layer,
    ),
    Rule(
        (_EXPERTS + "linear_fc2.weight{expert}", _EXPERTS + "local_experts.{expert}.linear_fc2.weight"),
        _HF_MLP + "experts.{expert}.down_proj.weight",
        ROW,
        when=is_moe_layer,
    ),
)

SHARED_EXPERT_RULES = (
    Rule(
        MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",
        (_HF_MLP + "shared_experts.gate_proj.weight", _HF_MLP + "shared_experts.up_proj.weight"),
        GATE_UP,
        when=_has_shared_experts,
    ),
    Rule(
        MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",
        _HF_MLP + "shared_experts.down_proj.weight",
        ROW,
        when=_has_shared_experts,
    ),
)

MOE_RULES = ROUTER_RULES + EXPERT_RULES + SHARED_EXPERT_RULES


def num_experts(config: dict[str, Any]) -> int:
    """Routed experts per layer, under the names that configs give them.

    Raises:
        UserError: none of the names is there.
    """
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if config.get(name) is not None:
            return int(config[name])
    return int(require(config, "num_experts"))


def moe_layer_freq(has_experts: list[bool]) -> int | list[int]:
    """Megatron's ``moe_layer_freq``: 1 when every layer has experts, else a 0/1 per layer.

    Raises:
        UserError: no layer has experts.
    """
    if not any(has_experts):
        raise UserError(
            "no layer of this model has experts",
            why="its config.json makes every layer dense",
            fix="use the dense model family of the same architecture (--model-name)",
        )
    return 1 if all(has_experts) else [int(here) for here in has_experts]


def softmax_router(config: dict[str, Any]) -> dict[str, Any]:
    """Router fields of Qwen3-MoE: the top-k of a softmax, renormalised or not (``norm_topk_prob``).

    A softmax over the chosen logits equals the renormalised probabilities, which is what Megatron does without
    ``moe_router_pre_softmax``.
    """
    topk, normalised = int(require(config, "num_experts_per_tok")), bool(config.get("norm_topk_prob", False))
    if topk == 1 and normalised:
        raise UserError(
            "the model's router sends each token to one expert and normalises its probability to 1",
            why="num_experts_per_tok is 1 and norm_topk_prob is true: such a router gets no gradient",
            fix="choose another model",
        )
    return {
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": topk,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "moe_router_dtype": "fp32",
    }


def sigmoid_router(config: dict[str, Any]) -> dict[str, Any]:
    """Router fields of DeepSeek-V3 and GLM-4.5: sigmoid scores, a bias that only chooses, groups of experts.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16 and section 2.1.2; a group's score is the sum of its two
    best experts.

    Raises:
        UserError: routing that Megatron's router does otherwise.
    """
    topk = int(require(config, "num_experts_per_tok"))
    if topk == 1 or not config.get("norm_topk_prob", True):
        raise UserError(
            "the model's router does not normalise the scores of the chosen experts",
            why=f"norm_topk_prob is {config.get('norm_topk_prob', True)}, num_experts_per_tok is {topk}; Megatron "
            "normalises the scores of a sigmoid router over the two or more experts it chooses",
            fix="choose another model",
        )
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_dtype": "fp32",
    }
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    if chosen < groups:  # choosing all groups is no limit
        if topk // chosen != 2:
            raise UserError(
                "the model's router chooses groups of experts by a score that Megatron does not compute",
                why=f"a group counts with its two best experts; Megatron takes num_experts_per_tok / topk_group = "
                f"{topk} / {chosen} of them",
                fix="choose another model",
            )
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if config.get("n_shared_experts"):
        size = int(config["n_shared_experts"]) * fields["moe_ffn_hidden_size"]
        fields["moe_shared_expert_intermediate_size"] = size
    return fields
