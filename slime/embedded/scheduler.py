"""Continuous batching: each step chooses sequences to prefill, to decode and to finish.

    submit ─► waiting ─(slot)─► prefill ─(all tokens computed)─► running ─► finished
                 ▲                                                  │
                 └───────────────── retract ────────────────────────┘

A step admits waiting sequences while there are free slots, prefills at most ``prefill_tokens``
tokens of several prompts in one packed forward pass, and decodes one token for every running
sequence. A finished sequence leaves in the step that ends it.

Waiting sequences with the same prompt and adapter are *followers* of the first one. Only the first
is prefilled; followers copy its keys and values and are sampled from the same logits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from slime.embedded.attention import DecodeAttention, PrefillAttention
from slime.embedded.images import FeatureCache, SeenImages
from slime.embedded.kv_cache import KVCache, SlotTable, common_prefix
from slime.embedded.low_rank import AdaptedRows
from slime.embedded.model import Attend
from slime.embedded.sampler import sample, token_logprobs
from slime.embedded.sequence import RoutedExperts, Sequence, SequenceStatus, rows_of
from slime.embedded.states import PrefillChunk
from slime.embedded.weights import WeightStore
from slime.models.delta_rule import CHUNK

#: A sequence waits for another's prefill when they share at least this many tokens.
_WORTH_WAITING = 16
#: Input log-probs are computed in pieces of this many rows, to avoid full [tokens, vocab] logits.
_LOGIT_ROWS = 64


@dataclass
class StepOutput:
    """Sequences that ended in a step, and unfinished streaming sequences with new tokens."""

    finished: list[Sequence] = field(default_factory=list)
    progressed: list[Sequence] = field(default_factory=list)


@dataclass
class Counters:
    """Sums since the start, for load reports."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Single-threaded; every method is called by the engine thread.

    Args:
        prefill_tokens: maximum of prompt tokens computed between two decode steps.
        deterministic: results of a sequence do not depend on other sequences (see `Linear` and
            `attention`).
        record_experts: record the experts of each token, if the model has experts.
    """

    def __init__(
        self,
        store: WeightStore,
        cache: KVCache,
        prefill_tokens: int,
        deterministic: bool,
        record_experts: bool = False,
    ) -> None:
        self.store = store
        self.cache = cache
        self._recorded = cache.arch.experts if record_experts else None
        self.prefill_tokens = prefill_tokens
        self.deterministic = deterministic
        self.slots = SlotTable(cache, reuse_decoded=not deterministic)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.counters = Counters()
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._leader_of_prompt: dict[tuple[int, bytes], Sequence] = {}
        self._done: list[Sequence] = []
        self._features = FeatureCache()
        # positions at which waiting sequences branch off, for models whose layers keep states
        self._branches: dict[Sequence, set[int]] = {}

    # -- requests ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.slots.num_running or self._done)

    @property
    def num_active(self) -> int:
        """The number of sequences that hold a slot."""
        return self.slots.num_owned

    @property
    def num_running_tokens(self) -> int:
        return sum(sequence.length for sequence in self.slots.running)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if self._recorded is not None:
                sequence.experts = RoutedExperts(self._recorded.in_layer, self._recorded.chosen)
            self.waiting.append(sequence)

    def abort(self, chosen: Iterable[Sequence], message: str) -> None:
        """End sequences with their current output, as part of the next step's output."""
        for sequence in chosen:
            if sequence.status is SequenceStatus.FINISHED:
                continue
            self._remove(sequence)
            sequence.abort(message)
            self._finish(sequence)

    def everything(self) -> list[Sequence]:
        """Return all sequences that are not finished."""
        return [*self.slots.running, *self.prefilling, *self.waiting]

    def retract_all(self) -> None:
        """Move all sequences back to the queue. They keep their tokens; keys and values are
        recomputed later."""
        for sequence in reversed([*self.slots.running, *self.prefilling]):
            self._retract(sequence)

    def flush(self) -> None:
        """Drop all cached prefixes."""
        self.slots.flush()

    # -- the step ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Admit, prefill and decode. A sequence gets at most one token from its prefill and one
        from decoding."""
        before = {id(s): len(s.output_ids) for s in self.everything() if s.stream}
        deferred = self._admit()
        if self.prefilling:
            self._prefill()
        if deferred:  # their common prefix is in the cache now
            self._admit()
            if self.prefilling:  # empty if memory did not suffice to admit them
                self._prefill()
        if self.slots.num_running:
            self._decode()
        done = self.take_finished()
        live = [
            s for s in self.slots.running if s.stream and len(s.output_ids) > before.get(id(s), 0)
        ]
        return StepOutput(done, live)

    def take_finished(self) -> list[Sequence]:
        """Return the sequences that ended since the last call (aborts happen outside of steps,
        too)."""
        done = self._done
        self._done = []
        return done

    def _admit(self) -> bool:
        """Give slots to waiting sequences; return True if some are deferred until a shared prefix
        is computed."""
        deferred: list[Sequence] = []
        while self.waiting and self.num_active + len(deferred) < self.cache.max_slots:
            sequence = self.waiting[0]
            if self.num_active and not self.cache.fits(self.num_active + 1, sequence.length + 1):
                break
            self.waiting.popleft()
            if self._should_defer(sequence):
                sequence.deferred = True
                deferred.append(sequence)
            else:
                self._place(sequence)
        self.waiting.extendleft(reversed(deferred))
        return bool(deferred)

    def _should_defer(self, sequence: Sequence) -> bool:
        """Tell whether a different prompt that is being prefilled shares a long prefix with this
        sequence."""
        if sequence.deferred or not self.prefilling:
            return False
        tokens = sequence.distinct_tokens()
        if _prompt_key(sequence) in self._leader_of_prompt:
            return False
        found = False
        for other in self._leader_of_prompt.values():
            if other.adapter is not sequence.adapter:
                continue
            shared = common_prefix(tokens, other.distinct_tokens()[: len(other.prompt)])
            if self.cache.states is None:
                found = found or shared >= _WORTH_WAITING
            elif shared - other.num_computed >= CHUNK:
                self._branches.setdefault(other, set()).add(shared)
                found = True
        return found

    def _place(self, sequence: Sequence) -> None:
        """Give a sequence a slot with its longest cached prefix, or make it a follower."""
        if not sequence.times.started:
            sequence.times.started = time.monotonic()
        self._ensure_length(sequence.length + 1)
        tokens = sequence.distinct_tokens()
        epoch = self.store.epoch
        leader = self._leader_of_prompt.get(_prompt_key(sequence))
        if (
            leader is not None
            and sequence.logprob_start is None
            and self.slots.epoch_of(leader) == epoch
        ):
            self._followers.setdefault(leader, []).append(sequence)
            source = length = 0
        else:
            limit = len(tokens) - 1
            if sequence.logprob_start is not None:
                limit = min(limit, sequence.logprob_start + len(sequence.input_logprobs))
            source, length = self.slots.find_prefix(tokens, limit, epoch, sequence.adapter_key)
            self._leader_of_prompt.setdefault(_prompt_key(sequence), sequence)
        self.slots.acquire(sequence, source, length, epoch)
        sequence.num_computed = length
        self._count_cached(sequence, length)
        sequence.status = SequenceStatus.PREFILL
        self.prefilling.append(sequence)

    def _prefill(self) -> None:
        begin = time.monotonic()
        chunks = self._choose_chunks()
        slots = [self.slots.slot_of(sequence) for sequence, _ in chunks]
        spans = []
        offset = 0
        for (sequence, count), slot in zip(chunks, slots):
            keep = self._states_to_keep(sequence, count)
            start = sequence.num_computed
            blocks = self._blocks(sequence, start, start + count)
            spans.append(PrefillChunk(slot, start, count, offset, keep, blocks))
            offset += count
        hidden = self._forward_prefill(chunks, spans)
        seconds = time.monotonic() - begin
        complete: list[Sequence] = []
        rows: list[int] = []
        for (sequence, count), span in zip(chunks, spans):
            self._collect_input_logprobs(sequence, span, hidden)
            sequence.num_computed += count
            sequence.times.prefill += seconds
            self.slots.record(sequence, sequence.num_computed, self.store.epoch)
            if sequence.num_to_compute == 0:
                group = [sequence, *self._copy_to_followers(sequence)]
                complete += group
                rows += [span.offset + count - 1] * len(group)
        self.counters.prefilled_tokens += offset
        if complete:
            self._start(complete, hidden[rows])

    def _choose_chunks(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of tokens) to prefill, oldest first; the last may be partial."""
        followers = {id(f) for group in self._followers.values() for f in group}
        chunks: list[tuple[Sequence, int]] = []
        budget = self.prefill_tokens
        for sequence in self.prefilling:
            if budget and id(sequence) not in followers:
                count = min(sequence.num_to_compute, budget)
                if self.cache.states is not None and count < sequence.num_to_compute:
                    count -= (sequence.num_computed + count) % CHUNK
                    if count <= 0 and chunks:
                        break
                    if count <= 0:  # the least that keeps the chunks where they are
                        count = min(sequence.num_to_compute, CHUNK - sequence.num_computed % CHUNK)
                end = sequence.num_computed + count
                for _, last in self._blocks(sequence, end - 1, end):
                    count = last - sequence.num_computed  # attention needs all of an image
                chunks.append((sequence, count))
                budget = max(0, budget - count)
        return chunks

    def _blocks(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (start, end) of the images between two positions whose tokens attend to each other
        in both directions."""
        vision = self.cache.arch.spec.vision
        if sequence.images is None or vision is None or not vision.kind.bidirectional:
            return ()
        return sequence.images.blocks(start, end)

    def _states_to_keep(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Choose positions in the next ``count`` tokens at which to keep a copy of the state: where
        waiting sequences branch off, and near the end of the prompt, for sequences that repeat it.
        States exist only at chunk boundaries.
        """
        if self.cache.states is None:
            return ()
        start = sequence.num_computed
        end = start + count
        wanted = {branch for branch in self._branches.get(sequence, ()) if branch <= end}
        if end == sequence.length:
            wanted.add(end - 1)
            self._branches.pop(sequence, None)
        borders = {start + (position - start) // CHUNK * CHUNK for position in wanted}
        if end < sequence.length <= end + CHUNK:  # the rest of the prompt has no border of its own
            borders.add(end)
        return tuple(sorted(border for border in borders if border > start))

    def _forward_prefill(
        self, chunks: list[tuple[Sequence, int]], spans: list[PrefillChunk]
    ) -> torch.Tensor:
        device = self.cache.device
        ids = torch.cat(
            [
                torch.from_numpy(s.tokens()[s.num_computed : s.num_computed + count])
                for s, count in chunks
            ]
        )
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        attend = PrefillAttention(self.cache, spans, self.deterministic)
        places = [(sequence, span.start, span.count) for (sequence, _), span in zip(chunks, spans)]
        hidden = self._forward(ids.to(device), positions.to(device), attend, places)
        for number, ((sequence, _), span) in enumerate(zip(chunks, spans)):
            if attend.states is not None and span.keep:
                copies = attend.states.copies(number)
                if span.start + span.count in span.keep:
                    copies[span.start + span.count] = attend.states.cache.take(span.slot)
                self.slots.keep_states(sequence, copies)
        return hidden

    def _start(self, sequences: list[Sequence], hidden: torch.Tensor) -> None:
        """Sample the first token of sequences whose prefill is complete, and let them decode."""
        for sequence in sequences:
            self.prefilling.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.slots.start_running(sequence)
        wanting = [row for row, s in enumerate(sequences) if s.max_new_tokens > len(s.output_ids)]
        for sequence in sequences:
            if sequence.max_new_tokens == 0:
                sequence.finish({"type": "length", "length": 0})
                self._leave(sequence)
        if wanting:
            self._sample([sequences[row] for row in wanting], hidden[wanting])

    def _decode(self) -> None:
        self._ensure_length(max(s.length for s in self.slots.running))
        running = self.slots.running  # after making room: some may have been retracted
        lengths = [s.length for s in running]
        device = self.cache.device
        ids = torch.tensor([s.output_ids[-1] for s in running], device=device)
        positions = torch.tensor(lengths, device=device) - 1
        attend = DecodeAttention(self.cache, lengths, self.deterministic)
        places = [(sequence, length - 1, 1) for sequence, length in zip(running, lengths)]
        hidden = self._forward(ids, positions, attend, places)
        for sequence, length in zip(running, lengths):
            sequence.num_computed = length
        self.slots.note_lengths(lengths)
        self._sample(running, hidden)
        self.counters.decoded_tokens += len(running)

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        places: list[tuple[Sequence, int, int]],
    ) -> torch.Tensor:
        """Compute hidden states; ``places`` has the sequence and the positions (first, count) of
        the tokens."""
        adapted = self._adapted([(sequence, count) for sequence, _, count in places])
        axis_positions, seen = self._images(places)
        forward = partial(
            self.store.model.forward, adapted=adapted, axis_positions=axis_positions, seen=seen
        )
        if self._recorded is None:
            return forward(ids, positions, attend)
        chosen: list[torch.Tensor] = []
        hidden = forward(ids, positions, attend, chosen)
        rows = rows_of(chosen)
        offset = 0
        for sequence, start, count in places:
            assert sequence.experts is not None
            sequence.experts.write(start, rows[offset : offset + count])
            offset += count
        return hidden

    def _images(
        self, places: list[tuple[Sequence, int, int]]
    ) -> tuple[torch.Tensor | None, SeenImages | None]:
        """Return rotary positions [3, tokens], None if tokens have one position, and image features
        that replace tokens; None if no sequence has images."""
        if all(sequence.images is None for sequence, _, _ in places):
            return None, None
        vision = self.cache.arch.spec.vision
        assert self.store.tower is not None and vision is not None
        own = [(sequence.images, start, count) for sequence, start, count in places]
        device = self.cache.device
        seen = self._features.see(self.store.tower, self.store.epoch, own, device)
        if not vision.kind.has_axes:
            return None, seen
        axis_positions = np.concatenate(
            [s.axis_positions(start, count) for s, start, count in places], axis=1
        )
        return torch.from_numpy(axis_positions).to(device), seen

    def _adapted(self, places: list[tuple[Sequence, int]]) -> AdaptedRows | None:
        """Return which rows have which adapter, given (sequence, number of its rows)."""
        return AdaptedRows.of(
            [None if s.adapter is None else s.adapter.products for s, _ in places],
            [count for _, count in places],
            self.cache.device,
        )

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor) -> None:
        adapted = self._adapted([(sequence, 1) for sequence in sequences])
        sampled = sample(self.store.model.logits(hidden, adapted), sequences)
        base_version = self.store.version
        for sequence, token, logprob, finite in zip(
            sequences, sampled.tokens, sampled.logprobs, sampled.finite
        ):
            version = sequence.version_of_weights(base_version)
            if finite:
                sequence.append(token, logprob, version)
            else:
                sequence.abort(
                    f"the model gave logits that are not finite (weight version {version})"
                )
            if sequence.status is SequenceStatus.FINISHED:
                self._leave(sequence, clean=finite)

    # -- parts of the step -------------------------------------------------------------------------

    def _collect_input_logprobs(
        self, sequence: Sequence, span: PrefillChunk, hidden: torch.Tensor
    ) -> None:
        """Collect the log-probs of prompt tokens that this chunk's hidden states predict and the
        request wants."""
        if sequence.logprob_start is None:
            return
        first = max(span.start, sequence.logprob_start + len(sequence.input_logprobs))
        last = min(span.start + span.count, len(sequence.prompt) - 1)
        for begin in range(first, last, _LOGIT_ROWS):
            end = min(begin + _LOGIT_ROWS, last)
            offset = span.offset - span.start
            logits = self.store.model.logits(
                hidden[begin + offset : end + offset], self._adapted([(sequence, end - begin)])
            )
            targets = torch.from_numpy(sequence.prompt[begin + 1 : end + 1]).to(logits.device)
            values, tops = token_logprobs(logits, targets, sequence.num_top_logprobs)
            sequence.input_logprobs += values
            sequence.input_top_logprobs += tops

    def _copy_to_followers(self, leader: Sequence) -> list[Sequence]:
        followers = self._followers.pop(leader, [])
        self._forget_leader(leader)
        source = self.slots.slot_of(leader) if followers else -1
        for follower in followers:
            self.cache.copy(source, self.slots.slot_of(follower), leader.num_computed)
            follower.num_computed = leader.num_computed
            if follower.experts is not None and leader.experts is not None:
                follower.experts.write(0, leader.experts.first(leader.num_computed))
            self.slots.record(follower, follower.num_computed, self.store.epoch)
            self.slots.share_states(leader, follower)
            self._count_cached(follower, follower.num_computed - 1)
        return followers

    def _count_cached(self, sequence: Sequence, length: int) -> None:
        if not sequence.num_retractions:
            sequence.num_cached = length
            self.counters.cached_tokens += length

    def _leave(self, sequence: Sequence, clean: bool = True) -> None:
        """Release the slot of a running sequence that is finished."""
        if not clean:
            self.cache.clear_slot(self.slots.slot_of(sequence))
        self.slots.release(sequence, self.store.epoch, retain=clean)
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.final_version = sequence.version_of_weights(self.store.version)
        self._done.append(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or its slot."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            return
        if sequence.status is SequenceStatus.PREFILL:
            self.prefilling.remove(sequence)
            self._promote_follower(sequence)
            for group in self._followers.values():
                if sequence in group:
                    group.remove(sequence)
        self.slots.release(sequence, self.store.epoch)

    def _promote_follower(self, leader: Sequence) -> None:
        """Make the first follower the leader, because the leader leaves before its prefill is
        complete. The prefill starts again."""
        self._forget_leader(leader)
        followers = self._followers.pop(leader, [])
        if followers:
            self._leader_of_prompt[_prompt_key(followers[0])] = followers[0]
            if followers[1:]:
                self._followers[followers[0]] = followers[1:]

    def _forget_leader(self, leader: Sequence) -> None:
        key = _prompt_key(leader)
        self._branches.pop(leader, None)
        if self._leader_of_prompt.get(key) is leader:
            del self._leader_of_prompt[key]

    def _retract(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        sequence.num_retractions += 1
        self.waiting.appendleft(sequence)

    # -- memory ------------------------------------------------------------------------------------

    def _ensure_length(self, length: int) -> None:
        """Grow the cache to ``length`` positions. If memory does not suffice, drop retained
        prefixes, and retract the youngest sequences."""
        if length <= self.cache.capacity:
            return
        if not self.cache.fits(self.cache.num_slots, length):
            while self.slots.num_running > 1 and not self.cache.fits(self.num_active, length):
                self._retract(self.slots.running[-1])
            self.slots.trim(self.num_active)
        self.cache.ensure_length(length)


def _prompt_key(sequence: Sequence) -> tuple[int, bytes]:
    """Return a key; sequences with the same key have the same attention keys and values."""
    return sequence.adapter_key, sequence.distinct_tokens().tobytes()
