"""Gemma 3 4B, 12B and 27B (``Gemma3ForConditionalGeneration``): vision models
(docs/images.md#gemma-3) with the decoder of Gemma 3's text models. Layers of full attention scale
their rotary embedding by 8, which SGLang 0.5.16 drops: the models are refused with it and served by
the embedded engine."""

from __future__ import annotations

from typing import Any

from slime.models.gemma3_text import gemma3_spec
from slime.models.nested import MODULES_UNDER, TOWER_AND_PROJECTOR, text_config, under
from slime.models.siglip import GEMMA3_VISION, SIGLIP_NAMES, SIGLIP_TOWER, read_siglip
from slime.models.spec import ModelSpec
from slime.models.table import POST_NORM_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    return gemma3_spec(text_config(config))


GEMMA3 = ModelFamily(
    name="gemma3",
    architectures=("Gemma3ForConditionalGeneration",),
    rules=(*under(POST_NORM_RULES), *SIGLIP_TOWER),
    make_spec=_spec,
    ignored=TOWER_AND_PROJECTOR,
    carried=TOWER_AND_PROJECTOR,
    vision=GEMMA3_VISION,
    read_vision=read_siglip,
    other_names=SIGLIP_NAMES,
    modules=MODULES_UNDER,
)
