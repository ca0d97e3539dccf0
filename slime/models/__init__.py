"""Model families: tables that map Hugging Face tensors to Megatron parameters, a file per family.

family = family_of("path/to/model")         # or a config dict, or a transformers config
spec = family.model_spec("path/to/model")   # what to build
"""

from __future__ import annotations

import re
from typing import Any

from slime.errors import UserError
from slime.models.decoder import EXPERT_COUNTS
from slime.models.deepseek_v2 import DEEPSEEK_V2
from slime.models.deepseek_v3 import DEEPSEEK_V3
from slime.models.ernie4_5_moe import ERNIE4_5_MOE
from slime.models.exaone4 import EXAONE4
from slime.models.gemma3 import GEMMA3
from slime.models.gemma3_text import GEMMA3_TEXT
from slime.models.glm import GLM
from slime.models.glm4 import GLM4
from slime.models.glm4_moe import GLM4_MOE
from slime.models.glm4_moe_lite import GLM4_MOE_LITE
from slime.models.gpt_oss import GPT_OSS
from slime.models.granite import GRANITE
from slime.models.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from slime.models.llama import LLAMA
from slime.models.mimo import MIMO
from slime.models.minimax_m2 import MINIMAX_M2
from slime.models.ministral3 import MINISTRAL3
from slime.models.mistral import MISTRAL
from slime.models.mistral3 import MISTRAL3
from slime.models.mixtral import MIXTRAL
from slime.models.not_trained import not_trained
from slime.models.olmo2 import OLMO2
from slime.models.olmo3 import OLMO3
from slime.models.phi3 import PHI3
from slime.models.qwen2 import QWEN2
from slime.models.qwen2_5_vl import QWEN2_5_VL
from slime.models.qwen2_moe import QWEN2_MOE
from slime.models.qwen3 import QWEN3
from slime.models.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from slime.models.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from slime.models.qwen3_moe import QWEN3_MOE
from slime.models.qwen3_next import QWEN3_NEXT
from slime.models.qwen3_vl import QWEN3_VL
from slime.models.qwen3_vl_moe import QWEN3_VL_MOE
from slime.models.seed_oss import SEED_OSS
from slime.models.smollm3 import SMOLLM3
from slime.models.spec import HfConfig, ModelSpec, read_hf_config
from slime.models.table import Match, ModelFamily, Rule

FAMILIES: tuple[ModelFamily, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    DEEPSEEK_V3,
    GEMMA3_TEXT,
    OLMO2,
    OLMO3,
    SMOLLM3,
    PHI3,
    SEED_OSS,
    GRANITE,
    EXAONE4,
    GLM,
    MIMO,
    MIXTRAL,
    QWEN2_MOE,
    DEEPSEEK_V2,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_MOE,
    GPT_OSS,
    MINISTRAL3,
    MISTRAL3,
    GEMMA3,
    HUNYUAN_V1_DENSE,
    ERNIE4_5_MOE,
    MINIMAX_M2,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
)

__all__ = [
    "FAMILIES", "Match", "ModelFamily", "ModelSpec", "Rule", "family_of", "read_hf_config",
    "table_of", "vocab_size_of"
]  # fmt: skip


def table_of(spec: ModelSpec) -> ModelFamily:
    """Return the table of a spec's family."""
    return next(family for family in FAMILIES if family.name == spec.family)


def family_name(hf_config: HfConfig) -> str:
    """Return the name of a model's family, or "" if there is no table for it."""
    try:
        return family_of(hf_config).name
    except UserError:
        return ""


def vocab_size_of(path: str | None, model_name: str | None = None) -> int | None:
    """Return the vocabulary size of the model at ``path``, or None without a path or without a
    table for it."""
    try:
        return family_of(path, model_name).model_spec(path).vocab_size if path else None
    except UserError:
        return None


def family_of(hf_config: HfConfig, model_name: str | None = None) -> ModelFamily:
    """Find the table for a model: by model_type, else by architecture, else by ``model_name``,
    which must not contradict the config.

    Args:
        model_name: a text that begins with the name of a family, in any spelling ("qwen3-4B",
            "glm4.5-355B-A32B", "Qwen3ForCausalLM"). If several families match, config.json
            decides.
    Raises:
        UserError: there is no table for the model, ``model_name`` is no family, or it contradicts
            config.json.

    Example:
        >>> family_of({"model_type": "qwen3_moe"}, "qwen3-30B-A3B").name
        'qwen3_moe'
    """
    config = read_hf_config(hf_config)
    configured = _family_in(config)
    if model_name:
        named = _named(model_name)
        if configured is None:
            return named[-1] if any(config.get(key) for key in EXPERT_COUNTS) else named[0]
        if configured not in named:
            raise UserError(
                f"--model-name {model_name} contradicts the model's config.json",
                why=f"the name means {' or '.join(family.name for family in named)}, config.json "
                f"has the model_type {config.get('model_type')!r}, which is of the family "
                f"{configured.name}",
                fix="leave --model-name out, or pass a model directory of that family",
            )
    if configured is not None:
        return configured
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    known = not_trained((str(model_type), *architectures))
    raise UserError(
        f"no conversion table for model_type {model_type!r} "
        f"({', '.join(architectures) or 'no architectures'})",
        why=f"the families with tables: {_supported()}"
        if known is None
        else f"{known.why}. Missing: {known.needs}",
        fix="choose a model of these, or pass --model-name with a family of the same layout"
        if known is None
        else f"choose a model of another family: {_supported()}",
    )


def _family_in(config: dict[str, Any]) -> ModelFamily | None:
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return next(
        (family for family in FAMILIES if set(architectures) & set(family.architectures)), None
    )


#: Text that may follow a family in a name: a size or version, or a suffix of a class name.
_REST = re.compile(r"(\d.*|config|forcausallm|base.*|instruct.*|chat.*)?")


def _named(model_name: str) -> list[ModelFamily]:
    """Return the families with the longest name that ``model_name`` begins with. "qwen3" fits both
    the dense and the MoE family.

    Raises:
        UserError: no family matches.
    """
    wanted = _letters(model_name)
    found = dict[str, list[ModelFamily]]()
    all_stems = [(stem, family) for family in FAMILIES for stem in _stems(family)]
    for stem, family in all_stems:
        # "glm" and "glm4" are both families, so a digit after "glm" is a version, unless it is a
        # size such as "7b". After a version ("qwen3"), a digit is a further version only if a
        # family has it ("qwen3.5").
        rest = wanted.removeprefix(stem)
        version = re.escape(rest[:1]) if stem[-1].isdigit() else r"\d"
        versions = any(re.fullmatch(rf"{stem}{version}", other) for other, _ in all_stems)
        is_size = re.match(rf"{stem}-?\d+b\b", model_name.lower())
        if versions and rest[:1].isdigit() and not is_size:
            continue
        if wanted.startswith(stem) and _REST.fullmatch(rest):
            found.setdefault(stem, []).append(family)
    if not found:
        raise UserError(
            f"--model-name {model_name} is not a model family", fix=f"pass one of: {_supported()}"
        )
    return found[max(found, key=len)]


def _stems(family: ModelFamily) -> set[str]:
    stems = {_letters(name) for name in family.model_types}
    stems |= {stem.removesuffix("text") for stem in stems}
    return stems | {stem.removesuffix("moe") for stem in stems}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _supported() -> str:
    return ", ".join(family.name for family in FAMILIES)
