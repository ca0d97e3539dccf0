"""DeepSeek-V2 and V2-Lite (``DeepseekV2ForCausalLM``): DeepSeek-V3's attention and tensors, with a
softmax router without bias. That of DeepSeek-V2 chooses the groups with the best single experts
first (arXiv:2405.04434, section 2.2.2)."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import num_experts, router_groups
from slime.models.deepseek_v3 import DEEPSEEK_V3, latent_spec
from slime.models.spec import ModelSpec, refuse, require
from slime.models.table import ModelFamily

#: Defaults of transformers' DeepseekV2Config for fields that config.json lacks.
_DEFAULTS = {
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    # transformers ignores these two fields in this family
    config = {**_DEFAULTS, **config, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    refuse(config, "mlp_bias", "the experts of this family have no biases")
    return latent_spec(config, _router(config))


def _router(config: dict[str, Any]) -> dict[str, Any]:
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        raise UserError(
            f"the model routes with topk_method {method!r} and norm_topk_prob "
            f"{config.get('norm_topk_prob')!r}",
            why="models of this family use 'greedy' or 'group_limited_greedy', without "
            "normalisation",
            fix="use DeepSeek-V2, DeepSeek-V2-Lite, or a model of DeepSeek-V3's family",
        )
    inner = int(require(config, "moe_intermediate_size"))
    experts = num_experts(config, "n_routed_experts", "num_experts")
    topk = int(require(config, "num_experts_per_tok"))
    return {
        **(router_groups(config, experts, topk) if method == "group_limited_greedy" else {}),
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": topk,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "normalised_scores": False,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": int(config["n_shared_experts"]) * inner,
    }


DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    rules=DEEPSEEK_V3.rules,
    make_spec=_spec,
    fused=DEEPSEEK_V3.fused,
)
