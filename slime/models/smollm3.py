"""SmolLM3-3B (``SmolLM3ForCausalLM``): Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import FULL, SLIDING, decoder_spec, layer_kinds, windows
from slime.models.spec import ModelSpec, require
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' SmolLM3Config for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_BASE = 2000000.0


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    rotated = _rotated_layers(config)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    has_window = [window is not None and not here for here in rotated]
    kinds = layer_kinds(config, [SLIDING if here else FULL for here in has_window])
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config,
        default_rotary_base=_BASE,
        add_qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        layer_rotary=tuple("main" if here else "none" for here in rotated),
        honours=("no_rope_layers", "no_rope_layer_interval"),
        **windows({**config, "sliding_window": window}, kinds),
    )


def _rotated_layers(config: dict[str, Any]) -> list[bool]:
    """Read ``no_rope_layers``, which has 1 for layers with rotary embedding. By default every
    ``no_rope_layer_interval``-th layer has none."""
    layers = int(require(config, "num_hidden_layers"))
    marks = config.get("no_rope_layers")
    if marks is None:
        every = int(config.get("no_rope_layer_interval") or 4)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if len(marks) < layers:
        raise UserError(
            "no_rope_layers of the model's config.json cannot be used",
            why=f"it has {len(marks)} of {layers} layers",
            fix="use the config.json that belongs to the weights",
        )
    return [bool(mark) for mark in marks[:layers]]


SMOLLM3 = ModelFamily(
    name="smollm3", architectures=("SmolLM3ForCausalLM",), rules=DENSE_RULES, make_spec=_spec
)
