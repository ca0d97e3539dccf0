"""MiniMax-M2 (``MiniMaxM2ForCausalLM``): norms over all heads of queries or keys together; part of
each head rotated (``rotary_dim``); experts in all layers, with Mixtral's names, behind a sigmoid
router whose bias affects only the choice. Published in FP8 (docs/quantisation.md)."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec, num_experts, sigmoid_router
from slime.models.mixtral import MIXTRAL_MODULES, MIXTRAL_NAMES
from slime.models.rules import renamed
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, DENSE_RULES, MOE_RULES, MTP_LAYERS, ModelFamily

#: Defaults of transformers' MiniMaxM2Config for fields that config.json lacks.
_DEFAULTS = {
    "head_dim": 128,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    if config.get("num_local_experts") is None and config.get("num_experts") is None:
        config["num_local_experts"] = 256
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        config["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    routed = {
        "n_routed_experts": num_experts(config, "num_local_experts", "num_experts"),
        "moe_intermediate_size": config["intermediate_size"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "scoring_func": config.get("scoring_func") or "sigmoid",
    }
    return decoder_spec(
        config,
        default_rotary_base=5e6,
        default_rotary_percent=1.0,
        wide_qk_norms=True,
        moe_layer_freq=1,
        num_mtp_layers=int(config.get("num_mtp_modules") or 0),
        **sigmoid_router(routed),
    )


_NAMES = {**MIXTRAL_NAMES, ".gate.e_score_correction_bias": ".e_score_correction_bias"}

MINIMAX_M2 = ModelFamily(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    rules=DENSE_RULES + renamed(MOE_RULES, _NAMES),
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS + MTP_LAYERS,
    modules=MIXTRAL_MODULES,
)
