"""Read the facts that all decoder families share from config.json into a `ModelSpec`."""

from __future__ import annotations

import functools
from typing import Any

from slime.errors import UserError
from slime.log import get_logger
from slime.models.spec import ModelSpec, require, rotary_settings

logger = get_logger(__name__)

#: Fields of config.json that say how many routed experts a layer has.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def decoder_spec(
    config: dict[str, Any],
    family: str,
    *,
    add_qkv_bias: bool = False,
    qk_layernorm: bool = False,
    default_rotary_percent: float | None = None,
    rotary_interleaved: bool = False,
    post_norms: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    normalised_scores: bool = True,
    num_mtp_layers: int = 0,
    **extra: Any,
) -> ModelSpec:
    """The spec of a decoder with RMS norms, rotary embedding and gated MLPs.

    Absent fields take the defaults of transformers' config classes; ``extra`` goes into the
    transformer arguments.

    Args:
        default_rotary_percent: rotated share of a head where config.json is silent; None for
            families whose heads are rotated whole.
    Raises:
        UserError: a setting that neither trainer nor embedded engine can honour.
    """
    _refuse_other_architectures(config)
    hidden = int(require(config, "hidden_size"))
    heads = int(require(config, "num_attention_heads"))
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "gelu", "relu"):
        raise UserError(
            f"activation {activation!r} of the model is not supported",
            fix="silu, gelu and relu are",
        )
    base, percent, scaling = rotary_settings(config, default_percent=default_rotary_percent or 1.0)
    if default_rotary_percent is None:
        percent = _whole_heads(percent, scaling)
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
        mlp_bias=mlp_bias,
        normalised_scores=normalised_scores,
        num_mtp_layers=num_mtp_layers,
    )


#: Fields by which other architectures change what is computed without any tensor of their own, and
#: the values that change nothing. transformers' classes for the families here do not read them;
#: other code that reads the file may.
_OTHER_ARCHITECTURES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("alibi", "use_alibi", "parallel_attn", "parallel_residual", "use_parallel_residual"),
            *("attn_temperature_tuning", "attn_output_gate", "rope_interleaved", "add_unit_offset"),
            *("apply_residual_connection_post_layernorm", "attention_sink"),
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *(
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "logits_soft_cap",
                "logit_softcap",
                "clip_qkv",
            ),
            *(
                "attention_chunk_size",
                "no_rope_layers",
                "no_rope_layer_interval",
                "query_pre_attn_scalar",
            ),
            *("attention_multiplier", "attn_scale", "dim_model_base", "swiglu_limit"),
        ),
        (0, 0.0, []),
    ),
    **dict.fromkeys(
        (
            *(
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
                "logit_scale",
                "lm_head_multiplier",
            ),
            *("scale_emb", "embedding_scale", "rotary_pct"),
        ),
        (1, 1.0),
    ),
}


def _refuse_other_architectures(config: dict[str, Any]) -> None:
    """Raise if config.json asks for mathematics that no family here has, under the name other
    architectures use for it."""
    for key, neutral in _OTHER_ARCHITECTURES.items():
        if config.get(key) is not None and config[key] not in neutral:
            raise UserError(
                f"the model's config.json sets {key} to {config[key]!r}, which cannot be trained "
                "faithfully",
                why=f"no model of type {config.get('model_type')!r} computes with it; the weights "
                "may belong to another architecture",
                fix="set model_type to the architecture the weights were trained with, or remove "
                "the field if it is a leftover",
            )


def _whole_heads(percent: float, scaling: dict[str, Any] | None) -> float:
    """Ignore ``partial_rotary_factor`` in a family without partial rotation.

    transformers keeps the field and rotates whole heads all the same, so weights saved with such a
    config mean that. Its scaled frequencies do take the field into account and then fit no head, so
    that combination means nothing.
    """
    if percent != 1.0 and scaling is not None:
        raise UserError(
            f"the model's config.json sets partial_rotary_factor to {percent:g} and scales rotary "
            "frequencies",
            why=f"models of this family rotate whole heads; transformers fails on {percent:g} "
            f"with rope_type {scaling['rope_type']!r}",
            fix="remove partial_rotary_factor from config.json, or set model_type to the family "
            "the weights belong to",
        )
    if percent != 1.0:
        _tell_of_whole_heads(percent)
    return 1.0


