"""Qwen3-VL, dense (``Qwen3VLForConditionalGeneration``): vision models (docs/images.md) with the
decoder of Qwen3."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.hybrid import VISION
from slime.models.nested import inside, text_config, text_rotary
from slime.models.qwen_vision import QWEN3_TOWER, QWEN3_VL_VISION, QWEN_MODULES
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' Qwen3VLTextConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
}
_DEFAULT_BASE = 5e5


def _spec(config: dict[str, Any]) -> ModelSpec:
    inner = {**_DEFAULTS, **text_rotary(text_config(config))}
    bias = bool(inner.get("attention_bias"))
    return decoder_spec(
        inner,
        qk_layernorm=True,
        add_qkv_bias=bias,
        output_bias=bias,
        default_rotary_base=_DEFAULT_BASE,
    )


QWEN3_VL = ModelFamily(
    name="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    rules=(*inside(DENSE_RULES), *QWEN3_TOWER),
    make_spec=_spec,
    ignored=VISION,
    carried=VISION,
    vision=QWEN3_VL_VISION,
    modules=QWEN_MODULES,
)
