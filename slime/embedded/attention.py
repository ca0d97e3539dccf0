"""Attention over the slot KV cache, for one token per sequence (decode) and for whole prompts
(prefill).

Grouped queries: the ``group`` query heads of a key-value head are computed as ``group`` queries of
that head, so keys and values are read once and not repeated. Scores and the softmax are float32 in
every path.

Both classes first write the new keys and values, then attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from slime.embedded.kv_cache import BLOCK, CacheBlock, KVCache
from slime.embedded.model import Heads
from slime.embedded.states import PrefillChunk, StateRows

#: A part of a block is read in multiples of this many positions, to limit the number of shapes.
_READ_STEP = 16


@dataclass(frozen=True)
class Read:
    """The part of a cache block that a decode step reads: ``count`` positions of slots 0 … ``rows -
    1``."""

    block: CacheBlock
    rows: int
    count: int

    @property
    def end(self) -> int:
        return self.block.start + self.count

    def of(self, storage: torch.Tensor) -> torch.Tensor:
        """Return this part of ``storage`` [slots, kv_heads, size, head_dim], contiguous
        [rows * kv_heads, count, head_dim]."""
        return storage[: self.rows, :, : self.count].flatten(0, 1).contiguous()


class DecodeAttention:
    """One query per row; row i is slot i.

    A block of the cache is read for rows 0 … the last one that reaches it. Positions beyond a row's
    length have weight exactly 0, so other rows change at most the shape of the softmax;
    ``fixed_shapes`` (deterministic mode) computes it separately for rows with different numbers of
    blocks.

    Args:
        lengths: keys of each row, including the new token's.
    """

    def __init__(self, cache: KVCache, lengths: list[int], fixed_shapes: bool) -> None:
        self._cache = cache
        self._lengths = lengths
        self._fixed_shapes = fixed_shapes
        self._plan = cache.plan_write(np.arange(len(lengths)), np.asarray(lengths) - 1)
        self._by_window: dict[int | None, _DecodeRows] = {}
        self.states = None if cache.states is None else StateRows(cache.states, None, fixed_shapes)

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        """Return [rows, heads * head_dim]."""
        self._plan.write(layer, heads.keys, heads.values)
        place, window = self._cache.places[layer]
        if window not in self._by_window:
            self._by_window[window] = _DecodeRows(
                self._cache, self._lengths, self._fixed_shapes, window
            )
        return self._by_window[window].attend(place, heads)


class _DecodeRows:
    """The reads of a decode step in all layers with the same window.

    In a ring of size R, place i of a row with L tokens holds its last position p < L for which
    p % R = i.
    """

    def __init__(
        self, cache: KVCache, lengths: list[int], fixed_shapes: bool, window: int | None
    ) -> None:
        as_array = np.asarray(lengths)
        longest = max(lengths)
        blocks = cache.blocks
        if window is not None:
            assert cache.ring is not None
            blocks = [cache.ring]
        self._reads = [
            Read(
                block,
                rows=int(np.flatnonzero(as_array > block.start)[-1]) + 1,
                count=block.size if fixed_shapes else _worth_reading(block, longest),
            )
            for block in blocks
            if block.start < longest
        ]
        num_keys = self._reads[-1].end
        distance = as_array[:, None] - 1 - np.arange(num_keys)
        if window is not None:
            distance %= blocks[0].size
        seen = as_array if window is None else np.minimum(as_array, window)
        hidden = torch.from_numpy((distance < 0) | (distance >= seen[:, None]))
        self._mask = (
            torch.zeros(hidden.shape)
            .masked_fill_(hidden, -math.inf)[:, None, None]
            .to(cache.device)
        )
        ends = [read.end for read in self._reads]
        if fixed_shapes:
            self._runs = _runs(np.searchsorted(ends, np.minimum(as_array, num_keys)), ends)
        else:
            self._runs = [(0, len(lengths), num_keys)]
        self._scores: torch.Tensor | None = None

    def attend(self, place: int, own: Heads) -> torch.Tensor:
        queries = own.queries
        sinks = own.sinks
        kv_heads = own.keys.shape[1]
        rows, heads, head_dim = queries.shape
        grouped = queries.reshape(rows * kv_heads, heads // kv_heads, head_dim)
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, -1).repeat(rows, 1)
        weights = self._softmax(self._masked_scores(place, grouped, kv_heads), sinks)
        output: torch.Tensor | None = None
        for read in self._reads:
            batch = read.rows * kv_heads
            # the cast makes it contiguous: torch would copy a slice before multiplying
            part = weights[:batch, :, read.block.start : read.end].to(queries.dtype)
            product = torch.bmm(part, read.of(read.block.values[place]))
            if output is None:
                output = product if len(self._reads) == 1 else product.float()
            else:
                output[:batch].add_(product)
        assert output is not None
        return output.to(queries.dtype).view(rows, heads * head_dim)

    def _masked_scores(self, place: int, grouped: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return float32 [rows * kv_heads, group, keys]; minus infinity at hidden keys."""
        batch, group, head_dim = grouped.shape
        rows = batch // kv_heads
        num_keys = self._mask.shape[-1]
        if self._scores is None:  # positions that no block writes stay hidden in all layers
            self._scores = torch.full(
                (rows, kv_heads, group, num_keys), -math.inf, device=grouped.device
            )
        for read in self._reads:
            reach = slice(0, read.rows)
            part = slice(read.block.start, read.end)
            scores = exact_scores(grouped[: read.rows * kv_heads], read.of(read.block.keys[place]))
            scores = scores.view(read.rows, kv_heads, group, read.count)
            torch.add(
                self._mask[reach, ..., part],
                scores,
                alpha=head_dim**-0.5,
                out=self._scores[reach, ..., part],
            )
        return self._scores.view(batch, group, num_keys)

    def _softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        if len(self._runs) == 1 and self._runs[0][2] == scores.shape[-1]:
            return softmax_with_sinks(scores, sinks)
        kv_heads = scores.shape[0] // self._mask.shape[0]
        weights = torch.zeros_like(scores)
        for first, last, num_keys in self._runs:
            part = slice(first * kv_heads, last * kv_heads)
            own = None if sinks is None else sinks[part]
            weights[part, :, :num_keys] = softmax_with_sinks(scores[part, :, :num_keys], own)
        return weights


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Compute the softmax over the last axis of float32 scores. Each row's sink takes a share of
    the weight but adds no value.

    Args:
        sinks: float32, in the scores' shape without the last axis, or broadcastable to it; None:
            plain softmax.
    """
    weights = torch.softmax(scores, dim=-1)
    if sinks is None:
        return weights
    others = torch.sigmoid(torch.logsumexp(scores, dim=-1) - sinks)
    return weights * others[..., None]


def exact_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return q kᵀ in float32, [batch, queries, keys], of contiguous q [batch, queries, d] and
    k [batch, keys, d].

    A product of bfloat16 matrices is summed in float32 and rounded to bfloat16, which is too coarse
    for scores. So it is computed twice, once rounded and once as the exact sum minus the rounded
    value, and the two are added. This is still faster than float32 copies of the whole cache.
    """
    keys = k.transpose(1, 2)
    rounded = torch.bmm(q, keys)
    if q.dtype == torch.float32:
        return rounded
    return rounded.float().add_(torch.baddbmm(rounded, q, keys, beta=-1))


