"""Who owns which row of the KV cache, and which prefixes lie in it.

    slot:   0 … num_running-1 │ the others, in any order
            running           │ prefilling · retained (finished, kept for their prefix) · free

Decoding takes the first slots as one batch, so this order is kept by moving rows when a sequence starts or ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slime.engines.embedded.kv_cache import KVCache
from slime.engines.embedded.sequence import Sequence

#: Storage may grow to this many bytes to retain prefixes; beyond it the oldest retained prefix makes room.
_RETAIN_BYTES = 1 << 30
_NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass
class Slot:
    """One row of the cache.

    Attributes:
        sequence: its owner, None when retained or free.
        tokens: those whose keys and values are there and may be reused; empty when free.
        experts: what these tokens were sent to, a row of `RoutedExperts` each; None where that is not recorded.
        length: positions that hold something of use (at least ``len(tokens)``).
        epoch: of the weights that computed them.
        last_used: larger is later.
    """

    sequence: Sequence | None = None
    tokens: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    length: int = 0
    epoch: int = -1
    last_used: int = 0
    experts: np.ndarray | None = None

    @property
    def is_free(self) -> bool:
        return self.sequence is None and self.length == 0

    def offer(self, sequence: Sequence, count: int) -> None:
        """Let the first ``count`` tokens of a sequence, which are computed here, be reused."""
        self.tokens = sequence.tokens()[:count]
        self.experts = None if sequence.experts is None else sequence.experts.first(count)


class SlotTable:
    """Assigns slots to sequences.

    Args:
        reuse_decoded: whether keys and values of *sampled* tokens may serve as a prefix (not in deterministic mode,
            where they can differ in the last bit from those that a prefill computes).
    """

    def __init__(self, cache: KVCache, reuse_decoded: bool) -> None:
        self.cache = cache
        self.num_running = 0
        self._reuse_decoded = reuse_decoded
        self._slots: list[Slot] = []
        self._clock = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences of slots 0 … num_running-1, in order."""
        owners = [slot.sequence for slot in self._slots[: self.num_running]]
        assert all(owner is not None for owner in owners)
        return owners  # type: ignore[return-value]

    @property
    def num_owned(self) -> int:
        return sum(slot.sequence is not None for slot in self._slots)

    def slot_of(self, sequence: Sequence) -> int:
        return next(index for index, slot in enumerate(self._slots) if slot.sequence is sequence)

    def epoch_of(self, sequence: Sequence) -> int:
        """Epoch of the weights that its keys and values began with."""
        return self._slots[self.slot_of(sequence)].epoch

    def find_prefix(self, tokens: np.ndarray, limit: int, epoch: int) -> tuple[int, int]:
        """(slot, length) of the longest usable prefix of ``tokens`` up to ``limit``; length 0 when there is none."""
        best, best_length = -1, 0
        for index, slot in enumerate(self._slots):
            bound = min(limit, len(slot.tokens))
            if bound <= best_length or slot.epoch != epoch:
                continue
            length = common_prefix(slot.tokens[:bound], tokens[:bound])
            if length > best_length:
                best, best_length = index, length
        return best, best_length

    def acquire(self, sequence: Sequence, source: int, length: int, epoch: int) -> int:
        """Give a sequence a slot and put the first ``length`` positions of slot ``source`` into it."""
        target = self._room(keep=source if length else -1)
        if length and source != target:
            self.cache.copy(source, target, length)
        self._clock += 1
        tokens, experts = _NO_TOKENS, None
        if length:
            tokens, experts = self._slots[source].tokens[:length], self._slots[source].experts
        self._slots[target] = Slot(sequence, tokens, length, epoch, self._clock, experts)
        if sequence.experts is not None and experts is not None:
            sequence.experts.write(0, experts[:length])
        return target

    def record(self, sequence: Sequence, num_prefilled: int, epoch: int) -> None:
        """A prefill computed the first ``num_prefilled`` tokens of a sequence."""
        slot = self._slots[self.slot_of(sequence)]
        slot.length = num_prefilled
        if slot.epoch == epoch:
            slot.offer(sequence, num_prefilled)

    def note_lengths(self, lengths: list[int]) -> None:
        """How many positions of slots 0 … hold keys and values now."""
        for slot, length in zip(self._slots, lengths):
            slot.length = length

    def start_running(self, sequence: Sequence) -> None:
        """Move a sequence whose prefill is complete behind the running ones."""
        self._swap(self.slot_of(sequence), self.num_running)
        self.num_running += 1

    def release(self, sequence: Sequence, epoch: int, retain: bool = True) -> None:
        """Take the slot from a sequence, keeping what is in it as a prefix."""
        index = self.slot_of(sequence)
        slot = self._slots[index]
        slot.sequence = None
        slot.length = sequence.num_computed
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
        """Forget every retained prefix, and what running sequences offer."""
        for slot in self._slots:
            slot.tokens, slot.experts = _NO_TOKENS, None
            if slot.sequence is None:
                slot.length = 0

    def trim(self, count: int) -> None:
        """Have at most ``count`` slots; at most that many are owned."""
        assert self.num_owned <= count
        self.flush()
        for index in range(len(self._slots) - 1, count - 1, -1):
            if self._slots[index].sequence is not None:
                self._swap(index, next(i for i, slot in enumerate(self._slots) if slot.is_free))
        del self._slots[count:]
        self.cache.keep_slots(count)

    def reset(self) -> None:
        """Forget all slots, after the cache released its memory. Nothing is owned."""
        assert self.num_owned == 0
        self._slots = []

    def _room(self, keep: int) -> int:
        """A free slot: an existing one, a new one, or that of the prefix which was used longest ago."""
        for index, slot in enumerate(self._slots):
            if slot.is_free:
                return index
        retained = [index for index, slot in enumerate(self._slots) if slot.sequence is None and index != keep]
        count = len(self._slots)
        for_prefixes = self.cache.nbytes < _RETAIN_BYTES // 2 and self.cache.fits(count + 1, 0)
        if count < self.cache.max_slots and (for_prefixes or not retained):
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
        slot_a, slot_b = self._slots[a], self._slots[b]
        if slot_a.length and slot_b.length:
            self.cache.swap(a, b, slot_a.length, slot_b.length)
        elif slot_a.length:
            self.cache.copy(a, b, slot_a.length)
        elif slot_b.length:
            self.cache.copy(b, a, slot_b.length)
        self._slots[a], self._slots[b] = slot_b, slot_a


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading entries that two token arrays share.

    Example:
        >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
        2
    """
    bound = min(len(a), len(b))
    if bound == 0 or a[0] != b[0]:
        return 0
    differing = np.flatnonzero(a[:bound] != b[:bound])
    return int(differing[0]) if len(differing) else bound
