"""Keys and values of all sequences: one row ("slot") per sequence, in blocks of positions that are
added as needed.

    position:   0       64      128      192      256      320 …
    block:      │  64   │   64   │   64   │   64   │   64   │ …
                each: keys and values [layers, slots, kv_heads, size, head_dim]
                later blocks are larger, which keeps their number small

Decoding reads slots 0 … n-1 of a block as one contiguous [n * kv_heads, size, head_dim], without a
copy because torch's batched products accept contiguous operands in place. A block is read only for
the sequences that reach it. So the scheduler keeps running sequences in the first slots and moves
one to fill a gap. A longer sequence adds a block without copying. Storage is initially zero: masked
positions have weight 0, and 0 times NaN or infinity would be NaN.

Layers with a window keep only the last positions, in a ring: position p is at p modulo the ring's
size, which is the window's plus `SPARE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from slime.embedded.architecture import Architecture
from slime.embedded.kind import STATE_COPIES
from slime.embedded.sequence import Sequence
from slime.embedded.states import DeltaState, StateCache
from slime.models.mixers import mixer_of

#: Size of the first blocks; every block is a multiple of it.
BLOCK = 64
#: Least number of positions that a ring keeps beyond the window. A prefix can be reused from a
#: sequence that is at most this far beyond it.
SPARE = 256
_FIRST_SLOTS = 8
#: Storage may grow to this many bytes to retain prefixes; then the oldest retained prefix is
#: replaced.
_RETAIN_BYTES = 1 << 30
_NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass
class CacheBlock:
    """Positions ``start`` … ``start + size - 1`` of all slots.

    keys and values are [layers of its kind, slots, kv_heads, size, head_dim].
    """

    start: int
    size: int
    keys: torch.Tensor
    values: torch.Tensor

    def used(self, length: int) -> int:
        """Return the number of positions in the block that a sequence of this length uses."""
        return min(self.size, max(0, length - self.start))


class Place(NamedTuple):
    """The place of a layer in the cache: its number among the layers with a window or among those
    without, and its window. Layers with a state do not use theirs."""

    number: int
    window: int | None


class BlockWrite(NamedTuple):
    """A write of new tokens to one block: these ``rows`` of the tokens (None: all), to the rows
    ``targets`` of the block as [slots * kv_heads * size, head_dim]."""

    block: CacheBlock
    rows: torch.Tensor | None
    targets: torch.Tensor


@dataclass
class WritePlan:
    """The places for new tokens' keys and values.

    Attributes:
        whole: writes of layers that keep all positions.
        windowed: writes of layers that keep a window.
        places: the place of each layer.
    """

    whole: list[BlockWrite]
    windowed: list[BlockWrite]
    places: list[Place]

    def write(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [tokens, kv_heads, head_dim] of layer ``number``."""
        head_dim = keys.shape[-1]
        layer, window = self.places[number]
        for block, rows, targets in self.whole if window is None else self.windowed:
            for stored, new in ((block.keys, keys), (block.values, values)):
                chosen = new if rows is None else new[rows]
                stored[layer].view(-1, head_dim).index_copy_(
                    0, targets, chosen.reshape(-1, head_dim)
                )


