"""Phi-3-mini-4k, Phi-4, Phi-4-mini (``Phi3ForCausalLM``): Llama with queries, keys and values in
one tensor, and gate and up in another; part of each head rotated if config.json says so. longrope
(Phi-4-mini, Phi-3 with long contexts) up to the original length (docs/model-families.md#longrope).
"""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import decoder_spec, windows_everywhere
from slime.models.mixers import STACKED_QKV_RULES
from slime.models.spec import ModelSpec
from slime.models.table import OUTER_RULES, STACKED_MLP_RULES, ModelFamily

#: Defaults of transformers' Phi3Config for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
#: Types that transformers treats as "longrope" in this family.
_LONGROPE = ("longrope", "su", "yarn")


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            config[key] = _with_longrope(config[key])
    return decoder_spec(config, default_rotary_percent=1.0, **windows_everywhere(config))


def _with_longrope(settings: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings with the type "longrope" for all of its names.

    Raises:
        UserError: the scaling has another type, which transformers also refuses.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    rest = {key: value for key, value in settings.items() if key != "type"}
    if kind == "default":
        return settings
    if kind not in _LONGROPE:
        raise UserError(
            f"rotary scaling of type {kind!r} is not supported for this family",
            why="models of this family have longrope or no scaling",
            fix="use the config.json that belongs to the weights",
        )
    return {**rest, "rope_type": "longrope"}


PHI3 = ModelFamily(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    rules=OUTER_RULES + STACKED_QKV_RULES + STACKED_MLP_RULES,
    make_spec=_spec,
)
