"""EXAONE 4 (``Exaone4ForCausalLM``): norms after attention and MLP instead of before them; norms on
queries and keys; in models with a window, layers of full attention have no rotary embedding."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import FULL, SLIDING, decoder_spec, every_nth_full, layer_kinds, windows
from slime.models.spec import ModelSpec, require
from slime.models.table import POST_NORM_RULES, ModelFamily

#: Defaults of transformers' Exaone4Config for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    has_windows = config["sliding_window"] is not None
    kinds = layer_kinds(config, _default_kinds(config))
    return decoder_spec(
        config,
        qk_layernorm=True,
        pre_norms=False,
        post_norms=True,
        layer_rotary=tuple("none" if has_windows and kind == FULL else "main" for kind in kinds),
        **windows(config, kinds),
    )


def _default_kinds(config: dict[str, Any]) -> list[str]:
    """Read ``sliding_window_pattern``: the interval of layers of full attention, or a pattern such
    as "LLLG"."""
    layers = int(require(config, "num_hidden_layers"))
    pattern = config["sliding_window_pattern"]
    if config["sliding_window"] is None or not pattern:
        return [FULL] * layers
    if isinstance(pattern, int):
        return every_nth_full(config, pattern)
    kinds = [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(layers)]
    return [*kinds[:-1], FULL]


EXAONE4 = ModelFamily(
    name="exaone4", architectures=("Exaone4ForCausalLM",), rules=POST_NORM_RULES, make_spec=_spec
)
