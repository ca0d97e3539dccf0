"""States of gated delta nets: a row ("slot") per sequence, as in the cache of keys and values.

A layer's state is the last inputs of its convolution, and a matrix per head. Unlike keys and
values, it belongs to one position: a sequence can continue another one only where a state was kept.
The live state is the one after the last computed token. Prefill also keeps copies of states within
a prompt, at positions where other sequences are likely to branch off (`Scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from slime.models.delta_rule import CHUNK, TokenRuns
from slime.models.mixers import FLOAT32_BYTES, mixer_of
from slime.models.spec import ModelSpec


@dataclass(frozen=True)
class DeltaState:
    """The state of all layers at one position.

    Attributes:
        conv: [layers, channels, width - 1], inputs of the convolution, oldest first.
        rule: float32 [layers, value heads, key width, value width].
    """

    conv: torch.Tensor
    rule: torch.Tensor


class StateCache:
    """Live states of all slots.

    Args:
        dtype: dtype of the convolution's inputs.
    Attributes:
        numbers: for each layer of the model its index among layers with a state; None without.
        conv: [layers, slots, channels, width - 1].
        rule: float32 [layers, slots, value heads, key width, value width].
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        sizes = spec.delta_net
        self.numbers: list[int | None] = []
        count = 0
        for layer in range(spec.num_layers):
            keeps_state = mixer_of(spec.transformer, layer).state is not None
            self.numbers.append(count if keeps_state else None)
            count += keeps_state
        self._conv_shape = (sizes.mixed, sizes.conv - 1)
        self._rule_shape = (sizes.value_heads, sizes.key, sizes.value)
        self._num_layers = count
        self._dtype = dtype
        self._device = device
        self.slot_bytes = count * (
            sizes.mixed * (sizes.conv - 1) * dtype.itemsize
            + sizes.value_heads * sizes.key * sizes.value * FLOAT32_BYTES
        )
        self.conv, self.rule = self._empty(0)

    def _empty(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = (self._num_layers, slots)
        conv = torch.zeros(*place, *self._conv_shape, dtype=self._dtype, device=self._device)
        rule = torch.zeros(*place, *self._rule_shape, dtype=torch.float32, device=self._device)
        return conv, rule

    @torch.inference_mode()
    def resize(self, slots: int) -> None:
        """Change the number of slots; the first ones keep their states."""
        conv, rule = self._empty(slots)
        kept = min(slots, self.conv.shape[1])
        conv[:, :kept] = self.conv[:, :kept]
        rule[:, :kept] = self.rule[:, :kept]
        self.conv = conv
        self.rule = rule

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        self.conv[:, target] = self.conv[:, source]
        self.rule[:, target] = self.rule[:, source]

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        for storage in (self.conv, self.rule):
            storage[:, [a, b]] = storage[:, [b, a]]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot."""
        self.conv[:, slot].zero_()
        self.rule[:, slot].zero_()

    @torch.inference_mode()
    def take(self, slot: int) -> DeltaState:
        """Return a copy of a slot's live state."""
        return DeltaState(self.conv[:, slot].clone(), self.rule[:, slot].clone())

    @torch.inference_mode()
    def put(self, slot: int, state: DeltaState) -> None:
        """Make a copy of ``state`` the live state of a slot."""
        self.conv[:, slot] = state.conv
        self.rule[:, slot] = state.rule


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive new tokens of one sequence in a packed prefill.

    Attributes:
        slot: slot of the sequence's keys and values.
        start: position of the first new token; earlier positions are in the cache.
        count: number of new tokens.
        offset: row of the first new token in the packed batch.
        keep: positions after ``start``, by multiples of `CHUNK`, at which copies of the state are
            kept.
        blocks: (start, end) of images among the tokens, whose tokens attend to each other in both
            directions. Each ends with the chunk at the latest.
    """

    slot: int
    start: int
    count: int
    offset: int
    keep: tuple[int, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass
class StateRows:
    """The sequences of one forward pass, as input of a gated delta net.

    Attributes:
        spans: chunks of a prefill; None for decoding, with one row per slot from ``first`` on.
        fixed_shapes: deterministic mode: the shapes of a token's computation do not depend on other
            sequences or on how its prompt is split.
        kept: (index of the span, position) → for each layer so far, conv and rule as in
            `DeltaState`.
    """

    cache: StateCache
    spans: list[PrefillChunk] | None
    fixed_shapes: bool = False
    first: int = 0
    kept: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )
    _reads: torch.Tensor | None = None

    @cached_property
    def runs(self) -> TokenRuns:
        """The split of the spans' new tokens into chunks."""
        assert self.spans is not None
        return TokenRuns.of([span.count for span in self.spans], device=self.cache.conv.device)

    def reads(self, width: int) -> torch.Tensor:
        """Return the rows that a convolution reads, int64 [width, tokens]. Rows are the new tokens,
        followed by ``width - 1`` earlier inputs of each span."""
        assert self.spans is not None
        if self._reads is None:
            total = sum(span.count for span in self.spans)
            columns = []
            for number, span in enumerate(self.spans):
                first = total + number * (width - 1)
                line = torch.cat(
                    [
                        torch.arange(first, first + width - 1),
                        torch.arange(span.offset, span.offset + span.count),
                    ]
                )
                columns.append(torch.stack([line[j : j + span.count] for j in range(width)]))
            self._reads = torch.cat(columns, dim=1).to(self.cache.conv.device)
        return self._reads

    def keep(self, span: int, position: int, conv: torch.Tensor, rule: torch.Tensor) -> None:
        """Keep a copy of one layer's state at a position of a span."""
        self.kept.setdefault((span, position), []).append((conv.clone(), rule.clone()))

    def copies(self, number: int) -> dict[int, DeltaState]:
        """Return position → state for the states that were kept within span ``number``."""
        return {
            position: DeltaState(*(torch.stack(parts) for parts in zip(*layers)))
            for (span, position), layers in self.kept.items()
            if span == number
        }


def block_reads(width: int) -> torch.Tensor:
    """Return the rows that a convolution reads, int64 [width, CHUNK]. Rows are `CHUNK` new tokens,
    followed by ``width - 1`` earlier inputs."""
    line = torch.cat([torch.arange(CHUNK, CHUNK + width - 1), torch.arange(CHUNK)])
    return torch.stack([line[j : j + CHUNK] for j in range(width)])
