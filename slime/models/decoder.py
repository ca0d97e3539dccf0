"""What a config.json says about a decoder, as a `ModelSpec`: the part that the families share."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.spec import ModelSpec, refuse, require, rotary_settings

#: Fields of config.json that say how many routed experts a layer has.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def decoder_spec(
    config: dict[str, Any],
    family: str,
    *,
    add_qkv_bias: bool = False,
    qk_layernorm: bool = False,
    default_rotary_percent: float = 1.0,
    rotary_interleaved: bool = False,
    post_norms: bool = False,
    output_bias: bool = False,
    normalised_scores: bool = True,
    num_mtp_layers: int = 0,
    **extra: Any,
) -> ModelSpec:
    """The spec of a decoder with RMS norms, rotary embedding and gated MLPs.

    Absent fields take the defaults of transformers' config classes; ``extra`` goes into the transformer arguments.
    """
    hidden, heads = int(require(config, "hidden_size")), int(require(config, "num_attention_heads"))
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "gelu", "relu"):
        raise UserError(f"activation {activation!r} of the model is not supported", fix="silu, gelu and relu are")
    base, percent, scaling = rotary_settings(config, default_percent=default_rotary_percent)
    transformer: dict[str, Any] = {
        "num_layers": int(require(config, "num_hidden_layers")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(require(config, "intermediate_size")),
        "num_attention_heads": heads,
        "num_query_groups": int(config.get("num_key_value_heads") or heads),
        "kv_channels": int(config.get("head_dim") or hidden // heads),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": add_qkv_bias,
        "qk_layernorm": qk_layernorm,
        "rotary_interleaved": rotary_interleaved,
        "num_moe_experts": None,
        "multi_latent_attention": False,
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        **extra,
    }
    return ModelSpec(
        family=family,
        transformer=transformer,
        activation=activation,
        vocab_size=int(require(config, "vocab_size")),
        rotary_base=base,
        rotary_percent=percent,
        rotary_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        post_norms=post_norms,
        output_bias=output_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        normalised_scores=normalised_scores,
        num_mtp_layers=num_mtp_layers,
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """How many layers for multi-token prediction follow the decoder's, by either name; transformers' default is 1."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(name) is not None:
            return int(config[name])
    return 1


def num_experts(config: dict[str, Any]) -> int:
    """Routed experts per layer, under the names that configs give them.

    Raises:
        UserError: none of the names is there.
    """
    for name in EXPERT_COUNTS:
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
            fix="set model_type in config.json to the dense family of the same architecture",
        )
    return 1 if all(has_experts) else [int(here) for here in has_experts]


def softmax_router(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `decoder_spec` for Qwen3-MoE: the top-k of a softmax, renormalised or not (``norm_topk_prob``).

    A softmax over the chosen logits equals the renormalised probabilities, which is what Megatron does without
    ``moe_router_pre_softmax``.
    """
    normalised = bool(config.get("norm_topk_prob", False))
    return {
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": int(require(config, "num_experts_per_tok")),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "normalised_scores": normalised,
        "moe_router_dtype": "fp32",
    }


def sigmoid_router(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `decoder_spec` for DeepSeek-V3 and GLM-4.5: sigmoid scores, a bias that only chooses, groups.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16 and section 2.1.2; a group's score is the sum of its two
    best experts.
    """
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": int(require(config, "num_experts_per_tok")),
        "moe_router_score_function": "sigmoid",
        "normalised_scores": bool(config.get("norm_topk_prob", True)),
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_dtype": "fp32",
    }
    groups, chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    if chosen < groups:  # choosing all groups is no limit
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if config.get("n_shared_experts"):
        size = int(config["n_shared_experts"]) * fields["moe_ffn_hidden_size"]
        fields["moe_shared_expert_intermediate_size"] = size
    return fields


def refuse_sliding_window(config: dict[str, Any], key: str = "use_sliding_window") -> None:
    """Raise where a token does not see all that come before it."""
    refuse(config, key, "trainer and embedded engine let every token see the whole sequence before it")
