"""Qwen3.5 and 3.6, dense; Qwen3.8-27B: Qwen3-Next's layers, with the projections of gated delta
nets in four matrices. With ``--multimodal-keys`` they see images (docs/images.md). Without it the
text part is trained, and an export copies the vision tower.

Text models (``Qwen3_5ForCausalLM``) have the usual names. Vision models
(``Qwen3_5ForConditionalGeneration``) have their decoder in ``model.language_model`` and describe it
in ``text_config``.
"""

from __future__ import annotations

from typing import Any

from slime.models.hybrid import MTP, VISION, gates, hybrid_spec
from slime.models.mixers import GATED_ATTENTION, SPLIT_DELTA_RULES
from slime.models.nested import inside, text_config
from slime.models.qwen_vision import QWEN3_5_VISION, QWEN3_TOWER, QWEN_MODULES
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, MLP_RULES, OUTER_RULES, ModelFamily

#: Defaults of transformers' Qwen3_5TextConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 248320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}


def _text_spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    return hybrid_spec(config, **gates(config))


def _spec(config: dict[str, Any]) -> ModelSpec:
    return _text_spec(text_config(config))


_RULES = (*OUTER_RULES, *GATED_ATTENTION.rules, *SPLIT_DELTA_RULES, *MLP_RULES)

QWEN3_5_TEXT = ModelFamily(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    rules=_RULES,
    make_spec=_text_spec,
    ignored=COMPUTED_BUFFERS + MTP,
    carried=MTP,
)

QWEN3_5 = ModelFamily(
    name="qwen3_5",
    architectures=("Qwen3_5ForConditionalGeneration",),
    rules=(*inside(_RULES), *QWEN3_TOWER),
    make_spec=_spec,
    ignored=MTP + VISION,
    carried=MTP + VISION,
    vision=QWEN3_5_VISION,
    modules=QWEN_MODULES,
)
