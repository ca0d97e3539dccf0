"""Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B (``Qwen3VLMoeForConditionalGeneration``): vision models
(docs/images.md) with the decoder of Qwen3-MoE, whose chosen scores are always normalised. Experts
are stacks [experts, in, out]. [experts, out, in], as transformers writes them, loads too, but not
into SGLang; an export has the published layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.models.hybrid import VISION
from slime.models.layouts import Transposed
from slime.models.nested import inside, text_config, text_rotary
from slime.models.qwen3_moe import qwen3_moe_spec
from slime.models.qwen_vision import QWEN3_TOWER, QWEN3_VL_VISION, QWEN_MODULES
from slime.models.rules import Rule
from slime.models.spec import ModelSpec
from slime.models.table import DENSE_RULES, MOE_RULES, ModelFamily, stacked

#: Defaults of transformers' Qwen3VLMoeTextConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 151936,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
_DEFAULT_BASE = 5e5


def _spec(config: dict[str, Any]) -> ModelSpec:
    inner = {**_DEFAULTS, **text_rotary(text_config(config))}
    inner |= {"norm_topk_prob": True, "use_sliding_window": False}
    return qwen3_moe_spec(inner, _DEFAULT_BASE)


def _transposed(rule: Rule) -> Rule:
    if not rule.is_expert:
        return rule
    rule = stacked(rule)
    rows = rule.rows
    columns = rule.columns
    assert columns is not None and not isinstance(rows, tuple)
    return replace(rule, layout=Transposed(rule.layout), rows=columns, columns=rows)


QWEN3_VL_MOE = ModelFamily(
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    rules=(*inside([*DENSE_RULES, *map(_transposed, MOE_RULES)]), *QWEN3_TOWER),
    make_spec=_spec,
    ignored=VISION,
    carried=VISION,
    vision=QWEN3_VL_VISION,
    modules=QWEN_MODULES,
)
