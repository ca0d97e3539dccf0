"""Model families: which Hugging Face tensors make up which Megatron parameters. One table file per family.

family = family_of("path/to/model")         # or a config dict, or a transformers config
spec = family.model_spec("path/to/model")   # what to build
"""

from __future__ import annotations

from slime.errors import UserError
from slime.models.deepseek_v3 import DEEPSEEK_V3
from slime.models.family import Match, ModelFamily, Rule
from slime.models.glm4 import GLM4
from slime.models.glm4_moe import GLM4_MOE
from slime.models.llama import LLAMA
from slime.models.qwen2 import QWEN2
from slime.models.qwen3 import QWEN3
from slime.models.qwen3_moe import QWEN3_MOE
from slime.models.spec import HfConfig, ModelSpec, read_hf_config

FAMILIES: tuple[ModelFamily, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GLM4, GLM4_MOE, DEEPSEEK_V3)

__all__ = ["FAMILIES", "Match", "ModelFamily", "ModelSpec", "Rule", "family_of", "read_hf_config"]


def family_of(hf_config: HfConfig, model_name: str | None = None) -> ModelFamily:
    """The table for a model, by ``model_name`` when given, else by model_type, else by architecture.

    Raises:
        UserError: no table for it; lists those there are.
    """
    if model_name:
        for family in FAMILIES:
            if model_name.lower() in (family.name, *family.model_types):
                return family
        raise UserError(f"--model-name {model_name} is not a model family", fix=f"one of: {_supported()}")
    config = read_hf_config(hf_config)
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    raise UserError(
        f"no conversion table for model_type {model_type!r} ({', '.join(architectures) or 'no architectures'})",
        why=f"the tables there are: {_supported()}",
        fix="choose such a model, or pass --model-name with the family whose layout it has",
    )


def _supported() -> str:
    return ", ".join(family.name for family in FAMILIES)
