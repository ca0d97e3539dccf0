"""Parts of a decoder that only some families have: multi-latent attention, layers of experts."""

from __future__ import annotations

from dataclasses import dataclass

from slime.models.rotary import yarn_mscale
from slime.models.spec import ModelSpec


@dataclass(frozen=True)
class LatentConfig:
    """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank queries, keys and values.

    Attributes:
        query_rank: None for queries straight from the hidden states.
        plain_dim, rotary_dim: of a query or key, without and with position.
        scale: on the scores.
    """

    query_rank: int | None
    key_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Keys and values are kept whole, in heads of one size, the shorter filled up with
        zeros."""
        return max(self.query_dim, self.value_dim)

    @staticmethod
    def of(spec: ModelSpec) -> LatentConfig:
        facts = spec.transformer
        mscale = yarn_mscale(facts["rotary_scaling_factor"], facts["mscale_all_dim"])
        return LatentConfig(
            query_rank=facts["q_lora_rank"],
            key_rank=facts["kv_lora_rank"],
            plain_dim=facts["qk_head_dim"],
            rotary_dim=spec.rotary_dim,
            value_dim=spec.value_dim,
            scale=spec.head_dim**-0.5 * mscale**2,
        )


@dataclass(frozen=True)
class ExpertLayers:
    """Layers of experts.

    Attributes:
        in_layer: which layers have them.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalised: the chosen scores are divided by their sum.
        groups, chosen_groups: experts are chosen out of the best groups; 1 and 1: no limit.
    """

    count: int
    chosen: int
    in_layer: tuple[bool, ...]
    score: str
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    @staticmethod
    def of(spec: ModelSpec) -> ExpertLayers:
        facts = spec.transformer
        return ExpertLayers(
            spec.num_experts,
            int(facts["moe_router_topk"]),
            tuple(spec.is_moe_layer(layer) for layer in range(spec.num_layers)),
            str(facts["moe_router_score_function"]),
            spec.normalised_scores,
            scale=float(facts.get("moe_router_topk_scaling_factor", 1.0)),
            groups=int(facts.get("moe_router_num_groups", 1)),
            chosen_groups=int(facts.get("moe_router_group_topk", 1)),
        )
