"""The decoder forward: Llama, Qwen2 and Qwen3 over packed tokens, with keys and values in a slot cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.rollout.engines.embedded.architecture import Architecture
from slime.rollout.engines.embedded.linear import Linear

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]), which it stores, too
→ [tokens, heads * head_dim]."""


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

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last norm; token_ids and positions are int64 [tokens]."""
        eps, size = self.arch.rms_norm_eps, (self.arch.hidden_size,)
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(token_ids, self.embedding)
        for number, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, size, layer.input_norm, eps)
            queries, keys, values = self._project(layer, normed, cos, sin)
            hidden = layer.output(attend(number, queries, keys, values), residual=hidden)
            normed = F.rms_norm(hidden, size, layer.post_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = layer.down(F.silu(gate).mul_(up), residual=hidden)
        return F.rms_norm(hidden, size, self.norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in the weights' dtype."""
        return self.head(hidden)

    def _project(
        self, layer: DecoderLayer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated, and values."""
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
        return rotated[:, :heads], rotated[:, heads:], values
