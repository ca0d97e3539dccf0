"""Common parts of Qwen3-Next and Qwen3.5: decoders of gated delta nets and gated attention."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import FULL, decoder_spec
from slime.models.spec import ModelSpec, refuse, require

LINEAR = "linear_attention"

_DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
#: Tensors of multi-token-prediction layers, which are not trained.
MTP = (r"mtp\..*",)
#: Tensors of the vision tower, which is not trained.
VISION = (r"model\.visual\..*",)


def hybrid_spec(config: dict[str, Any], **extra: Any) -> ModelSpec:
    """Describe a decoder of gated delta nets and gated attention; arguments as of `decoder_spec`.

    Raises:
        UserError: as `decoder_spec`; or the number of value heads is not a multiple of the number
            of key heads, the activation is not silu, or fields on the kinds of layers contradict
            each other.
    """
    refuse(config, "attention_bias", "gated attention has no biases here")
    reason = "it is also the activation behind the convolution of gated delta nets, which is silu"
    refuse(config, "hidden_act", reason, supported="silu")
    delta: dict[str, Any] = {
        key: int(config.get(key) or value) for key, value in _DELTA_DEFAULTS.items()
    }
    if delta["linear_num_value_heads"] % delta["linear_num_key_heads"]:
        raise UserError(
            "the model's value heads are not a multiple of its key heads",
            why=f"linear_num_value_heads is {delta['linear_num_value_heads']}, "
            f"linear_num_key_heads {delta['linear_num_key_heads']}",
            fix="use the config.json that belongs to the weights",
        )
    return decoder_spec(
        config,
        qk_layernorm=True,
        default_rotary_percent=0.25,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=_delta_nets(config),
        **delta,
        **extra,
    )


def _delta_nets(config: dict[str, Any]) -> list[int]:
    """Return 1 for each layer that is a gated delta net, else 0.

    ``layer_types`` lists the kinds, ``full_attention_interval`` is the interval of attention
    layers. transformers reads only the first, SGLang only the second.

    Raises:
        UserError: a kind is unknown, the number of kinds is not the number of layers, or the two
            fields contradict each other.
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
            fix="correct config.json; without full_attention_interval only the list counts",
        )
    return [int(kind == LINEAR) for kind in kinds]


def write_interval(config: dict[str, Any]) -> None:
    """Add ``full_attention_interval`` to the config of an exported model with regular kinds of
    layers. transformers leaves the field out, but SGLang reads only this field."""
    described = config.get("text_config", config)
    kinds = described.get("layer_types") or []
    if LINEAR not in kinds or described.get("full_attention_interval") is not None:
        return
    every = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    if kinds == [LINEAR if (layer + 1) % every else FULL for layer in range(len(kinds))]:
        described["full_attention_interval"] = every


def gates(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `decoder_spec` for the gates of attention and delta nets.

    Raises:
        UserError: attention has no gate, or the delta nets' output gate is not silu.
    """
    ungated = config.get("attn_output_gate", True) is not True
    activation = config.get("output_gate_type") or "swish"
    if ungated or activation not in ("swish", "silu"):
        raise UserError(
            "the model's config.json changes the gates of its layers",
            why=f"attn_output_gate is {config.get('attn_output_gate')}, output_gate_type is "
            f"{activation!r}; models of this family gate attention by a sigmoid and the output of "
            "gated delta nets by swish",
            fix="use the config.json that belongs to the weights",
        )
    return {"honours": ("attn_output_gate",)}
