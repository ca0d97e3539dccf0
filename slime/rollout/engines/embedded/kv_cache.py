"""Keys and values of all sequences: a fixed row ("slot") per sequence, grown as it is needed.

    keys, values: [layers, slots, kv_heads, capacity, head_dim]

Decoding reads slots 0 … n-1 in place, without gathering; so the scheduler keeps running sequences in the first slots
and moves one when a hole appears. Storage begins at zero: masked positions are multiplied by a weight of 0, which only
finite numbers survive.
"""

from __future__ import annotations

import torch

from slime.rollout.engines.embedded.architecture import Architecture

#: Capacity is a multiple of this, so that attention may round the number of keys up to it.
CAPACITY_STEP = 64
_FIRST_CAPACITY = 128
_FIRST_SLOTS = 8


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
        self.keys = self.values = self._allocate(0, 0)

    @property
    def num_slots(self) -> int:
        return int(self.keys.shape[1])

    @property
    def capacity(self) -> int:
        """Positions per slot."""
        return int(self.keys.shape[3])

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def bytes_per_token(self) -> int:
        arch = self.arch
        return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * self.dtype.itemsize

    def fits(self, slots: int, capacity: int) -> bool:
        """Whether so much storage is within the limit."""
        return slots * capacity * self.bytes_per_token <= self.byte_limit

    def ensure_slots(self, count: int) -> None:
        """Have at least ``count`` slots (doubling, as far as the limits allow)."""
        assert count <= self.max_slots
        if count > self.num_slots:
            capacity = max(self.capacity, _FIRST_CAPACITY)
            target = min(self.max_slots, max(count, 2 * self.num_slots, _FIRST_SLOTS))
            affordable = self.byte_limit // (capacity * self.bytes_per_token)
            self._resize(max(count, min(target, affordable)), capacity)

    def ensure_length(self, length: int) -> None:
        """Have at least ``length`` positions per slot."""
        if length > self.capacity:
            self._resize(self.num_slots, self.grown(length))

    def grown(self, length: int) -> int:
        """The capacity that `ensure_length` gives: growing by half if it fits, in multiples of `CAPACITY_STEP`."""
        generous = _rounded(max(length, self.capacity * 3 // 2, _FIRST_CAPACITY))
        return generous if self.fits(self.num_slots, generous) else _rounded(length)

    def write_index(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of `flat` for tokens at (slot, position): [tokens] × [tokens] → [tokens * kv_heads]."""
        kv_heads = self.arch.num_kv_heads
        heads = torch.arange(kv_heads, device=self.device)
        return ((slots[:, None] * kv_heads + heads) * self.capacity + positions[:, None]).flatten()

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as [slots * kv_heads * capacity, head_dim] views."""
        head_dim = self.arch.head_dim
        return self.keys[layer].view(-1, head_dim), self.values[layer].view(-1, head_dim)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for storage in (self.keys, self.values):
            storage[:, target, :, :length] = storage[:, source, :, :length]

    @torch.inference_mode()
    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots, of which the first ``length_*`` positions matter."""
        for storage in (self.keys, self.values):
            kept = storage[:, a, :, :length_a].clone()
            storage[:, a, :, :length_b] = storage[:, b, :, :length_b]
            storage[:, b, :, :length_a] = kept

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zero a slot, after numbers that are not finite were written to it."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def keep_slots(self, count: int) -> None:
        """Drop the slots from ``count`` on."""
        if count < self.num_slots:
            self._resize(count, self.capacity)

    def release(self) -> None:
        """Give the memory back; it is allocated again by the next `ensure_slots`."""
        self.keys = self.values = self._allocate(0, 0)

    @torch.inference_mode()
    def _allocate(self, slots: int, capacity: int) -> torch.Tensor:
        arch = self.arch
        shape = (arch.num_layers, slots, arch.num_kv_heads, capacity, arch.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def _resize(self, slots: int, capacity: int) -> None:
        old_keys, old_values = self.keys, self.values
        self.keys, self.values = self._allocate(slots, capacity), self._allocate(slots, capacity)
        kept_slots, kept = min(slots, old_keys.shape[1]), old_keys.shape[3]
        self.keys[:, :kept_slots, :, :kept] = old_keys[:, :kept_slots]
        self.values[:, :kept_slots, :, :kept] = old_values[:, :kept_slots]


def _rounded(length: int) -> int:
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP
