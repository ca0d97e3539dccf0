"""Qwen3.5-35B-A3B and larger, Qwen3.6-35B-A3B, Qwen3.8-2.4T-A95B: Qwen3.5's layers, and
Qwen3-Next's experts in one stack per projection and layer; a softmax router whose chosen scores are
always normalised. Folders with one tensor per expert, as transformers writes them, load too; an
export has stacks."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import softmax_router
from slime.models.hybrid import MTP, VISION, gates, hybrid_spec
from slime.models.mixers import GATED_ATTENTION, SPLIT_DELTA_RULES
from slime.models.nested import inside, text_config
from slime.models.qwen2_moe import GATED_MOE_RULES
from slime.models.qwen_vision import QWEN3_5_VISION, QWEN3_TOWER, QWEN_MODULES
from slime.models.spec import ModelSpec, require
from slime.models.table import COMPUTED_BUFFERS, MLP_NORM, OUTER_RULES, ModelFamily, stacked

#: Defaults of transformers' Qwen3_5MoeTextConfig for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 248320,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}


def _text_spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config, "norm_topk_prob": True}
    config["intermediate_size"] = require(config, "moe_intermediate_size")  # no layer is dense
    return hybrid_spec(
        config,
        moe_layer_freq=1,
        moe_shared_expert_intermediate_size=int(config["shared_expert_intermediate_size"]),
        moe_shared_expert_gate=True,
        **softmax_router(config),
        **gates(config),
    )


def _spec(config: dict[str, Any]) -> ModelSpec:
    return _text_spec(text_config(config))


_RULES = (
    *OUTER_RULES,
    *GATED_ATTENTION.rules,
    *SPLIT_DELTA_RULES,
    MLP_NORM,
    *(stacked(rule) for rule in GATED_MOE_RULES),
)

QWEN3_5_MOE_TEXT = ModelFamily(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    rules=_RULES,
    make_spec=_text_spec,
    ignored=COMPUTED_BUFFERS + MTP,
    carried=MTP,
)

QWEN3_5_MOE = ModelFamily(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForConditionalGeneration",),
    rules=(*inside(_RULES), *QWEN3_TOWER),
    make_spec=_spec,
    ignored=MTP + VISION,
    carried=MTP + VISION,
    vision=QWEN3_5_VISION,
    modules=QWEN_MODULES,
)