@functools.cache  # a config is read several times
def _tell_of_whole_heads(percent: float) -> None:
    logger.warning(
        "config.json sets partial_rotary_factor to %g; whole heads are rotated, as transformers "
        "does for this family",
        percent,
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Count the layers for multi-token prediction behind the decoder's, by either name;
    transformers' default is 1."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(name) is not None:
            return int(config[name])
    return 1


def num_experts(config: dict[str, Any], name: str) -> int:
    """Read the number of routed experts per layer, under the family's name for it or transformers'
    common one.

    Raises:
        UserError: neither name is there, or they contradict each other.
    """
    found = {
        key: int(config[key]) for key in (name, "num_local_experts") if config.get(key) is not None
    }
    if len(set(found.values())) > 1:
        raise UserError(
            "the model config contradicts itself on the number of experts",
            why=", ".join(f"{key} is {value}" for key, value in found.items()),
            fix="use the config.json that belongs to the weights",
        )
    return next(iter(found.values())) if found else int(require(config, name))


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
    """Arguments of `decoder_spec` for Qwen3-MoE: the top-k of a softmax, renormalised or not
    (``norm_topk_prob``).

    A softmax over the chosen logits equals the renormalised probabilities, which is what Megatron
    does without ``moe_router_pre_softmax``.
    """
    normalised = bool(config.get("norm_topk_prob", False))
    return {
        "num_moe_experts": num_experts(config, "num_experts"),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": int(require(config, "num_experts_per_tok")),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "normalised_scores": normalised,
        "moe_router_dtype": "fp32",
    }


def sigmoid_router(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `decoder_spec` for DeepSeek-V3 and GLM-4.5: sigmoid scores, a bias that only
    chooses, groups.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16 and section 2.1.2; a group's score is
    the sum of its two best experts.

    Raises:
        UserError: another way of scoring or choosing, or groups that the experts cannot be divided
            into.
    """
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, value) != value:
            raise UserError(
                f"the model routes with {key} {config[key]!r}",
                why=f"models of this family use {value!r}",
                fix="choose another model",
            )
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts(config, "n_routed_experts"),
        "moe_ffn_hidden_size": int(require(config, "moe_intermediate_size")),
        "moe_router_topk": int(require(config, "num_experts_per_tok")),
        "moe_router_score_function": "sigmoid",
        "normalised_scores": bool(config.get("norm_topk_prob", True)),
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
        "moe_router_dtype": "fp32",
    }
    groups = int(config.get("n_group") or 1)
    chosen = int(config.get("topk_group") or 1)
    experts = fields["num_moe_experts"]
    topk = fields["moe_router_topk"]
    size = experts // groups
    if groups > 1 and (
        experts % groups or size < 2 or not topk <= chosen * size or chosen > groups
    ):
        raise UserError(
            f"the model's router cannot choose {topk} of {experts} experts from {chosen} of "
            f"{groups} groups",
            why="n_group must divide the experts into groups of two or more, and topk_group of "
            "them must hold num_experts_per_tok",
            fix="use the config.json that belongs to the weights",
        )
    if chosen < groups:  # choosing all groups is no limit
        fields |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if config.get("n_shared_experts"):
        size = int(config["n_shared_experts"]) * fields["moe_ffn_hidden_size"]
        fields["moe_shared_expert_intermediate_size"] = size
    return fields


#: transformers' window, where config.json is silent.
_DEFAULT_WINDOW = 4096


def refuse_windows(
    config: dict[str, Any], *, switch: str | None = None, by_layer: bool = False
) -> None:
    """Raise if some token of a sequence within the model's maximum length does not see all tokens
    before it.

    A window of ``max_position_embeddings`` or more hides nothing; nor does one that no layer has.

    Args:
        switch: the field without which the window is off; None: ``sliding_window`` alone decides.
        by_layer: layers from ``max_window_layers`` on have the window, or those that
            ``layer_types`` names.
    Raises:
        UserError: names the field and both lengths.
    """
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    if switch is not None and not config.get(switch):
        window = None
    layers = int(require(config, "num_hidden_layers"))
    kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if by_layer:
        full = min(int(config.get("max_window_layers", 28)), layers)
        kinds = config.get("layer_types") or ["full_attention"] * full + kinds[full:]
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise UserError(
            f"the model's config.json sets layer_types to {kinds}, which cannot be trained "
            "faithfully",
            why=f"the model has {layers} layers; trainer and embedded engine know full_attention "
            "alone",
            fix="use the config.json that belongs to the weights",
        )
    if "sliding_attention" not in kinds:
        return
    positions = int(config.get("max_position_embeddings", 2048))
    if window is not None and int(window) >= positions:
        return
    field = "layer_types" if window is None else switch or "sliding_window"
    raise UserError(
        f"the model's config.json sets {field} to {config.get(field, window)!r}, which cannot be "
        "trained faithfully",
        why=f"{kinds.count('sliding_attention')} of {layers} layers see {window} tokens of "
        f"sequences of up to {positions} (max_position_embeddings); trainer and embedded engine "
        "let every token see the whole sequence before it",
        fix="choose a model without it",
    )