class KVCache:
    """Storage for the keys and values of all slots.

    Args:
        max_slots: maximum number of sequences at once.
        byte_limit: storage exceeds it only if a single sequence needs it.
        whole_rings: rings have their full size from the start, so shapes do not depend on other
            sequences.
    Attributes:
        ring: of the layers with a window; None without such layers or storage. It grows with
            ``capacity`` up to ``ring_size``.
        states: of gated delta nets; None for a model without them.
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        byte_limit: int,
        whole_rings: bool = False,
    ) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.max_slots = max_slots
        self.byte_limit = byte_limit
        self.blocks: list[CacheBlock] = []
        self.num_slots = 0
        self.places: list[Place] = []
        self._num_whole = 0
        self._num_windowed = 0
        self.states: StateCache | None = None
        for layer in range(arch.spec.num_layers):
            window = arch.spec.window(layer)
            number = self._num_whole if window is None else self._num_windowed
            self.places.append(Place(number, window))
            if mixer_of(arch.spec.transformer, layer).state is not None:
                self.states = self.states or StateCache(arch.spec, dtype, device)
            elif window is None:
                self._num_whole += 1
            else:
                self._num_windowed += 1
        self._window = max((place.window or 0 for place in self.places), default=0)
        self.ring_size = -(-(self._window + SPARE) // BLOCK) * BLOCK
        self.ring: CacheBlock | None = None
        self._whole_rings = whole_rings

    @property
    def capacity(self) -> int:
        """Return the number of positions per slot."""
        return self.blocks[-1].start + self.blocks[-1].size if self.blocks else 0

    @property
    def nbytes(self) -> int:
        return self.num_slots * self._slot_bytes(self.capacity)

    @property
    def _layer_bytes(self) -> int:
        return 2 * self.arch.num_kv_heads * self.arch.head_dim * self.dtype.itemsize

    def _slot_bytes(self, length: int) -> int:
        """Return the bytes of one slot of this length, including copies of states."""
        kept = self._num_whole * length + self._num_windowed * self._ring_for(length)
        states = 0 if self.states is None else (1 + STATE_COPIES) * self.states.slot_bytes
        return kept * self._layer_bytes + states

    def _ring_for(self, length: int) -> int:
        """Return the size of the ring for slots with this many positions."""
        return self.ring_size if self._whole_rings else min(length, self.ring_size)

    def keeps(self, length: int, written: int) -> bool:
        """Tell whether a slot written up to position ``written`` still has all keys that a token at
        position ``length`` sees."""
        first_seen = max(0, length - self._window + 1)
        return not self._num_windowed or first_seen >= written - self.ring_size

    def fits(self, slots: int, length: int) -> bool:
        """Tell whether storage for this many slots of this length is within the limit."""
        return slots * self._slot_bytes(max(self.capacity, length)) <= self.byte_limit

    def ensure_slots(self, count: int) -> None:
        """Provide at least ``count`` slots, doubling the number if the limits allow."""
        assert count <= self.max_slots
        if count > self.num_slots:
            target = min(self.max_slots, max(count, 2 * self.num_slots, _FIRST_SLOTS))
            affordable = self.byte_limit // self._slot_bytes(max(self.capacity, BLOCK))
            self._resize(max(count, min(target, affordable)))

    def keep_slots(self, count: int) -> None:
        """Drop the slots from ``count`` on."""
        if count < self.num_slots:
            self._resize(count)

    def ensure_length(self, length: int) -> None:
        """Provide at least ``length`` positions per slot."""
        while self.capacity < length:
            start = self.capacity
            size = block_size(self.capacity)
            self.blocks.append(self._new_block(start, size))
        self._grow_ring()

    def plan_write(self, slots: np.ndarray, positions: np.ndarray) -> WritePlan:
        """Plan a write of tokens at (slot, position), int64 [tokens] each. The cache must contain
        all positions."""
        plan = WritePlan([], [], self.places)
        if self.ring is not None:
            last = np.full(self.num_slots, -1)
            np.maximum.at(last, slots, positions)
            kept = positions > last[slots] - self.ring.size  # only the last part of a long prompt
            rows = np.flatnonzero(kept)
            plan.windowed.append(self._write(self.ring, slots, positions % self.ring.size, rows))
        if self._num_whole:
            starts = np.array([block.start for block in self.blocks])
            owners = np.searchsorted(starts, positions, side="right") - 1
            for owner in np.unique(owners):
                block = self.blocks[owner]
                rows = np.flatnonzero(owners == owner)
                plan.whole.append(self._write(block, slots, positions - block.start, rows))
        return plan

    def _write(
        self, block: CacheBlock, slots: np.ndarray, within: np.ndarray, rows: np.ndarray
    ) -> BlockWrite:
        """Plan the write of some rows of a batch to the places ``within`` a block."""
        heads = np.arange(self.arch.num_kv_heads)
        index = (slots[rows, None] * len(heads) + heads) * block.size + within[rows][:, None]
        chosen = None if len(rows) == len(slots) else torch.from_numpy(rows).to(self.device)
        return BlockWrite(block, chosen, torch.from_numpy(index.reshape(-1)).to(self.device))

    def read_window(
        self, number: int, slot: int, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions ``first`` to ``last - 1`` of one sequence in a layer
        with a window, a copy [kv_heads, last - first, head_dim] each. Positions that the ring has
        lost contain later ones."""
        assert self.ring is not None
        layer = self.places[number].number
        index = torch.arange(first, last, device=self.device) % self.ring.size
        return self.ring.keys[layer, slot][:, index], self.ring.values[layer, slot][:, index]

    def read(self, number: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one sequence in a layer without a window, [kv_heads, length,
        head_dim] each (a copy if several blocks hold it)."""
        layer = self.places[number].number
        used = [(block, count) for block in self.blocks if (count := block.used(length))]
        keys = [block.keys[layer, slot, :, :count] for block, count in used]
        values = [block.values[layer, slot, :, :count] for block, count in used]
        if len(used) == 1:
            return keys[0], values[0]
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another, and its whole ring and live
        state."""
        if self.states is not None:
            self.states.copy(source, target)
        if self.ring is not None:
            for storage in (self.ring.keys, self.ring.values):
                storage[:, target] = storage[:, source]
        for block in self.blocks:
            if count := block.used(length):
                for storage in (block.keys, block.values):
                    storage[:, target, :, :count] = storage[:, source, :, :count]

    @torch.inference_mode()
    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots, of which the first ``length_*`` positions matter."""
        if self.states is not None:
            self.states.swap(a, b)
        if self.ring is not None:
            for storage in (self.ring.keys, self.ring.values):
                storage[:, [a, b]] = storage[:, [b, a]]
        for block in self.blocks:
            if count := max(block.used(length_a), block.used(length_b)):
                for storage in (block.keys, block.values):
                    kept = storage[:, a, :, :count].clone()
                    storage[:, a, :, :count] = storage[:, b, :, :count]
                    storage[:, b, :, :count] = kept

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zero a slot that contains non-finite numbers."""
        if self.states is not None:
            self.states.clear(slot)
        for block in [*self.blocks, *([self.ring] if self.ring else [])]:
            block.keys[:, slot].zero_()
            block.values[:, slot].zero_()

    def release(self) -> None:
        """Free the memory; it is allocated again as needed."""
        self.blocks = []
        self.ring = None
        self.num_slots = 0
        if self.states is not None:
            self.states.resize(0)

    @torch.inference_mode()
    def _new_block(self, start: int, size: int, layers: int | None = None) -> CacheBlock:
        arch = self.arch
        count = self._num_whole if layers is None else layers
        shape = (count, self.num_slots, arch.num_kv_heads, size, arch.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return CacheBlock(start, size, keys, values)

    @torch.inference_mode()
    def _grow_ring(self) -> None:
        """Enlarge the ring according to the capacity. A smaller ring has not wrapped around yet, so
        each position keeps its place."""
        size = self._ring_for(self.capacity)
        if not self._num_windowed or (self.ring is not None and self.ring.size >= size):
            return
        before = self.ring
        self.ring = self._new_block(0, size, self._num_windowed)
        if before is not None:
            self.ring.keys[:, :, :, : before.size] = before.keys
            self.ring.values[:, :, :, : before.size] = before.values

    @torch.inference_mode()
    def _resize(self, slots: int) -> None:
        kept = min(slots, self.num_slots)
        self.num_slots = slots
        if self.states is not None:
            self.states.resize(slots)
        for block in [*self.blocks, *([self.ring] if self.ring else [])]:
            new = self._new_block(block.start, block.size, len(block.keys))
            new.keys[:, :kept] = block.keys[:, :kept]
            new.values[:, :kept] = block.values[:, :kept]
            block.keys = new.keys
            block.values = new.values


def block_size(start: int) -> int:
    """Return the size of the block that begins at ``start``: a quarter of ``start``, rounded to a
    power of two, at least `BLOCK`.

    Example:
        >>> [block_size(start) for start in (0, 192, 256, 512, 1024)]
        [64, 64, 64, 128, 256]
    """
    return max(BLOCK, 1 << max(0, (start // 4).bit_length() - 1))


# -- who owns which slot ---------------------------------------------------------------------------


@dataclass
class Slot:
    """One row of the cache.

    Attributes:
        sequence: its owner, None when retained or free.
        tokens: tokens whose keys and values are in the slot and may be reused; empty when free.
        experts: the experts of these tokens, a row of `RoutedExperts` each; None if not recorded.
        length: number of positions in use (at least ``len(tokens)``).
        written: number of positions ever written, from which follows what rings have lost.
        epoch: epoch of the weights that computed the tokens' keys and values.
        last_used: larger is later.
        adapter: key of the adapter that also computed them; 0 for only the base.
        state_at: tokens that the live state of gated delta nets has seen.
        states: number of tokens seen → copy of the state, the oldest first.
    """

    sequence: Sequence | None = None
    tokens: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    length: int = 0
    written: int = 0
    epoch: int = -1
    last_used: int = 0
    experts: np.ndarray | None = None
    adapter: int = 0
    state_at: int = 0
    states: dict[int, DeltaState] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        return self.sequence is None and self.length == 0

    def offer(self, sequence: Sequence, count: int) -> None:
        """Allow reuse of the first ``count`` tokens of the slot's sequence."""
        self.tokens = sequence.distinct_tokens()[:count]
        self.experts = None if sequence.experts is None else sequence.experts.first(count)


class SlotTable:
    """Assigns slots to sequences.

    Args:
        reuse_decoded: whether keys and values of *sampled* tokens may be reused as a prefix (not in
            deterministic mode: they can differ in the last bit from those of a prefill).
    """

    def __init__(self, cache: KVCache, reuse_decoded: bool) -> None:
        self.cache = cache
        self.num_running = 0
        self._reuse_decoded = reuse_decoded
        self._slots: list[Slot] = []
        self._clock = 0

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences of slots 0 … num_running-1, in order."""
        owners = [slot.sequence for slot in self._slots[: self.num_running]]
        assert all(owner is not None for owner in owners)
        return owners  # type: ignore[return-value]

    @property
    def num_owned(self) -> int:
        return sum(slot.sequence is not None for slot in self._slots)

    def slot_of(self, sequence: Sequence) -> int:
        return next(index for index, slot in enumerate(self._slots) if slot.sequence is sequence)

    def epoch_of(self, sequence: Sequence) -> int:
        """Return the epoch of the weights that computed its first keys and values."""
        return self._slots[self.slot_of(sequence)].epoch

    def find_prefix(
        self, tokens: np.ndarray, limit: int, epoch: int, adapter: int
    ) -> tuple[int, int]:
        """Return (slot, length) of the longest usable prefix of ``tokens`` up to ``limit`` from the
        same weights and adapter; length 0 if there is none."""
        best = -1
        best_length = 0
        for index, slot in enumerate(self._slots):
            bound = min(limit, len(slot.tokens))
            if bound <= best_length or slot.epoch != epoch or slot.adapter != adapter:
                continue
            length = common_prefix(slot.tokens[:bound], tokens[:bound])
            if self.cache.states is not None:
                length = self._with_state(slot, length)
            if length > best_length and self.cache.keeps(length, slot.written):
                best = index
                best_length = length
        return best, best_length

    def _with_state(self, slot: Slot, length: int) -> int:
        """Return the number of tokens that a slot's longest state up to ``length`` has seen; 0
        without one.

        Deterministic mode allows only multiples of a chunk, so the following tokens have the same
        chunks in every batch.
        """
        known = [*slot.states, slot.state_at]
        if not self._reuse_decoded:
            known = [position for position in known if position % BLOCK == 0]
        return max((position for position in known if position <= length), default=0)

    def acquire(self, sequence: Sequence, source: int, length: int, epoch: int) -> int:
        """Assign a slot to a sequence, and copy the first ``length`` positions of slot ``source``
        to it."""
        target = self._find_slot(keep=source if length else -1)
        if length and source != target:
            self.cache.copy(source, target, length)
        self._clock += 1
        acquired = Slot(
            sequence,
            length=length,
            epoch=epoch,
            last_used=self._clock,
            adapter=sequence.adapter_key,
            state_at=length,
        )
        if length:
            prefix = self._slots[source]
            acquired.tokens = prefix.tokens[:length]
            acquired.written = prefix.written
            acquired.experts = prefix.experts
            acquired.states = {at: kept for at, kept in prefix.states.items() if at <= length}
            if self.cache.states is not None and prefix.state_at != length:
                self.cache.states.put(target, acquired.states[length])
        self._slots[target] = acquired
        if sequence.experts is not None and acquired.experts is not None:
            sequence.experts.write(0, acquired.experts[:length])
        return target

    def record(self, sequence: Sequence, num_prefilled: int, epoch: int) -> None:
        """Record that a prefill computed the first ``num_prefilled`` tokens of a sequence."""
        slot = self._slots[self.slot_of(sequence)]
        slot.length = num_prefilled
        slot.state_at = num_prefilled
        slot.written = max(slot.written, num_prefilled)
        if slot.epoch == epoch:
            slot.offer(sequence, num_prefilled)

    def note_lengths(self, lengths: list[int]) -> None:
        """Record the number of positions with keys and values in slots 0 …."""
        for slot, length in zip(self._slots, lengths):
            slot.length = length
            slot.state_at = length
            slot.written = max(slot.written, length)

    def keep_states(self, sequence: Sequence, states: Mapping[int, DeltaState]) -> None:
        """Keep copies of a sequence's states, from which others can continue; drop the oldest
        copies."""
        kept = self._slots[self.slot_of(sequence)].states
        kept.update(states)
        while len(kept) > STATE_COPIES:
            del kept[next(iter(kept))]

    def share_states(self, source: Sequence, target: Sequence) -> None:
        """Keep the copies of one sequence also for another with the same tokens, whose slot is a
        copy: its rings have lost the keys that the source's have lost."""
        copied = self._slots[self.slot_of(source)]
        self._slots[self.slot_of(target)].written = copied.written
        self.keep_states(target, copied.states)

    def start_running(self, sequence: Sequence) -> None:
        """Move a sequence with a complete prefill to the end of the running ones."""
        self._swap(self.slot_of(sequence), self.num_running)
        self.num_running += 1

    def release(self, sequence: Sequence, epoch: int, retain: bool = True) -> None:
        """Release the slot of a sequence, retaining its contents as a prefix."""
        index = self.slot_of(sequence)
        slot = self._slots[index]
        slot.sequence = None
        slot.length = sequence.num_computed
        slot.written = max(slot.written, slot.length)
        if self._reuse_decoded and slot.epoch == epoch:
            slot.offer(sequence, sequence.num_computed)
        self._clock += 1
        slot.last_used = self._clock
        if slot.epoch != epoch or not retain:
            self._slots[index] = slot = Slot()
        slot.length = len(slot.tokens)
        if index < self.num_running:
            self.num_running -= 1
            self._swap(index, self.num_running)

    def flush(self) -> None:
        """Drop every retained prefix, and those that running sequences offer."""
        for slot in self._slots:
            slot.tokens = _NO_TOKENS
            slot.experts = None
            slot.states = {}
            if slot.sequence is None:
                slot.length = 0

    def trim(self, count: int) -> None:
        """Reduce to at most ``count`` slots; at most this many may be owned."""
        assert self.num_owned <= count
        self.flush()
        for index in range(len(self._slots) - 1, count - 1, -1):
            if self._slots[index].sequence is not None:
                self._swap(index, next(i for i, slot in enumerate(self._slots) if slot.is_free))
        del self._slots[count:]
        self.cache.keep_slots(count)

    def reset(self) -> None:
        """Drop all slots, after the cache released its memory. None may be owned."""
        assert self.num_owned == 0
        self._slots = []

    def _find_slot(self, keep: int) -> int:
        """Return a free slot, a new one, or that of the least recently used prefix other than
        ``keep``."""
        for index, slot in enumerate(self._slots):
            if slot.is_free:
                return index
        retained = [
            index
            for index, slot in enumerate(self._slots)
            if slot.sequence is None and index != keep
        ]
        count = len(self._slots)
        can_retain = self.cache.nbytes < _RETAIN_BYTES // 2 and self.cache.fits(count + 1, 0)
        if count < self.cache.max_slots and (can_retain or not retained):
            self.cache.ensure_slots(count + 1)
            self._slots += [Slot() for _ in range(self.cache.num_slots - count)]
            return count
        if not retained:
            assert keep >= 0, "more sequences than slots"
            return keep  # the prefix itself is continued in place
        return min(retained, key=lambda index: self._slots[index].last_used)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        slot_a = self._slots[a]
        slot_b = self._slots[b]
        if slot_a.length and slot_b.length:
            self.cache.swap(a, b, slot_a.length, slot_b.length)
        elif slot_a.length:
            self.cache.copy(a, b, slot_a.length)
        elif slot_b.length:
            self.cache.copy(b, a, slot_b.length)
        self._slots[a] = slot_b
        self._slots[b] = slot_a


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading entries that two token arrays share.

    Example:
        >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
        2
    """
    bound = min(len(a), len(b))
    if bound == 0 or a[0] != b[0]:
        return 0
    differing = np.flatnonzero(a[:bound] != b[:bound])
    return int(differing[0]) if len(differing) else bound
