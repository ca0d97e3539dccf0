"""Mistral-Small-3.1 and 3.2, Ministral-3-3B, 8B and 14B, Devstral-Small-2
(``Mistral3ForConditionalGeneration``): vision models with the decoder of Mistral or Ministral 3, of
which only the text part is trained (docs/model-families.md#text-parts). The instruct models of
Ministral 3 are published in FP8; those whose names end in BF16 are plain."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.ministral3 import ministral3_spec
from slime.models.mistral import mistral_spec
from slime.models.nested import MODULES_UNDER, TOWER_AND_PROJECTOR, text_config, under
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, ModelFamily

_DECODERS = {"mistral": mistral_spec, "ministral3": ministral3_spec}


def _spec(config: dict[str, Any]) -> ModelSpec:
    inner = text_config(config)
    kind = inner.get("model_type", "mistral")
    if kind not in _DECODERS:
        raise UserError(
            f"the decoder of this Mistral 3 is of model_type {kind!r}, which cannot be trained",
            why=f"text_config of config.json has it; supported are {' and '.join(_DECODERS)}",
            fix="choose a model with such a decoder, e.g. Mistral-Small-3.2 or Ministral 3",
        )
    return _DECODERS[kind](inner)


MISTRAL3 = ModelFamily(
    name="mistral3",
    architectures=("Mistral3ForConditionalGeneration",),
    rules=under(DENSE_RULES),
    make_spec=_spec,
    ignored=TOWER_AND_PROJECTOR,
    carried=TOWER_AND_PROJECTOR,
    modules=MODULES_UNDER,
)