class PrefillAttention:
    """Attention of several sequences' new tokens over their own caches: causal, and in both
    directions within the images of `PrefillChunk.blocks`.

    Args:
        fixed_shapes: deterministic mode: blocks of queries are aligned to the sequence, so a
            token's shapes do not depend on the batch or the chunks of its prompt.
    """

    def __init__(self, cache: KVCache, spans: list[PrefillChunk], fixed_shapes: bool) -> None:
        self._cache = cache
        self._spans = spans
        self._fixed_shapes = fixed_shapes
        slots = np.concatenate([np.full(span.count, span.slot) for span in spans])
        positions = np.concatenate(
            [np.arange(span.start, span.start + span.count) for span in spans]
        )
        self._plan = cache.plan_write(slots, positions)
        self.states = None
        if cache.states is not None:
            self.states = StateRows(cache.states, spans, fixed_shapes)
        self._masks = [
            None
            if fixed_shapes or (span.start == 0 and not span.blocks)
            else _chunk_mask(span, 0, None, cache.device)
            for span in spans
        ]

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        """Return [tokens, heads * head_dim]."""
        queries, keys, values, sinks = heads
        window = self._cache.places[layer].window
        if window is not None:  # writing first could overwrite keys that these tokens see
            output = self._in_window(layer, heads, window)
            self._plan.write(layer, keys, values)
            return output
        self._plan.write(layer, keys, values)
        output = torch.empty_like(queries)
        for span, mask in zip(self._spans, self._masks):
            rows = slice(span.offset, span.offset + span.count)
            if self._fixed_shapes:
                read = partial(self._up_to, layer, span.slot)
                output[rows] = _in_fixed_blocks(span, queries[rows], keys.shape[1], read, sinks)
            elif mask is None:
                new_keys = keys[rows].transpose(0, 1)
                new_values = values[rows].transpose(0, 1)
                output[rows] = _sdpa(queries[rows], new_keys, new_values, None, sinks)
            else:
                output[rows] = _sdpa(
                    queries[rows],
                    *self._cache.read(layer, span.slot, span.start + span.count),
                    mask,
                    sinks,
                )
        return output.view(queries.shape[0], -1)

    def _up_to(
        self, layer: int, slot: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        return *self._cache.read(layer, slot, end), 0

    def _in_window(self, layer: int, heads: Heads, window: int) -> torch.Tensor:
        """Attend to the earlier tokens in the ring, and to the new ones."""
        queries, keys, values, sinks = heads
        output = torch.empty_like(queries)
        for span in self._spans:
            rows = slice(span.offset, span.offset + span.count)
            first = _first_block(span.start - span.start % BLOCK, window)
            old = self._cache.read_window(layer, span.slot, first, span.start)
            padding = -(span.start + span.count) % BLOCK if self._fixed_shapes else 0
            line = [
                F.pad(torch.cat([before, new[rows].transpose(0, 1)], dim=1), (0, 0, 0, padding))
                for before, new in zip(old, (keys, values))
            ]
            if self._fixed_shapes:
                read = partial(_part_of, line, first, window)
                output[rows] = _in_fixed_blocks(
                    span, queries[rows], keys.shape[1], read, sinks, window
                )
            else:
                mask = _chunk_mask(span, first, window, queries.device)
                output[rows] = _sdpa(queries[rows], line[0], line[1], mask, sinks)
        return output.view(queries.shape[0], -1)


def _first_block(start: int, window: int) -> int:
    """Return the start of the block with the first key that a token at ``start`` sees."""
    first = max(0, start + 1 - window)
    return first - first % BLOCK


def _part_of(
    line: list[torch.Tensor], first: int, window: int, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the keys and values up to ``end`` that the block of queries at ``start`` sees, and the
    position of the first; ``line`` begins at position ``first``."""
    begin = _first_block(start, window)
    keys, values = (x[:, begin - first : end - first] for x in line)
    return keys, values, begin


def _in_fixed_blocks(
    span: PrefillChunk,
    queries: torch.Tensor,
    kv_heads: int,
    read: Callable[[int, int], tuple[torch.Tensor, torch.Tensor, int]],
    sinks: torch.Tensor | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attend in blocks of queries.

    Args:
        read: start of a block of queries, and the end of the block with the last key → keys and
            values [kv_heads, keys, head_dim] up to that end, and the position of the first.
    """
    heads, head_dim = queries.shape[1:]
    group = heads // kv_heads
    end = span.start + span.count
    if sinks is not None:  # in the order of the scores' rows
        sinks = sinks.float().view(kv_heads, 1, group).expand(-1, BLOCK, -1).flatten(1)
    pieces = []
    for start in range(span.start - span.start % BLOCK, end, BLOCK):
        first = max(start, span.start)
        last = min(start + BLOCK, end)
        padded = queries.new_zeros(BLOCK, heads, head_dim)
        padded[first - start : last - start] = queries[first - span.start : last - span.start]
        q = (
            padded.view(BLOCK, kv_heads, group, head_dim)
            .transpose(0, 1)
            .reshape(kv_heads, BLOCK * group, head_dim)
        )
        reach = max(
            [start + BLOCK, *(e for b, e in span.blocks if b < start + BLOCK and e > start)]
        )
        reach += -reach % BLOCK
        keys, values, begin = read(start, reach)
        scores = exact_scores(q, keys.contiguous()) * head_dim**-0.5
        mask = _block_mask(start, group, begin, reach, window, span.blocks, q.device)
        weights = softmax_with_sinks(scores + mask, sinks).to(values.dtype)
        out = torch.bmm(weights, values.contiguous())
        out = out.view(kv_heads, BLOCK, group, head_dim).transpose(0, 1)
        pieces.append(out[first - start : last - start].reshape(last - first, heads, head_dim))
    return torch.cat(pieces)


#: Number of scores computed at a time for heads with sinks.
_SCORES_AT_ONCE = 1 << 24


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend, causally without a mask: q [count, heads, d], k and v [kv_heads, keys, d] →
    [count, heads, d]."""
    count, heads, head_dim = q.shape
    if sinks is not None:
        step = max(1, _SCORES_AT_ONCE // (heads * k.shape[1]))
        parts = []
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            seen = torch.ones(rows.stop, k.shape[1], dtype=torch.bool, device=q.device).tril_()
            parts.append(
                _explicit_with_sinks(
                    q[rows], k, v, seen[start:] if mask is None else mask[rows], sinks
                )
            )
        return torch.cat(parts)
    kv_heads = k.shape[0]
    group = heads // kv_heads
    grouped = q.view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    result = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None
    )
    return result.permute(2, 0, 1, 3).reshape(count, heads, head_dim)


def _explicit_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Compute `_sdpa` explicitly: its kernel does not return the log-sum-exp that sinks need."""
    count, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.view(count, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    scores = exact_scores(grouped.contiguous(), k.contiguous()) * head_dim**-0.5
    scores = scores.view(kv_heads, count, -1, k.shape[1])
    scores = scores.masked_fill(~mask[None, :, None], -math.inf)
    weights = softmax_with_sinks(scores, sinks.float().view(kv_heads, 1, -1)).to(v.dtype)
    mixed = torch.bmm(weights.flatten(1, 2), v.contiguous()).view(kv_heads, count, -1, head_dim)
    return mixed.transpose(0, 1).reshape(count, heads, head_dim)


def sees(
    queries: torch.Tensor,
    keys: torch.Tensor,
    window: int | None,
    blocks: Iterable[tuple[int, int]] = (),
) -> torch.Tensor:
    """Return bool [queries, keys]: whether the token at each query position sees each key position
    (int64).

    Args:
        window: number of visible positions, including its own; None: all before it.
        blocks: (start, end) of positions that see each other in both directions, as far as the
            window reaches back.
    """
    distance = queries[:, None] - keys
    seen = distance >= 0
    for start, end in blocks:
        seen |= ((queries >= start) & (queries < end))[:, None] & ((keys >= start) & (keys < end))
    return seen if window is None else seen & (distance < window)


def _chunk_mask(
    span: PrefillChunk, first: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return bool [count, start + count - first]: whether each new token sees each key from
    position ``first`` on."""
    keys = torch.arange(first, span.start + span.count, device=device)
    return sees(keys[span.start - first :], keys, window, span.blocks)


def _block_mask(
    start: int,
    group: int,
    first: int,
    end: int,
    window: int | None,
    blocks: tuple[tuple[int, int], ...],
    device: torch.device,
) -> torch.Tensor:
    """Make the mask, float32 [BLOCK * group, end - first], for queries ordered by position, then
    group, and keys from position ``first`` on."""
    positions = torch.arange(start, start + BLOCK, device=device).repeat_interleave(group)
    hidden = ~sees(positions, torch.arange(first, end, device=device), window, blocks)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)


def _worth_reading(block: CacheBlock, longest: int) -> int:
    """Return the number of positions of a block to read: all, unless copying only the used ones is
    less work."""
    used = -(-block.used(longest) // _READ_STEP) * _READ_STEP
    return used if 2 * used <= block.size else block.size


def _runs(owners: np.ndarray, ends: list[int]) -> list[tuple[int, int, int]]:
    """Return (first row, last row + 1, keys) of maximal runs of consecutive rows that end in the
    same block.

    Example:
        >>> _runs(np.array([0, 0, 1, 0]), [64, 128])
        [(0, 2, 64), (2, 3, 128), (3, 4, 64)]
    """
    borders = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    return [(first, last, ends[int(owners[first])]) for first, last in pairwise(borders)]
