"""glm-4-9b-chat-hf (``GlmForCausalLM``): GLM-4 without norms after attention and MLP."""

from __future__ import annotations

from slime.models.glm4 import glm_spec
from slime.models.mixers import GROUPED_ATTENTION
from slime.models.table import OUTER_RULES, STACKED_MLP_RULES, ModelFamily

GLM = ModelFamily(
    name="glm",
    architectures=("GlmForCausalLM",),
    rules=OUTER_RULES + GROUPED_ATTENTION.rules + STACKED_MLP_RULES,
    make_spec=glm_spec,
)
