"""The decoder forward over packed tokens, with keys and values in a slot cache.

hidden ─► norm ─► projections ─► attend ─► output (─► norm) ─► +
       ─► norm ─► MLP or experts (─► norm) ─► +
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from slime.embedded.architecture import Architecture, Rope
from slime.embedded.images import SeenImages
from slime.embedded.layers import ExpertMLP, Linear, Mlp, TokenEmbedding, rms_norm
from slime.embedded.low_rank import AdaptedRows
from slime.embedded.states import StateRows
from slime.models.rotary import frequency_axes, query_factors
from slime.models.spec import RotaryKind


class Heads(NamedTuple):
    """The inputs of one layer's attention.

    Attributes:
        queries: [tokens, heads, head_dim], rotated; so are the keys.
        keys, values: [tokens, kv_heads, head_dim].
        sinks: [heads]; None if the layer has none.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor | None = None


class Attend(Protocol):
    """The attention of a forward pass, from its tokens to these and earlier ones.

    Attributes:
        states: states of gated delta nets; None for a model without them.
    """

    states: StateRows | None

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        """Attend, and store the keys and values; return [tokens, heads * head_dim]."""


class _GrowingQueries:
    """Multiplies each token's queries by a factor, [tokens], before it calls another `Attend`."""

    def __init__(self, attend: Attend, factors: torch.Tensor) -> None:
        self._attend = attend
        self._factors = factors[:, None, None]
        self.states = attend.states

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        scaled = heads.queries * self._factors.to(heads.queries.dtype)
        return self._attend(layer, heads._replace(queries=scaled))


class Observer(Protocol):
    """Receives intermediate values of a forward pass (`slime align`)."""

    def saw(self, name: str, value: torch.Tensor) -> None:
        """Take a value [tokens, hidden]: "embedding", "0.attention norm", "0.attention", "0.mlp
        norm", "0.mlp", "0", …, "norm". For attention and MLP the value is their residual summand,
        for a layer and the embedding the hidden states after it."""

    def experts(self, layer: int) -> torch.Tensor | None:
        """Return the experts to use in this layer (`ExpertMLP`); None lets the router choose."""


@dataclass(frozen=True)
class MixerInput:
    """The inputs of a layer's token mixer.

    Attributes:
        normed: [tokens, hidden].
        rotary: cos and sin of the tokens' positions.
        attend: the attention of this forward pass.
        adapted: the tokens' adapters; None if no token has one.
    """

    layer: int
    normed: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    attend: Attend
    adapted: AdaptedRows | None


class MixerWeights(Protocol):
    """The token mixer of one layer; its record in `slime.models.mixers` names the class."""

    def mix(self, given: MixerInput) -> torch.Tensor:
        """Return the input of the output projection."""


@dataclass
class DecoderLayer:
    """Weights of one layer. A norm is None if the layer does not have it."""

    input_norm: torch.Tensor | None
    attention: MixerWeights
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | ExpertMLP
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """A decoder-only model without state; the caller's `KVCache` stores keys and values.

    Args:
        embedding: token embedding.
        head: the output layer; it shares the embedding's weight if they are tied.
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
        self.angles: dict[RotaryKind, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind in arch.spec.rotary_kinds:
            cos, sin = Rope(arch.spec, kind).tables(num_positions, weight.dtype)
            self.angles[kind] = cos.to(weight.device), sin.to(weight.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        chosen: list[torch.Tensor] | None = None,
        observer: Observer | None = None,
        adapted: AdaptedRows | None = None,
        axis_positions: torch.Tensor | None = None,
        seen: SeenImages | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] after the last norm; token_ids and positions
        are int64 [tokens].

        Args:
            chosen: receives the chosen experts, int64 [tokens, k] per layer with experts.
            observer: receives intermediate values.
            adapted: the tokens' adapters; None if no token has one.
            axis_positions: [3, tokens] in time, row and column; default: ``positions``.
            seen: image features that replace embeddings of placeholder tokens.
        """
        places = positions if axis_positions is None else axis_positions
        angles = {
            kind: (self._rotary_rows(cos, places), self._rotary_rows(sin, places))
            for kind, (cos, sin) in self.angles.items()
        }
        if self.arch.spec.query_scaling is not None:
            factors = query_factors(self.arch.spec.query_scaling, positions)
            attend = _GrowingQueries(attend, factors)
        hidden = self.embedding(token_ids, adapted)
        if self.arch.spec.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.arch.spec.embedding_scale, dtype=hidden.dtype)
        if seen is not None:
            hidden = seen.placed(hidden)
        if observer is not None:
            observer.saw("embedding", hidden)
        for number, layer in enumerate(self.layers):
            before = hidden
            normed = self._normalised(hidden, layer.input_norm)
            rotary = angles[self.arch.spec.rotary_kind(number)]
            given = MixerInput(number, normed, rotary, attend, adapted)
            mixed = layer.attention.mix(given)
            hidden = self._added(
                partial(layer.output, mixed), hidden, layer.post_attention_norm, adapted
            )
            experts = None
            if observer is not None:
                observer.saw(f"{number}.attention norm", normed)
                observer.saw(f"{number}.attention", hidden - before)
                experts = observer.experts(number)
                before = hidden
            normed = self._normalised(hidden, layer.mlp_norm)
            mlp: Callable[[torch.Tensor], torch.Tensor] = layer.mlp
            if isinstance(layer.mlp, ExpertMLP):
                mlp = partial(layer.mlp, chosen=chosen, given=experts)
            hidden = self._added(partial(mlp, normed), hidden, layer.post_mlp_norm, adapted)
            if observer is not None:
                observer.saw(f"{number}.mlp norm", normed)
                observer.saw(f"{number}.mlp", hidden - before)
            if seen is not None:
                hidden = seen.added(hidden, number)
            if observer is not None:
                observer.saw(str(number), hidden)
        normed = self._normalised(hidden, self.norm)
        if observer is not None:
            observer.saw("norm", normed)
        return normed

    def _rotary_rows(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rows of a rotary table [positions, 1, dims] for tokens, [tokens, 1, dims].

        Args:
            positions: [tokens], or [3, tokens] if pairs are rotated by different positions.
        """
        if positions.dim() == 1:
            return table[positions]
        axes = frequency_axes(self.arch.spec)
        assert axes is not None
        axes = axes.to(table.device)
        whole = axes.repeat_interleave(2) if self.arch.rope.interleaved else axes.repeat(2)
        pairs = torch.arange(len(whole), device=table.device)
        return table[positions[whole].t(), 0, pairs][:, None]

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        """Return [rows, vocab] in the weights' dtype."""
        logits = self.head(hidden, adapted=adapted)
        scale = self.arch.spec.logits_scale
        return logits if scale == 1.0 else logits * scale

    def _added(
        self,
        part: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        norm: torch.Tensor | None,
        adapted: AdaptedRows | None,
    ) -> torch.Tensor:
        """Add the output of ``part`` to ``hidden``, with the model's post-norm and scale if any."""
        scale = self.arch.spec.residual_scale
        if norm is None and scale == 1.0:
            return part(hidden, adapted)
        return hidden + self._normalised(part(adapted=adapted), norm) * scale

    def _normalised(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        arch = self.arch
        return x if weight is None else rms_norm(x, weight, arch.rms_norm_eps, arch.zero_centred)
