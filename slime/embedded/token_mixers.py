"""Token mixers of the decoder: how a layer makes queries, keys and values.

`slime.models.mixers` names these classes, and `slime.embedded.weights` calls their ``build``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.embedded.architecture import Architecture
from slime.embedded.layers import Linear, rms_norm
from slime.embedded.low_rank import AdaptedRows
from slime.embedded.model import Projected
from slime.embedded.weights import WeightStore
from slime.models.rotary import yarn_mscale

#: Epsilon of the norms inside multi-latent attention, whatever the config says for the others.
_LATENT_EPS = 1e-6


@dataclass
class GroupedAttention:
    """Grouped-query attention: one matrix makes queries, keys and values, and a head of keys and
    values serves several query heads."""

    arch: Architecture
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None

    @staticmethod
    def build(store: WeightStore, prefix: str) -> GroupedAttention:
        return GroupedAttention(
            store.arch,
            store.linear(f"{prefix}linear_qkv"),
            q_norm=store.tensor_if_there(f"{prefix}q_layernorm.weight"),
            k_norm=store.tensor_if_there(f"{prefix}k_layernorm.weight"),
            sinks=store.tensor_if_there(f"{prefix}core_attention.softmax_offset"),
        )

    def project(
        self,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        adapted: AdaptedRows | None,
    ) -> Projected:
        arch = self.arch
        heads = arch.num_heads
        kv_heads = arch.num_kv_heads
        head_dim = arch.head_dim
        projected = self.qkv(normed, adapted=adapted).view(-1, heads + 2 * kv_heads, head_dim)
        rotated = projected[:, : heads + kv_heads]
        values = projected[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            rotated = torch.cat(
                [
                    self._normalised(rotated[:, :heads], self.q_norm),
                    self._normalised(rotated[:, heads:], self.k_norm),
                ],
                dim=1,
            )
        rotated = arch.rope.rotate(rotated, cos, sin)
        queries = rotated[:, :heads]
        if "softmax_scale" in arch.spec.transformer:
            # the kernels scale by 1 / sqrt(head_dim)
            queries = queries * (arch.spec.score_scale * head_dim**0.5)
        return queries, rotated[:, heads:], values

    def _normalised(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim], over each head or, where the weight is that long, over all."""
        arch = self.arch
        if arch.spec.wide_qk_norms:
            return rms_norm(heads.flatten(1), weight, arch.rms_norm_eps).view_as(heads)
        return rms_norm(heads, weight, arch.rms_norm_eps, arch.zero_centred)

    def trimmed(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed


@dataclass
class LatentAttention:
    """Multi-latent attention with whole keys and values in the cache.

    Attributes:
        scale: factor on the scores.
        query: q_proj, or q_b_proj behind ``query_down`` and ``query_norm``.
    """

    arch: Architecture
    scale: float
    query_down: Linear | None
    query_norm: torch.Tensor | None
    query: Linear
    key_down: Linear
    key_norm: torch.Tensor
    key_value: Linear
    sinks: None = None

    @staticmethod
    def build(store: WeightStore, prefix: str) -> LatentAttention:
        spec = store.arch.spec
        facts = spec.transformer
        mscale = yarn_mscale(facts["rotary_scaling_factor"], facts["mscale_all_dim"])
        low_rank = facts["q_lora_rank"] is not None
        query = "linear_q_up_proj" if low_rank else "linear_q_proj"
        return LatentAttention(
            store.arch,
            scale=spec.head_dim**-0.5 * mscale**2,
            query_down=store.linear(f"{prefix}linear_q_down_proj") if low_rank else None,
            query_norm=store.tensor_if_there(f"{prefix}q_layernorm.weight"),
            query=store.linear(f"{prefix}{query}"),
            key_down=store.linear(f"{prefix}linear_kv_down_proj"),
            key_norm=store.tensor(f"{prefix}kv_layernorm.weight"),
            key_value=store.linear(f"{prefix}linear_kv_up_proj"),
        )

    def project(
        self,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        adapted: AdaptedRows | None,
    ) -> Projected:
        arch = self.arch
        heads = arch.num_heads
        position = arch.spec.rotary_dim
        plain = arch.spec.head_dim - position
        compressed = normed
        if self.query_down is not None:
            compressed = _latent_norm(self.query_down(normed, adapted=adapted), self.query_norm)
        queries = self.query(compressed, adapted=adapted).view(-1, heads, plain + position)
        down, key_position = self.key_down(normed, adapted=adapted).split(
            [len(self.key_norm), position], dim=-1
        )
        latent = _latent_norm(down, self.key_norm)
        expanded = self.key_value(latent, adapted=adapted).unflatten(-1, (heads, -1))
        keys = expanded[..., :plain]
        values = expanded[..., plain:]
        rotated = arch.rope.rotate(
            torch.cat([queries[..., plain:], key_position[:, None]], 1), cos, sin
        )
        queries = torch.cat([queries[..., :plain], rotated[:, :heads]], dim=-1)
        keys = torch.cat([keys, rotated[:, heads:].expand(-1, heads, -1)], dim=-1)
        width = arch.head_dim
        queries = queries * (self.scale * width**0.5)  # the kernels scale by 1 / sqrt(head_dim)
        return _padded(queries, width), _padded(keys, width), _padded(values, width)

    def trimmed(self, mixed: torch.Tensor) -> torch.Tensor:
        width = self.arch.head_dim
        value_dim = self.arch.spec.value_dim
        if value_dim == width:
            return mixed
        return mixed.view(-1, self.arch.num_heads, width)[..., :value_dim].flatten(1)


def _latent_norm(latent: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(latent, latent.shape[-1:], weight, _LATENT_EPS)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last axis with zeros up to ``width``."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
