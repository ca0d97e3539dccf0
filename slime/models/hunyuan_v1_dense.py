"""Hunyuan 0.5B to 7B (``HunYuanDenseV1ForCausalLM``): norms on queries and keys after their
rotation; ``alpha`` of a rotary scaling of type ``dynamic`` scales the base."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.rules import renamed
from slime.models.spec import ModelSpec, require, rotary_settings
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' HunYuanDenseV1Config for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_NAMES = {".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = _with_scaled_base({**_DEFAULTS, **config})
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config, add_qkv_bias=bias, output_bias=bias, qk_layernorm=True, rotates_first=True
    )


def _with_scaled_base(config: dict[str, Any]) -> dict[str, Any]:
    """Replace rotary scaling of type "dynamic" with ``alpha`` by its effect in this family: the
    base times alpha^(dim / (dim - 2)) at every length. Its other fields have no effect.

    Source: transformers' HunYuanDenseV1RotaryEmbedding.
    """
    places = [place for place in ("rope_parameters", "rope_scaling") if config.get(place)]
    alphas = {_alpha(config[place]) for place in places}
    alpha = alphas.pop() if len(alphas) == 1 else None
    if alpha is None:
        return config
    kept = ("rope_theta", "partial_rotary_factor")
    plain = {
        place: {key: value for key, value in config[place].items() if key in kept}
        for place in places
    }
    base, percent, _ = rotary_settings({**config, **plain})
    hidden = int(require(config, "hidden_size"))
    dim = int(config.get("head_dim") or hidden // int(require(config, "num_attention_heads")))
    return {
        **config,
        "rope_theta": base * alpha ** (dim / (dim - 2)),
        "partial_rotary_factor": percent,
        "rope_parameters": None,
        "rope_scaling": None,
    }


def _alpha(settings: dict[str, Any]) -> float | None:
    """Return ``alpha``; None for another type of scaling."""
    kind = settings.get("rope_type") or settings.get("type")
    return float(settings["alpha"]) if kind == "dynamic" and settings.get("alpha") else None


HUNYUAN_V1_DENSE = ModelFamily(
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    rules=renamed(DENSE_RULES, _NAMES),
    make_spec=_spec,
)
