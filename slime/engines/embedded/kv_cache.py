"""Keys and values of all sequences: a row ("slot") per sequence, in blocks of positions that are added as needed.

    position:   0       64      128      192      256      320 …
    block:      │  64   │   64   │   64   │   64   │   64   │ …      sizes grow later, so that their number stays small
                each: keys and values [layers, slots, kv_heads, size, head_dim]

Decoding reads slots 0 … n-1 of a block as one contiguous [n * kv_heads, size, head_dim]: in place, which torch's
batched products only do with contiguous operands; and a block is read only for the sequences that reach it. So the
scheduler keeps running sequences in the first slots and moves one when a hole appears. Growing longer adds a block and
copies nothing. Storage begins at zero: masked positions are multiplied by a weight of 0, which only finite numbers
survive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.engines.embedded.architecture import Architecture

#: Size of the first blocks; every block is a multiple of it.
BLOCK = 64
_FIRST_SLOTS = 8


@dataclass
class Block:
    """Positions ``start`` … ``start + size - 1`` of all slots.

    keys and values are [layers, slots, kv_heads, size, head_dim].
    """

    start: int
    size: int
    keys: torch.Tensor
    values: torch.Tensor

    def used(self, length: int) -> int:
        """How many of its positions a sequence of this length has."""
        return min(self.size, max(0, length - self.start))


@dataclass
class WritePlan:
    """Where the keys and values of new tokens go, for all layers: (block, their rows or None for all, flat index)."""

    parts: list[tuple[Block, torch.Tensor | None, torch.Tensor]]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys and values [tokens, kv_heads, head_dim]."""
        head_dim = keys.shape[-1]
        for block, rows, index in self.parts:
            new_keys, new_values = (keys, values) if rows is None else (keys[rows], values[rows])
            block.keys[layer].view(-1, head_dim).index_copy_(0, index, new_keys.reshape(-1, head_dim))
            block.values[layer].view(-1, head_dim).index_copy_(0, index, new_values.reshape(-1, head_dim))


class KVCache:
    """Args:
    max_slots: most sequences at once.
    byte_limit: storage beyond it is only taken when a single sequence needs it.
    """

    def __init__(
        self, arch: Architecture, dtype: torch.dtype, device: torch.device, max_slots: int, byte_limit: int
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.max_slots, self.byte_limit = max_slots, byte_limit
        self.blocks: list[Block] = []
        self.num_slots = 0

    @property
    def capacity(self) -> int:
        """Positions per slot."""
        return self.blocks[-1].start + self.blocks[-1].size if self.blocks else 0

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.capacity * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        arch = self.arch
        return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * self.dtype.itemsize

    def fits(self, slots: int, length: int) -> bool:
        """Whether storage for so many slots of this length is within the limit."""
        return slots * max(self.capacity, length) * self.bytes_per_token <= self.byte_limit

    def ensure_slots(self, count: int) -> None:
        """Have at least ``count`` slots (doubling, as far as the limits allow)."""
        assert count <= self.max_slots
        if count > self.num_slots:
            target = min(self.max_slots, max(count, 2 * self.num_slots, _FIRST_SLOTS))
            affordable = self.byte_limit // (max(self.capacity, BLOCK) * self.bytes_per_token)
            self._resize(max(count, min(target, affordable)))

    def keep_slots(self, count: int) -> None:
        """Drop the slots from ``count`` on."""
        if count < self.num_slots:
            self._resize(count)

    def ensure_length(self, length: int) -> None:
        """Have at least ``length`` positions per slot."""
        while self.capacity < length:
            start, size = self.capacity, block_size(self.capacity)
            self.blocks.append(Block(start, size, self._allocate(size), self._allocate(size)))

    def plan_write(self, slots: np.ndarray, positions: np.ndarray) -> WritePlan:
        """Where tokens at (slot, position), int64 [tokens] each, go. The cache reaches all positions."""
        starts = np.array([block.start for block in self.blocks])
        owners = np.searchsorted(starts, positions, side="right") - 1
        heads = np.arange(self.arch.num_kv_heads)
        parts = []
        for owner in np.unique(owners):
            block = self.blocks[owner]
            rows = np.flatnonzero(owners == owner)
            within = (positions[rows] - block.start)[:, None]
            index = (slots[rows, None] * len(heads) + heads) * block.size + within
            chosen = None if len(rows) == len(positions) else torch.from_numpy(rows).to(self.device)
            parts.append((block, chosen, torch.from_numpy(index.reshape(-1)).to(self.device)))
        return WritePlan(parts)

    def read(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence, [kv_heads, length, head_dim] each (a copy where several blocks hold it)."""
        used = [(block, count) for block in self.blocks if (count := block.used(length))]
        keys = [block.keys[layer, slot, :, :count] for block, count in used]
        values = [block.values[layer, slot, :, :count] for block, count in used]
        return (keys[0], values[0]) if len(used) == 1 else (torch.cat(keys, dim=1), torch.cat(values, dim=1))

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for block in self.blocks:
            if count := block.used(length):
                for storage in (block.keys, block.values):
                    storage[:, target, :, :count] = storage[:, source, :, :count]

    @torch.inference_mode()
    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots, of which the first ``length_*`` positions matter."""
        for block in self.blocks:
            if count := max(block.used(length_a), block.used(length_b)):
                for storage in (block.keys, block.values):
                    kept = storage[:, a, :, :count].clone()
                    storage[:, a, :, :count] = storage[:, b, :, :count]
                    storage[:, b, :, :count] = kept

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zero a slot, after numbers that are not finite were written to it."""
        for block in self.blocks:
            block.keys[:, slot].zero_()
            block.values[:, slot].zero_()

    def release(self) -> None:
        """Give the memory back; it is allocated again as needed."""
        self.blocks, self.num_slots = [], 0

    @torch.inference_mode()
    def _allocate(self, size: int) -> torch.Tensor:
        arch = self.arch
        shape = (arch.num_layers, self.num_slots, arch.num_kv_heads, size, arch.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def _resize(self, slots: int) -> None:
        kept, self.num_slots = min(slots, self.num_slots), slots
        for block in self.blocks:
            old_keys, old_values = block.keys, block.values
            block.keys, block.values = self._allocate(block.size), self._allocate(block.size)
            block.keys[:, :kept], block.values[:, :kept] = old_keys[:, :kept], old_values[:, :kept]


def block_size(start: int) -> int:
    """Size of the block that begins at ``start``: a quarter of what lies before it, in powers of two, at least `BLOCK`.

    Example:
        >>> [block_size(start) for start in (0, 192, 256, 512, 1024)]
        [64, 64, 64, 128, 256]
    """
    return max(BLOCK, 1 << max(0, (start // 4).bit_length() - 1))
