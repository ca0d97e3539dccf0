"""The decoder forward over packed tokens, with keys and values in a slot cache.

hidden ─► norm ─► projections ─► attend ─► output (─► norm) ─► +
       ─► norm ─► MLP or experts (─► norm) ─► +
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from slime.embedded.architecture import Architecture
from slime.embedded.layers import ExpertMLP, Linear, Mlp, TokenEmbedding
from slime.embedded.low_rank import AdaptedRows

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]), which
it stores, too → [tokens, heads * head_dim]."""

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries and keys, rotated, and values."""


class Observer(Protocol):
    """Looks into a forward pass (`slime align`)."""

    def saw(self, name: str, value: torch.Tensor) -> None:
        """[tokens, hidden]: "embedding", "0.attention norm", "0.attention", "0.mlp norm", "0.mlp",
        "0", …, "norm"; of a layer's parts what they add, of a layer and the embedding the hidden
        states behind it."""

    def experts(self, layer: int) -> torch.Tensor | None:
        """Choices to take in this layer (`ExpertMLP`); None leaves them to the router."""


class MixerWeights(Protocol):
    """The token mixer of one layer; its record in `slime.models.mixers` names the class."""

    def project(
        self,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        adapted: AdaptedRows | None,
    ) -> Projected: ...

    def trimmed(self, mixed: torch.Tensor) -> torch.Tensor:
        """The attention output without padding."""


@dataclass
class DecoderLayer:
    """Weights of one layer. ``post_*_norm``: None where the outputs are added as they are."""

    input_norm: torch.Tensor
    attention: MixerWeights
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp | ExpertMLP
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """A decoder-only model without any state of its own: keys and values live in the `KVCache` it
    is given.

    Args:
        embedding: by token.
        head: the output layer; shares the embedding's weight when tied.
        num_positions: longest sequence, for the rotary tables.
    """

    def __init__(
        self,
        arch: Architecture,
        embedding: TokenEmbedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        num_positions: int,
    ) -> None:
        self.arch = arch
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        weight = embedding.weight
        cos, sin = arch.rope.tables(num_positions, weight.dtype)
        self.angles = cos.to(weight.device), sin.to(weight.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        chosen: list[torch.Tensor] | None = None,
        observer: Observer | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the last norm; token_ids and positions are int64
        [tokens].

        Args:
            chosen: gets the chosen experts, int64 [tokens, k] for each layer that has experts.
            observer: is shown each part's output; costs a subtraction per part.
            adapted: which tokens have an adapter; None if none has.
        """
        cos = self.angles[0][positions]
        sin = self.angles[1][positions]
        hidden = self.embedding(token_ids, adapted)
        if observer is not None:
            observer.saw("embedding", hidden)
        for number, layer in enumerate(self.layers):
            before = hidden
            normed = self._normalised(hidden, layer.input_norm)
            mixed = layer.attention.trimmed(
                attend(number, *layer.attention.project(normed, cos, sin, adapted))
            )
            if layer.post_attention_norm is None:
                hidden = layer.output(mixed, hidden, adapted)
            else:
                added = layer.output(mixed, adapted=adapted)
                hidden = hidden + self._normalised(added, layer.post_attention_norm)
            given = None
            if observer is not None:
                observer.saw(f"{number}.attention norm", normed)
                observer.saw(f"{number}.attention", hidden - before)
                given = observer.experts(number)
                before = hidden
            normed = self._normalised(hidden, layer.mlp_norm)
            mlp = (
                partial(layer.mlp, chosen=chosen, given=given)
                if isinstance(layer.mlp, ExpertMLP)
                else layer.mlp
            )
            if layer.post_mlp_norm is None:
                hidden = mlp(normed, hidden, adapted)
            else:
                added = mlp(normed, adapted=adapted)
                hidden = hidden + self._normalised(added, layer.post_mlp_norm)
            if observer is not None:
                observer.saw(f"{number}.mlp norm", normed)
                observer.saw(f"{number}.mlp", hidden - before)
                observer.saw(str(number), hidden)
        normed = self._normalised(hidden, self.norm)
        if observer is not None:
            observer.saw("norm", normed)
        return normed

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        """[rows, vocab] in the weights' dtype."""
        return self.head(hidden, adapted=adapted)

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.arch.hidden_size,), weight, self.arch.rms_norm_eps)
