"""Packed sequences as dense blocks, for devices without an attention kernel for packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# sequences that share a block are padded to the longest of them; more waste than this starts another block
_MAX_PADDED_RATIO = 1.25


@dataclass
class Block:
    """Sequences of similar length that one dense attention call handles.

    Attributes:
        batch, length: its shape.
        allowed: which keys a query sees, bool [batch or 1, 1, length, length].
        bias: the same to be added to scores: 0 or -inf, float32.
        branched: some sequence branches behind its prompt; otherwise ``allowed`` is the causal mask.
    """

    batch: int
    length: int
    allowed: Tensor
    bias: Tensor
    branched: bool


@dataclass
class PaddedLayout:
    """Cells past the end of a sequence repeat its last token, which no real query sees.

    Attributes:
        gather: int64 [cells], packed position of each cell, block after block.
        cells: int64 [T], the cell of each packed position.
        padding: bool [cells, 1, 1].
        identity: one block without padding: packed and padded order are the same.
    """

    blocks: list[Block]
    gather: Tensor
    cells: Tensor
    padding: Tensor
    identity: bool

    def to(self, device: torch.device) -> PaddedLayout:
        blocks = [replace(b, allowed=b.allowed.to(device), bias=b.bias.to(device)) for b in self.blocks]
        gather, cells, padding = (x.to(device) for x in (self.gather, self.cells, self.padding))
        return PaddedLayout(blocks, gather, cells, padding, self.identity)


def padded_layout(branches: Sequence[Sequence[int]]) -> PaddedLayout:
    """Group sequences by length so that little is padded.

    Args:
        branches: per sequence the length of its prompt and of each response branch behind it; [n] for a plain one.

    Example:
        >>> layout = padded_layout([[3], [2]])
        >>> [(b.batch, b.length) for b in layout.blocks], layout.gather.tolist(), layout.cells.tolist()
        ([(2, 3)], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4])
    """
    lengths = [sum(parts) for parts in branches]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    blocks: list[Block] = []
    gather, padding = [], []
    for members in _blocks_by_length(lengths):
        longest = max(lengths[i] for i in members)
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        begins = torch.tensor([starts[i] for i in members])[:, None]
        offsets = torch.arange(longest)[None, :]
        blocks.append(_block([branches[i] for i in members], longest))
        gather.append((begins + torch.minimum(offsets, sizes - 1)).reshape(-1))
        padding.append((offsets >= sizes).reshape(-1))
    all_cells, is_padding = torch.cat(gather), torch.cat(padding)
    real = torch.nonzero(~is_padding)[:, 0]
    cells = torch.empty(starts[-1], dtype=torch.long)
    cells[all_cells[real]] = real
    identity = len(blocks) == 1 and not bool(is_padding.any())
    return PaddedLayout(blocks, all_cells, cells, is_padding[:, None, None], identity)


def _blocks_by_length(lengths: Sequence[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if blocks:
            longest = lengths[blocks[-1][0]]
            tokens = sum(lengths[j] for j in blocks[-1]) + lengths[i]
            if longest * (len(blocks[-1]) + 1) <= tokens * _MAX_PADDED_RATIO:
                blocks[-1].append(i)
                continue
        blocks.append([i])
    return [sorted(members) for members in blocks]


def _block(branches: Sequence[Sequence[int]], length: int) -> Block:
    causal = torch.ones(length, length, dtype=torch.bool).tril_()
    branched = any(len(parts) > 2 for parts in branches)  # a single response simply goes on from its prompt
    allowed = causal[None, None]
    if branched:
        owner = torch.stack([_owners(parts, length) for parts in branches])
        same = (owner[:, :, None] == owner[:, None, :]) | (owner == 0)[:, None, :]
        allowed = (causal[None] & same)[:, None]
    bias = torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
    return Block(len(branches), length, allowed, bias, branched)


def _owners(parts: Sequence[int], length: int) -> Tensor:
    """Which branch each cell belongs to: 0 the prompt, then 1, 2, …; padding belongs to the last."""
    owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    return torch.cat([owner, owner.new_full((length - owner.numel(),), len(parts) - 1)])
