"""Qwen3.5, 3.6 and 3.8, dense: Qwen3-Next's layers, with the projections of gated delta nets in
four matrices.

Text models (``Qwen3_5ForCausalLM``) have the usual names. Models that also see images
(``Qwen3_5ForConditionalGeneration``) have their decoder below ``model.language_model`` and describe
it in ``text_config``; the text part alone is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime.errors import UserError
from slime.models.mixers import GATED_ATTENTION, SPLIT_DELTA_RULES
from slime.models.qwen3_next import MTP, hybrid_spec
from slime.models.rules import Rule
from slime.models.spec import ModelSpec, require
from slime.models.table import COMPUTED_BUFFERS, MLP_RULES, OUTER_RULES, ModelFamily

#: transformers' Qwen3_5TextConfig, where config.json is silent.
_DEFAULTS = {
    "vocab_size": 248320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
_INSIDE = "model.language_model."
#: The tower that sees images: counted, not trained.
VISION = (r"model\.visual\..*",)


def _text_spec(config: dict[str, Any]) -> ModelSpec:
    return _dense_spec({**_DEFAULTS, **config}, "qwen3_5_text")


def _spec(config: dict[str, Any]) -> ModelSpec:
    return _dense_spec({**_DEFAULTS, **text_config(config)}, "qwen3_5")


def _dense_spec(config: dict[str, Any], family: str) -> ModelSpec:
    return hybrid_spec(config, family, **gates(config))


def gates(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `decoder_spec` for the two gates that config.json names.

    Raises:
        UserError: attention without a gate, or a gate of the delta nets' output other than silu.
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


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the decoder. Whether embedding and output layer
    are one weight stands outside of it."""
    inner = dict(require(config, "text_config"))
    tied = config.get("tie_word_embeddings")
    return inner if tied is None else {**inner, "tie_word_embeddings": tied}


def inside(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the same rules for a decoder below ``model.language_model``."""

    def renamed(name: str) -> str:
        return _INSIDE + name.removeprefix("model.") if name.startswith("model.") else name

    return tuple(
        replace(
            rule,
            hf=tuple(renamed(name) for name in rule.hf_names),
            tied_to=rule.tied_to and renamed(rule.tied_to),
        )
        for rule in rules
    )


_RULES = (*OUTER_RULES, *GATED_ATTENTION.rules, *SPLIT_DELTA_RULES, *MLP_RULES)

QWEN3_5_TEXT = ModelFamily(
    name="qwen3_5_text",
    model_types=("qwen3_5_text",),
    architectures=("Qwen3_5ForCausalLM",),
    rules=_RULES,
    make_spec=_text_spec,
    ignored=COMPUTED_BUFFERS + MTP,
    carried=MTP,
)

QWEN3_5 = ModelFamily(
    name="qwen3_5",
    model_types=("qwen3_5",),
    architectures=("Qwen3_5ForConditionalGeneration",),
    rules=inside(_RULES),
    make_spec=_spec,
    ignored=MTP + VISION,
    carried=MTP + VISION,
)
