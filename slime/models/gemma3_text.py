"""Gemma 3 270M and 1B (``Gemma3ForCausalLM``): norms before and after attention and MLP that
multiply by 1 + weight, GELU, embeddings times the square root of their width; five of six layers
have a window and a rotary base of their own."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    FULL,
    decoder_spec,
    every_nth_full,
    layer_kinds,
    rotary_by_kind,
    windows,
)
from slime.models.spec import ModelSpec, refuse
from slime.models.table import POST_NORM_RULES, ModelFamily

#: Defaults of transformers' Gemma3TextConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def gemma3_spec(config: dict[str, Any]) -> ModelSpec:
    """Read the decoder of a Gemma 3.

    Raises:
        UserError: as `decoder_spec`, or attention is bidirectional.
    """
    config, local = rotary_by_kind({**_DEFAULTS, **config}, 1e6, 1e4)
    refuse(config, "use_bidirectional_attention", "tokens attend to later tokens")
    nth = int(config.get("sliding_window_pattern") or 6)
    kinds = layer_kinds(config, every_nth_full(config, nth))
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        {**config, "hidden_act": config["hidden_activation"]},
        qk_layernorm=True,
        add_qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        layernorm_zero_centered_gamma=True,
        softmax_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        embedding_scale=float(config["hidden_size"]) ** 0.5,
        layer_rotary=tuple("main" if kind == FULL else "local" for kind in kinds),
        local_rotary=local,
        honours=("query_pre_attn_scalar",),
        **windows(config, kinds),
    )


GEMMA3_TEXT = ModelFamily(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    rules=POST_NORM_RULES,
    make_spec=gemma3_spec,
)
