"""Qwen2.5-VL (``Qwen2_5_VLForConditionalGeneration``): vision models (docs/images.md) with the
decoder of Qwen2. Published files describe the decoder at the top level of config.json and name its
tensors like a text model's; transformers 5 describes it in ``text_config``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.models.nested import text_config, text_rotary
from slime.models.qwen2 import qwen2_spec
from slime.models.qwen_vision import QWEN2_5_TOWER, QWEN2_5_VISION, QWEN_MODULES
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' Qwen2_5_VLTextConfig that differ from Qwen2's.
_DEFAULTS = {"vocab_size": 152064, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_DEFAULT_BASE = 1e6
_VISION = (r"visual\..*",)


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's config, from either place of config.json. In files of transformers 4,
    ``tie_word_embeddings`` may be in ``text_config``."""
    if not config.get("text_config"):
        return config
    inner = text_config(config)
    own = config["text_config"].get("tie_word_embeddings")
    return {**inner, "tie_word_embeddings": own or inner.get("tie_word_embeddings")}


def _spec(config: dict[str, Any]) -> ModelSpec:
    inner = text_rotary(_decoder(config), kinds=("default", "mrope"))
    return qwen2_spec({**_DEFAULTS, **inner}, _DEFAULT_BASE)


QWEN2_5_VL = ModelFamily(
    name="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    rules=(*DENSE_RULES, *QWEN2_5_TOWER),
    make_spec=_spec,
    ignored=_VISION,
    carried=_VISION,
    vision=QWEN2_5_VISION,
    modules=replace(QWEN_MODULES, prefixes=(("model.", "model.language_model."),)),
)
