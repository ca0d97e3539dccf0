"""Token mixers of the decoder: how a layer makes queries, keys and values.

`slime.models.mixers` names these classes, and `slime.embedded.weights` calls their ``build``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.embedded.architecture import Architecture
from slime.embedded.layers import Linear
from slime.embedded.model import Projected
from slime.embedded.weights import WeightStore
from slime.models.rotary import yarn_mscale
from slime.models.spec import ModelSpec

#: Epsilon of the norms inside multi-latent attention, whatever the config says for the others.
_LATENT_EPS = 1e-6


@dataclass
class GroupedAttention:
    """Queries, keys and values from one matrix; a key-value head serves several query heads."""

    arch: Architecture
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    @staticmethod
    def build(store: WeightStore, prefix: str) -> GroupedAttention:
        norms = [store.tensor_if_there(f"{prefix}{part}_layernorm.weight") for part in "qk"]
        return GroupedAttention(store.arch, store.linear(f"{prefix}linear_qkv"), *norms)

    def project(self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Projected:
        arch = self.arch
        heads = arch.num_heads
        kv_heads = arch.num_kv_heads
        head_dim = arch.head_dim
        projected = self.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        rotated = projected[:, : heads + kv_heads]
        values = projected[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            rotated = torch.cat(
                [
                    F.rms_norm(rotated[:, :heads], (head_dim,), self.q_norm, arch.rms_norm_eps),
                    F.rms_norm(rotated[:, heads:], (head_dim,), self.k_norm, arch.rms_norm_eps),
                ],
                dim=1,
            )
        rotated = arch.rope.rotate(rotated, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], values

    def trimmed(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed


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


@dataclass
class LatentAttention:
    """Multi-latent attention with whole keys and values in the cache.

    ``query`` is q_proj, or q_b_proj behind ``query_down`` and ``query_norm``.
    """

    arch: Architecture
    latent: LatentConfig
    query_down: Linear | None
    query_norm: torch.Tensor | None
    query: Linear
    key_down: Linear
    key_norm: torch.Tensor
    key_value: Linear

    @staticmethod
    def build(store: WeightStore, prefix: str) -> LatentAttention:
        latent = LatentConfig.of(store.arch.spec)
        low_rank = latent.query_rank is not None
        return LatentAttention(
            store.arch,
            latent,
            query_down=store.linear(f"{prefix}linear_q_down_proj") if low_rank else None,
            query_norm=store.tensor_if_there(f"{prefix}q_layernorm.weight"),
            query=store.linear(
                f"{prefix}linear_q_up_proj" if low_rank else f"{prefix}linear_q_proj"
            ),
            key_down=store.linear(f"{prefix}linear_kv_down_proj"),
            key_norm=store.tensor(f"{prefix}kv_layernorm.weight"),
            key_value=store.linear(f"{prefix}linear_kv_up_proj"),
        )

    def project(self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Projected:
        arch = self.arch
        latent = self.latent
        heads = arch.num_heads
        cached = arch.head_dim
        compressed = normed
        if self.query_down is not None:
            compressed = F.rms_norm(
                self.query_down(normed), (latent.query_rank or 0,), self.query_norm, _LATENT_EPS
            )
        queries = self.query(compressed).view(-1, heads, latent.query_dim)
        down, key_position = self.key_down(normed).split(
            [latent.key_rank, latent.rotary_dim], dim=-1
        )
        expanded = self.key_value(F.rms_norm(down, (latent.key_rank,), self.key_norm, _LATENT_EPS))
        plain, values = expanded.view(-1, heads, latent.plain_dim + latent.value_dim).split(
            [latent.plain_dim, latent.value_dim], dim=-1
        )
        rotated = arch.rope.rotate(
            torch.cat([queries[..., latent.plain_dim :], key_position[:, None]], 1), cos, sin
        )
        queries = torch.cat([queries[..., : latent.plain_dim], rotated[:, :heads]], dim=-1)
        keys = torch.cat([plain, rotated[:, heads:].expand(-1, heads, -1)], dim=-1)
        queries = queries * (latent.scale * cached**0.5)  # the kernels scale by 1 / sqrt(head_dim)
        return filled(queries, cached), filled(keys, cached), filled(values, cached)

    def trimmed(self, mixed: torch.Tensor) -> torch.Tensor:
        """Without the zeros that filled the values up."""
        width = self.arch.head_dim
        if self.latent.value_dim == width:
            return mixed
        return mixed.view(-1, self.arch.num_heads, width)[..., : self.latent.value_dim].flatten(1)


def filled(x: torch.Tensor, size: int) -> torch.Tensor:
    """Zeros behind the last axis, up to ``size``."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
