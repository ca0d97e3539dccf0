"""Parts of a decoder that only some families have: multi-latent attention, layers of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def yarn_mscale(factor: float, mscale: float) -> float:
    """Peng et al. (arXiv:2309.00071), section 3.4, with DeepSeek's weight on the logarithm.

    Example:
        >>> round(yarn_mscale(40.0, 1.0), 4)
        1.3689
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Latent:
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
        """Keys and values are kept whole, in heads of one size, the shorter filled up with zeros."""
        return max(self.query_dim, self.value_dim)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Latent:
        if config.get("attention_bias") or not config.get("rope_interleave", True):
            raise UserError(
                "the embedded engine implements multi-latent attention without biases, with neighbours as rotary pairs",
                fix="use --rollout-engine sglang for this model",
            )
        plain, rotary = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        scale = (plain + rotary) ** -0.5
        if (rope.get("rope_type") or rope.get("type") or "default") != "default" and rope.get("mscale_all_dim"):
            scale *= yarn_mscale(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2
        rank = config.get("q_lora_rank")
        return Latent(
            query_rank=None if rank is None else int(rank),
            key_rank=int(config["kv_lora_rank"]),
            plain_dim=plain,
            rotary_dim=rotary,
            value_dim=int(config["v_head_dim"]),
            scale=scale,
        )

    def shapes(self, prefix: str, hidden: int, heads: int) -> Shapes:
        queries = heads * self.query_dim
        if self.query_rank is None:
            yield f"{prefix}q_proj.weight", (queries, hidden)
        else:
            yield f"{prefix}q_a_proj.weight", (self.query_rank, hidden)
            yield f"{prefix}q_a_layernorm.weight", (self.query_rank,)
            yield f"{prefix}q_b_proj.weight", (queries, self.query_rank)
        yield f"{prefix}kv_a_proj_with_mqa.weight", (self.key_rank + self.rotary_dim, hidden)
        yield f"{prefix}kv_a_layernorm.weight", (self.key_rank,)
        yield f"{prefix}kv_b_proj.weight", (heads * (self.plain_dim + self.value_dim), self.key_rank)
        yield f"{prefix}o_proj.weight", (hidden, heads * self.value_dim)


@dataclass(frozen=True)
class Experts:
    """Layers of experts.

    Attributes:
        in_layer: which layers have them.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalised: the chosen scores are divided by their sum.
        groups, chosen_groups: experts are chosen out of the best groups; 1 and 1: no limit.
        shared_width: intermediate size of the experts that every token passes; 0 without.
    """

    count: int
    chosen: int
    width: int
    in_layer: tuple[bool, ...]
    score: str
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    shared_width: int = 0

    @property
    def has_bias(self) -> bool:
        """Sigmoid routers have a bias that only chooses."""
        return self.score == "sigmoid"

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Experts:
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        count = next(int(config[name]) for name in names if config.get(name) is not None)
        layers, width = range(int(config["num_hidden_layers"])), int(config["moe_intermediate_size"])
        chosen = int(config["num_experts_per_tok"])
        if config["model_type"] == "qwen3_moe":
            step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
            in_layer = tuple(n not in dense and (n + 1) % step == 0 for n in layers)
            return Experts(count, chosen, width, in_layer, "softmax", bool(config.get("norm_topk_prob", False)))
        latent = config["model_type"] == "deepseek_v3"
        first, scale, groups, best = (3, 2.5, 8, 4) if latent else (1, 1.0, 1, 1)  # transformers' defaults
        first, freq = config.get("first_k_dense_replace", first), config.get("moe_layer_freq") or 1
        return Experts(
            count,
            chosen,
            width,
            tuple(n >= first and n % freq == 0 for n in layers),
            "sigmoid",
            bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", scale)),
            groups=int(config.get("n_group", groups)),
            chosen_groups=int(config.get("topk_group", best)),
            shared_width=int(config.get("n_shared_experts", 1) or 0) * width,
        )

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        yield f"{prefix}gate.weight", (self.count, hidden)
        if self.has_bias:
            yield f"{prefix}gate.e_score_correction_bias", (self.count,)
        mlps = [(f"{prefix}experts.{number}.", self.width) for number in range(self.count)]
        mlps += [(f"{prefix}shared_experts.", self.shared_width)] if self.shared_width else []
        for name, width in mlps:
            for part in ("gate", "up"):
                yield f"{name}{part}_proj.weight", (width, hidden)
            yield f"{name}down_proj.weight", (hidden, width)
