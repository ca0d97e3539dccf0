"""Hugging Face configurations: a tiny one of every family, and those of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.models import FAMILIES

#: Published model → its "config" as in its repository, its number of "parameters", and what else
#: was noted of it.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "model_configs.json").read_text()
)

HYBRID = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
DENSE_FIRST = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 0}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
EXTRA: dict[str, dict[str, object]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_layer_start_index": 0,
    },
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8},
    "deepseek_v2": {**DENSE_FIRST, **LATENT, "norm_topk_prob": False, "q_lora_rank": None},
    "gemma3_text": {"sliding_window": 8},
    "qwen3_next": {**HYBRID, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {
        **HYBRID,
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    "olmo3": {"sliding_window": 8},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "glm4_moe": {**DENSE_FIRST, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {**DENSE_FIRST, **LATENT},
    "deepseek_v3": {**DENSE_FIRST, **LATENT, "n_group": 1, "topk_group": 1},
}

#: Families whose config.json describes the decoder inside, as one of the other family.
NESTED = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
#: Fields of theirs that stand outside of the description.
OUTSIDE = ("dtype", "tie_word_embeddings", "quantization_config")


def config_of(family: str, **changes: object) -> dict:
    """``config.json`` of the smallest model of ``family`` that has all of its parts; ``changes``
    override."""
    config = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 49,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        **EXTRA.get(family, {}),
    }
    if family in NESTED:  # the decoder is described inside
        text = config_of(NESTED[family], **changes)
        outside = {key: changes[key] for key in OUTSIDE if key in changes}
        return {**config, **outside, "text_config": text, "vision_config": {}}
    return config | changes
