"""The decoder forward: Llama, Qwen2 and Qwen3 over packed tokens, with keys and values in a slot cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.rollout.engines.embedded.architecture import Architecture
from slime.rollout.engines.embedded.kv_cache import KVCache
from slime.rollout.engines.embedded.linear import Linear

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, queries [tokens, heads, head_dim]) → [tokens, heads * head_dim]."""


@dataclass
class DecoderLayer:
    """Weights of one layer; query, key and value in one matrix, gate and up in another."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder-only model without any state of its own: keys and values live in the `KVCache` it is given.

    Args:
        embedding: [vocab, hidden].
        head: the output layer; shares the embedding's weight when tied.
        num_positions: longest sequence, for the rotary tables.
    """

    def __init__(
        self,
        arch: Architecture,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        num_positions: int,
    ) -> None:
        self.arch, self.embedding, self.layers, self.norm, self.head = arch, embedding, layers, norm, head
        cos, sin = arch.rope.tables(num_positions, arch.head_dim, embedding.dtype)
        self._cos, self._sin = cos.to(embedding.device), sin.to(embedding.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        write_index: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last norm.

        Args:
            token_ids, positions: int64 [tokens].
            write_index: where each token's keys and values go (`KVCache.write_index`).
            attend: reads the cache after this layer's keys and values were written.
        """
        eps = self.arch.rms_norm_eps
        size = (self.arch.hidden_size,)
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(token_ids, self.embedding)
        for number, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, size, layer.input_norm, eps)
            attended = self._attention(number, layer, normed, cos, sin, cache, write_index, attend)
            hidden = hidden + layer.output(attended)
            normed = F.rms_norm(hidden, size, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return F.rms_norm(hidden, size, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in the weights' dtype."""
        return self.head(hidden)

    def _attention(
        self,
        number: int,
        layer: DecoderLayer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        write_index: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        arch = self.arch
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        projected = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        rotated, values = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated = torch.cat(
                [
                    F.rms_norm(rotated[:, :heads], (head_dim,), layer.q_norm, arch.rms_norm_eps),
                    F.rms_norm(rotated[:, heads:], (head_dim,), layer.k_norm, arch.rms_norm_eps),
                ],
                dim=1,
            )
        rotated = torch.addcmul(rotated * cos, rotated.roll(head_dim // 2, dims=-1), sin)
        flat_keys, flat_values = cache.flat(number)
        flat_keys.index_copy_(0, write_index, rotated[:, heads:].reshape(-1, head_dim))
        flat_values.index_copy_(0, write_index, values.reshape(-1, head_dim))
        return attend(number, rotated[:, :heads].contiguous())
