"""Attention over the slot KV cache, for one token per sequence (decode) and for whole prompts (prefill).

Grouped queries: the ``group`` query heads of a key-value head are treated as ``group`` queries of that head, so keys
and values are read once and never repeated. Scores and the softmax are float32 in every path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.rollout.engines.embedded.kv_cache import KVCache

#: Keys are attended to in multiples of this many positions.
KEY_BLOCK = 64


@dataclass(frozen=True)
class Span:
    """Consecutive new tokens of one sequence in a packed prefill.

    Attributes:
        slot: where its keys and values go.
        start: position of the first new token; earlier positions are in the cache.
        count: new tokens.
        offset: row of the first one in the packed batch.
    """

    slot: int
    start: int
    count: int
    offset: int


class DecodeAttention:
    """One query per row; row i is slot i and sees ``lengths[i]`` keys.

    Args:
        lengths: keys of each row, the new token's included.
        fixed_shapes: deterministic mode: rows are taken together only when their own lengths round to the same
            number of key blocks, so a row's shapes never depend on its neighbours.
    """

    def __init__(self, cache: KVCache, lengths: list[int], group: int, fixed_shapes: bool) -> None:
        self._cache = cache
        self._runs = _runs_of_equal_length(lengths) if fixed_shapes else [(0, len(lengths), _rounded(max(lengths)))]
        device = cache.device
        lengths_tensor = torch.tensor(lengths, device=device)
        self._masks = []
        for first, last, padded in self._runs:
            beyond = torch.arange(padded, device=device) >= lengths_tensor[first:last, None]
            mask = torch.zeros(beyond.shape, device=device).masked_fill_(beyond, -math.inf)
            self._masks.append(mask[:, None, None])  # [rows, 1, 1, keys]
        self._group = group

    def __call__(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] → [rows, heads * head_dim]."""
        rows, heads, head_dim = queries.shape
        kv_heads = heads // self._group
        grouped = queries.view(rows, kv_heads, self._group, head_dim)
        outputs = []
        for (first, last, padded), mask in zip(self._runs, self._masks):
            keys = self._cache.keys[layer, first:last, :, :padded]
            values = self._cache.values[layer, first:last, :, :padded]
            outputs.append(_attend(grouped[first:last], keys, values, mask))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(rows, heads * head_dim)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [rows, kv_heads, group, d], k and v [rows, kv_heads, keys, d] (strided), mask float32 [rows, 1, 1, keys]."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
    rows, kv_heads, group, head_dim = q.shape
    keys = k.shape[2]
    # flattening (rows, kv_heads) keeps the stride: torch's batched product then reads the cache in place
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    flat_q = (q.float() * head_dim**-0.5).view(rows * kv_heads, group, head_dim)
    scores = torch.bmm(flat_q, flat_k.float().transpose(1, 2))
    weights = torch.softmax(scores.view(rows, kv_heads, group, keys).add_(mask), dim=-1).to(v.dtype)
    return torch.bmm(weights.view(rows * kv_heads, group, keys), flat_v)


class PrefillAttention:
    """Causal attention of several sequences' new tokens over their own caches."""

    def __init__(self, cache: KVCache, spans: list[Span], group: int, fixed_shapes: bool) -> None:
        self._cache, self._spans, self._group, self._fixed_shapes = cache, spans, group, fixed_shapes
        self._masks = [None if span.start == 0 or fixed_shapes else _causal_mask(span, cache.device) for span in spans]

    def __call__(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """queries [tokens, heads, head_dim] → [tokens, heads * head_dim]."""
        output = torch.empty_like(queries)
        for span, mask in zip(self._spans, self._masks):
            rows = slice(span.offset, span.offset + span.count)
            if self._fixed_shapes:
                output[rows] = self._in_fixed_blocks(layer, span, queries[rows])
            else:
                output[rows] = self._whole(layer, span, mask, queries[rows])
        return output.view(queries.shape[0], -1)

    def _whole(self, layer: int, span: Span, mask: torch.Tensor | None, queries: torch.Tensor) -> torch.Tensor:
        end = span.start + span.count
        keys = self._cache.keys[layer, span.slot, :, None, :end]  # [kv_heads, 1, end, d]
        values = self._cache.values[layer, span.slot, :, None, :end]
        count, heads, head_dim = queries.shape
        grouped = queries.view(count, heads // self._group, self._group, head_dim).permute(1, 2, 0, 3)
        expanded = (-1, self._group, -1, -1)
        result = F.scaled_dot_product_attention(
            grouped, keys.expand(expanded), values.expand(expanded), attn_mask=mask, is_causal=mask is None
        )
        return result.permute(2, 0, 1, 3).reshape(count, heads, head_dim)

    def _in_fixed_blocks(self, layer: int, span: Span, queries: torch.Tensor) -> torch.Tensor:
        """Blocks of `KEY_BLOCK` positions, aligned to the sequence: a token meets the same shapes in every batch."""
        heads, head_dim = queries.shape[1:]
        kv_heads, end = heads // self._group, span.start + span.count
        pieces = []
        for block_start in range(span.start - span.start % KEY_BLOCK, end, KEY_BLOCK):
            first, last = max(block_start, span.start), min(block_start + KEY_BLOCK, end)
            padded = queries.new_zeros(KEY_BLOCK, heads, head_dim)
            padded[first - block_start : last - block_start] = queries[first - span.start : last - span.start]
            grouped = padded.view(KEY_BLOCK, kv_heads, self._group, head_dim).transpose(0, 1).contiguous()
            num_keys = block_start + KEY_BLOCK
            keys = self._cache.keys[layer, span.slot, :, :num_keys].unsqueeze(0)
            values = self._cache.values[layer, span.slot, :, :num_keys].unsqueeze(0)
            q = grouped.view(1, kv_heads, KEY_BLOCK * self._group, head_dim)
            out = _attend(q, keys, values, _block_mask(block_start, num_keys, self._group, q.device))
            out = out.view(kv_heads, KEY_BLOCK, self._group, head_dim).transpose(0, 1)
            pieces.append(out[first - block_start : last - block_start].reshape(last - first, heads, head_dim))
        return torch.cat(pieces)


def _causal_mask(span: Span, device: torch.device) -> torch.Tensor:
    """bool [count, start + count]: which keys each new token sees."""
    positions = torch.arange(span.start, span.start + span.count, device=device)
    return torch.arange(span.start + span.count, device=device) <= positions[:, None]


def _block_mask(block_start: int, num_keys: int, group: int, device: torch.device) -> torch.Tensor:
    """float32 [1, 1, KEY_BLOCK * group, num_keys] for queries ordered by position, then group."""
    positions = torch.arange(block_start, block_start + KEY_BLOCK, device=device).repeat_interleave(group)
    hidden = torch.arange(num_keys, device=device) > positions[:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)[None, None]


def _rounded(length: int) -> int:
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def _runs_of_equal_length(lengths: list[int]) -> list[tuple[int, int, int]]:
    """(first row, last row + 1, padded keys) of maximal runs of neighbouring rows with one padded length.

    Example:
        >>> _runs_of_equal_length([3, 60, 65, 2])
        [(0, 2, 64), (2, 3, 128), (3, 4, 64)]
    """
    runs: list[tuple[int, int, int]] = []
    for row, length in enumerate(lengths):
        padded = _rounded(length)
        if runs and runs[-1][2] == padded:
            runs[-1] = (runs[-1][0], row + 1, padded)
        else:
            runs.append((row, row + 1, padded))
    return runs
