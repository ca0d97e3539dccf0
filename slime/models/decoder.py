"""Read fields that all decoder families share from config.json into a `ModelSpec`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from slime.errors import UserError
from slime.log import get_logger
from slime.models.spec import ModelSpec, Rotary, RotaryKind, require, rotary_settings

logger = get_logger(__name__)

#: Names in config.json of the number of routed experts per layer.
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


#: Fields of `ModelSpec`, except one that Megatron's configuration of latent attention has too.
_SPEC_FIELDS = {field.name for field in dataclasses.fields(ModelSpec)} - {"rotary_base"}


def decoder_spec(
    config: dict[str, Any],
    *,
    add_qkv_bias: bool = False,
    qk_layernorm: bool = False,
    default_rotary_base: float = 10000.0,
    default_rotary_percent: float | None = None,
    rotary_interleaved: bool = False,
    layer_rotary: tuple[RotaryKind, ...] = (),
    honours: tuple[str, ...] = (),
    **extra: Any,
) -> ModelSpec:
    """Make the spec of a decoder with RMS norms, rotary embedding and gated MLPs.

    Absent fields take the defaults of transformers' config classes. ``extra`` are further fields of
    `ModelSpec` and arguments of Megatron's ``TransformerConfig``.

    Args:
        default_rotary_base: default of theta.
        default_rotary_percent: default of the rotated fraction of a head; None for families that
            always rotate whole heads.
        layer_rotary: as of `ModelSpec`.
        honours: fields that this family supports and other families do not.
    Raises:
        UserError: config.json has a setting that trainer and embedded engine do not support.
    """
    _refuse_other_architectures(config, honours)
    hidden = int(require(config, "hidden_size"))
    heads = int(require(config, "num_attention_heads"))
    activation = _ACTIVATIONS.get(config.get("hidden_act", "silu"))
    if activation is None:
        raise UserError(
            f"activation {config['hidden_act']!r} of the model is not supported",
            fix=f"choose a model with one of {', '.join(_ACTIVATIONS)}",
        )
    base, percent, scaling = rotary_settings(
        config, default_rotary_base, default_rotary_percent or 1.0
    )
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
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "num_moe_experts": None,
        "multi_latent_attention": False,
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        **{name: value for name, value in extra.items() if name not in _SPEC_FIELDS},
    }
    spec = ModelSpec(
        family="",  # `ModelFamily.describe` sets it
        transformer=transformer,
        activation=activation,
        vocab_size=int(require(config, "vocab_size")),
        rotary_base=base,
        rotary_percent=percent,
        rotary_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        layer_rotary=() if set(layer_rotary) == {"main"} else layer_rotary,
        **{name: value for name, value in extra.items() if name in _SPEC_FIELDS},
    )
    longest = spec.longest_sequence
    if longest is None:
        return spec
    _check_factors(spec)
    # engines stop at this length; positions beyond it would need the other factors
    return dataclasses.replace(spec, max_position_embeddings=longest)


def _check_factors(spec: ModelSpec) -> None:
    """Check that longrope has a factor per rotated pair of dimensions."""
    assert spec.rotary_scaling is not None
    for key in ("short_factor", "long_factor"):
        count = len(spec.rotary_scaling[key])
        if count != spec.rotary_dim // 2:
            raise UserError(
                f"the model's config.json has {count} entries in {key} of longrope",
                why=f"heads have {spec.rotary_dim // 2} rotated pairs of dimensions",
                fix="use the config.json that belongs to the weights",
            )


#: transformers' name of an activation → its name in `slime.models.activations`.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}

#: Fields that change the computation in other architectures, without tensors of their own → values
#: that change nothing. transformers' classes of the families here ignore these fields, but other
#: code that reads config.json may not.
_OTHER_ARCHITECTURES: dict[str, tuple[Any, ...]] = {
    name: neutral
    for names, neutral in (
        (
            "alibi use_alibi parallel_attn parallel_residual use_parallel_residual "
            "attn_temperature_tuning attn_output_gate rope_interleaved add_unit_offset "
            "apply_residual_connection_post_layernorm attention_sink",
            (False,),
        ),
        (
            "attn_logit_softcapping final_logit_softcapping logits_soft_cap logit_softcap clip_qkv "
            "attention_chunk_size no_rope_layers no_rope_layer_interval query_pre_attn_scalar "
            "attention_multiplier attn_scale dim_model_base swiglu_limit",
            (0, 0.0, []),
        ),
        (
            "embedding_multiplier residual_multiplier logits_scaling logit_scale "
            "lm_head_multiplier scale_emb embedding_scale rotary_pct",
            (1, 1.0),
        ),
    )
    for name in names.split()
}


def _refuse_other_architectures(config: dict[str, Any], honours: tuple[str, ...]) -> None:
    """Refuse fields of other architectures with values that change the computation."""
    for key, neutral in _OTHER_ARCHITECTURES.items():
        if key not in honours and config.get(key) is not None and config[key] not in neutral:
            raise UserError(
                f"the model's config.json sets {key} to {config[key]!r}, which cannot be trained "
                "faithfully",
                why=f"no model of type {config.get('model_type')!r} uses this field; the weights "
                "may belong to another architecture",
                fix="set model_type to the architecture the weights were trained with, or remove "
                "the field if it is a leftover",
            )


def _whole_heads(percent: float, scaling: dict[str, Any] | None) -> float:
    """Ignore ``partial_rotary_factor`` in a family without partial rotation.

    transformers keeps the field but rotates whole heads, so weights saved with such a config were
    trained with whole heads. Its scaled frequencies do depend on the field and then do not fit the
    heads, so this combination is refused.
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
        _warn_of_whole_heads(percent)
    return 1.0


