"""GLM-4 before 0414 (``GlmForCausalLM``: glm-4-9b-chat-hf): as GLM-4, without norms after attention
and MLP."""

from __future__ import annotations

from typing import Any

from slime.models.glm4 import glm_spec
from slime.models.mixers import GROUPED_ATTENTION
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, OUTER_RULES, STACKED_MLP_RULES, ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    return glm_spec(config, "glm")


GLM = ModelFamily(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    rules=OUTER_RULES + GROUPED_ATTENTION.rules + STACKED_MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
