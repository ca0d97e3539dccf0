"""Mixtral 8x7B and 8x22B (``MixtralForCausalLM``): Mistral with experts in all layers, chosen by a
softmax router."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import (
    decoder_spec,
    moe_layer_freq,
    num_experts,
    softmax_router,
    windows_everywhere,
)
from slime.models.nested import ModuleNames
from slime.models.rules import renamed
from slime.models.spec import ModelSpec, require
from slime.models.table import DENSE_RULES, MOE_RULES, ModelFamily

#: Defaults of transformers' MixtralConfig for fields that config.json lacks.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
#: Part of a name of `MOE_RULES` → part of the name of Mixtral's tensor.
MIXTRAL_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
#: transformers' modules have the names of `MOE_RULES`.
MIXTRAL_MODULES = ModuleNames(
    experts=tuple((file, module) for module, file in MIXTRAL_NAMES.items())
)


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    routed = {
        "num_experts": num_experts(config, "num_local_experts", "num_experts"),
        "moe_intermediate_size": require(config, "intermediate_size"),
        "num_experts_per_tok": config["num_experts_per_tok"],
        "norm_topk_prob": True,
    }
    return decoder_spec(
        config,
        default_rotary_base=1e6,
        moe_layer_freq=moe_layer_freq([True] * int(require(config, "num_hidden_layers"))),
        **softmax_router(routed),
        **windows_everywhere(config),
    )


MIXTRAL = ModelFamily(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    rules=DENSE_RULES + renamed(MOE_RULES, MIXTRAL_NAMES),
    make_spec=_spec,
    modules=MIXTRAL_MODULES,
)