@functools.cache  # warn once, although a config is read several times
def _warn_of_whole_heads(percent: float) -> None:
    logger.warning(
        "config.json sets partial_rotary_factor to %g; whole heads are rotated, as transformers "
        "does for this family",
        percent,
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Read the number of multi-token-prediction layers, by either name; transformers' default is
    1."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(name) is not None:
            return int(config[name])
    return 1


def num_experts(config: dict[str, Any], name: str, alias: str = "num_local_experts") -> int:
    """Read the number of routed experts per layer, by the family's name or by transformers' alias.

    Raises:
        UserError: neither name is in the config, or they contradict each other.
    """
    found = {key: int(config[key]) for key in (name, alias) if config.get(key) is not None}
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


def sparse_step_layers(config: dict[str, Any]) -> int | list[int]:
    """`moe_layer_freq` of a Qwen config: every ``decoder_sparse_step``-th layer has experts, except
    those in ``mlp_only_layers``."""
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(int(require(config, "num_hidden_layers")))
    return moe_layer_freq([layer not in dense and (layer + 1) % step == 0 for layer in layers])


def softmax_router(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `decoder_spec` for the router of Qwen3-MoE: the top-k of a softmax,
    renormalised if ``norm_topk_prob`` is true.

    Megatron renormalises without ``moe_router_pre_softmax``: its softmax over the chosen logits
    equals the renormalised probabilities.
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
    """Return the arguments of `decoder_spec` for the router of DeepSeek-V3 and GLM-4.5: sigmoid
    scores, a bias that affects only the choice of experts, and groups of experts.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16 and section 2.1.2; a group's score is
    the sum of its two best experts.

    Raises:
        UserError: the router has another score or choice, or the groups do not divide the experts.
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
    fields |= router_groups(config, fields["num_moe_experts"], fields["moe_router_topk"])
    if config.get("n_shared_experts"):
        size = int(config["n_shared_experts"]) * fields["moe_ffn_hidden_size"]
        fields["moe_shared_expert_intermediate_size"] = size
    return fields


def router_groups(config: dict[str, Any], experts: int, topk: int) -> dict[str, int]:
    """Return the arguments of `decoder_spec` for a router that chooses ``topk`` experts from the
    best groups; {} if it may choose any.

    Raises:
        UserError: the groups do not divide the experts, or are too small.
    """
    groups = int(config.get("n_group") or 1)
    chosen = int(config.get("topk_group") or 1)
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
    if chosen == groups:  # there is no limit
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


#: transformers' default of ``sliding_window``.
_DEFAULT_WINDOW = 4096

FULL = "full_attention"
SLIDING = "sliding_attention"


def layer_kinds(config: dict[str, Any], default: list[str]) -> list[str]:
    """Return the kind of attention of each layer: ``layer_types``, or ``default`` without it.

    Raises:
        UserError: a kind is not supported, or the number of kinds is not the number of layers.
    """
    kinds = list(config.get("layer_types") or default)
    layers = int(require(config, "num_hidden_layers"))
    if not set(kinds) <= {FULL, SLIDING} or len(kinds) != layers:
        raise UserError(
            f"the model's config.json sets layer_types to {kinds}, which cannot be trained "
            "faithfully",
            why=f"the model has {layers} layers; trainer and embedded engine support {FULL} and "
            f"{SLIDING}",
            fix="use the config.json that belongs to the weights",
        )
    return kinds


def every_nth_full(config: dict[str, Any], nth: int) -> list[str]:
    """Return kinds of attention in which every ``nth`` layer is full and the others have a
    window."""
    layers = range(int(require(config, "num_hidden_layers")))
    return [SLIDING if (layer + 1) % nth else FULL for layer in layers]


def windows(config: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Return the arguments of `decoder_spec` for models in which some layers attend to the last
    ``sliding_window`` tokens, including the token itself.

    A window of ``max_position_embeddings`` or more is ignored, as it has no effect.

    Raises:
        UserError: layers have a window, but config.json has no ``sliding_window``.
    """
    if SLIDING not in kinds:
        return {}
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    if window is None:
        raise UserError(
            "the model's config.json sets no sliding_window",
            why=f"{kinds.count(SLIDING)} of {len(kinds)} layers (layer_types) have one",
            fix="use the config.json that belongs to the weights",
        )
    if int(window) >= int(config.get("max_position_embeddings", 2048)):
        return {}
    return {
        "window_size": (int(window) - 1, 0),
        "window_attn_skip_freq": [int(kind == SLIDING) for kind in kinds],
    }


def windows_everywhere(config: dict[str, Any], switch: str | None = None) -> dict[str, Any]:
    """Return the arguments of `decoder_spec` for a model in which all layers have a window, or
    none.

    Args:
        switch: the field that must be true for the window to be on; None: only ``sliding_window``
            decides.
    """
    is_on = config.get("sliding_window", _DEFAULT_WINDOW) is not None
    if switch is not None and not config.get(switch):
        is_on = False
    return windows(config, [SLIDING if is_on else FULL] * int(require(config, "num_hidden_layers")))


def windows_from_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `decoder_spec` for Qwen2 and Qwen3: with ``use_sliding_window`` the
    layers from ``max_window_layers`` on have the window, or those that ``layer_types`` names."""
    is_on = bool(config.get("use_sliding_window"))
    window = config.get("sliding_window", _DEFAULT_WINDOW) if is_on else None
    layers = int(require(config, "num_hidden_layers"))
    full = min(int(config.get("max_window_layers", 28)), layers) if window is not None else layers
    kinds = layer_kinds(config, [FULL] * full + [SLIDING] * (layers - full))
    return windows({**config, "sliding_window": window}, kinds)


def rotary_by_kind(
    config: dict[str, Any], main_base: float, local_base: float
) -> tuple[dict[str, Any], Rotary]:
    """Read the rotary embeddings of a model with one for full attention and one for layers with a
    window.

    transformers 5 writes ``rope_parameters`` by kind of layer. Earlier versions write
    ``rope_theta`` and ``rope_scaling`` for full attention, and ``rope_local_base_freq`` for layers
    with a window, whose frequencies they never scale.

    Returns:
        The config with the settings of full attention as its only ones, and the embedding of layers
        with a window.
    Raises:
        UserError: ``rope_parameters`` has further entries, or ``rope_scaling`` is also set.
    """
    found = config.get("rope_parameters")
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    if not found:
        local = config.get("rope_local_base_freq") or local_base
        return {**rest, "rope_theta": config.get("rope_theta") or main_base}, Rotary(float(local))
    stray = set(found) - {FULL, SLIDING}
    if {FULL, SLIDING} <= set(found) and found.get("rope_type") == "default":
        stray -= {"rope_type", "rope_theta"}  # transformers 5.12 writes them and does not read them
    if config.get("rope_scaling") or stray:
        raise UserError(
            "the model config contradicts itself on its rotary embeddings",
            why=f"rope_parameters is {found}, rope_scaling is {config.get('rope_scaling')}; layers "
            f"of this family differ, and rope_parameters has the entries {FULL} and {SLIDING}",
            fix="use the config.json that belongs to the weights",
        )
    for key in ("rope_theta", "rope_local_base_freq"):
        rest.pop(key, None)
    main = found.get(FULL) or {}
    base, _, scaling = rotary_settings({"rope_parameters": found.get(SLIDING)}, local_base)
    return (
        {**rest, "rope_parameters": {**main, "rope_theta": main.get("rope_theta") or main_base}},
        Rotary(base, scaling),
    )
