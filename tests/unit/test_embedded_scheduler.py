"""Batching changes nothing: alone or together, cut, aborted, retracted or with a shared prefix,
same tokens."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.embedded.kv_cache import common_prefix
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence, SequenceStatus
from tests.support.embedded_models import (
    bytes_per_token,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
    torch_threads,
)

PROMPTS = [
    [3, 1, 4, 1, 5],
    list(range(60, 100)),
    [7] * 70,
    [250, 2],
    list(range(60, 130)),
    [9, 8, 7, 6],
    [3, 1, 4, 1],
]
LENGTHS = [9, 40, 3, 25, 12, 70, 1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def seven() -> list[Sequence]:
    return [
        make_sequence(prompt, rid=str(i), max_new_tokens=length, sampling_seed=i, temperature=0.9)
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS))
    ]


@functools.cache
def alone(directory: Path, deterministic: bool = False) -> list[Sequence]:
    """What several tests compare with; they change nothing in it."""
    sequences = seven()
    for sequence in sequences:
        run(make_scheduler(directory, deterministic=deterministic), [sequence])
    return sequences


def assert_same(ours: list[Sequence], theirs: list[Sequence]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.output_ids == b.output_ids
        assert a.output_logprobs == pytest.approx(b.output_logprobs, abs=1e-4)


@pytest.mark.parametrize(("max_slots", "prefill_tokens"), [(2, 2048), (3, 16), (8, 16)])
def test_together_equals_alone(directory: Path, max_slots: int, prefill_tokens: int) -> None:
    together = seven()
    scheduler = make_scheduler(directory, max_slots=max_slots, prefill_tokens=prefill_tokens)
    run(scheduler, together)
    assert_same(together, alone(directory))
    assert scheduler.num_active == 0


def test_a_finished_sequence_leaves_at_once(directory: Path) -> None:
    sequences = seven()
    ended = run(make_scheduler(directory), sequences)
    assert [s.max_new_tokens for s in ended] == sorted(LENGTHS)


# -- deterministic mode: bit for bit ---------------------------------------------------------------


def bits(sequences: list[Sequence]) -> list[tuple[list[int], list[float]]]:
    return [(s.output_ids, s.output_logprobs) for s in sequences]


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("bfloat16", 2)])
def test_deterministic_mode_is_bit_identical(directory: Path, dtype: str, threads: int) -> None:
    with torch_threads(threads):
        expected = []
        for sequence in seven():
            run(make_scheduler(directory, deterministic=True, dtype=dtype), [sequence])
            expected += bits([sequence])
        for order_seed, max_slots, prefill_tokens in ((0, 8, 2048), (1, 3, 33)):
            together = seven()
            scheduler = make_scheduler(
                directory,
                deterministic=True,
                dtype=dtype,
                max_slots=max_slots,
                prefill_tokens=prefill_tokens,
            )
            run(scheduler, random.Random(order_seed).sample(together, len(together)))
            assert bits(together) == expected


def test_deterministic_mode_with_other_arrival_times_and_warm_prefixes(directory: Path) -> None:
    expected = bits(alone(directory, deterministic=True))
    scheduler = make_scheduler(directory, deterministic=True)
    run(scheduler, seven())  # leaves its prompts behind
    sequences = seven()
    for sequence in sequences:
        scheduler.submit([sequence])
        for _ in range(3):
            scheduler.step()
    run(scheduler, [])
    assert bits(sequences) == expected
    assert any(s.num_cached > 0 for s in sequences)


# -- prefixes --------------------------------------------------------------------------------------


def test_a_group_is_prefilled_once(directory: Path) -> None:
    prompt = list(range(100, 150))
    group = [make_sequence(prompt, rid=str(i), sampling_seed=i, temperature=1.5) for i in range(6)]
    scheduler = make_scheduler(directory)
    run(scheduler, group)
    assert scheduler.counters.prefilled_tokens == len(prompt)
    assert [s.num_cached for s in group] == [0] + [len(prompt) - 1] * 5
    assert len({tuple(s.output_ids) for s in group}) == 6
    for sequence in group:
        again = make_sequence(prompt, sampling_seed=sequence.seed, temperature=1.5)
        run(make_scheduler(directory), [again])
        assert_same([sequence], [again])


def test_a_common_prefix_is_prefilled_once(directory: Path) -> None:
    common = list(range(40))
    prompts = [common + [200 + i] * (i + 1) for i in range(5)]
    sequences = [make_sequence(prompt, rid=str(i)) for i, prompt in enumerate(prompts)]
    scheduler = make_scheduler(directory)
    run(scheduler, sequences)
    assert scheduler.counters.prefilled_tokens == len(common) + sum(range(1, 6))
    for sequence, prompt in zip(sequences, prompts):
        again = make_sequence(prompt)
        run(make_scheduler(directory), [again])
        assert_same([sequence], [again])


def test_the_next_turn_finds_the_last_one_until_the_flush(directory: Path) -> None:
    scheduler = make_scheduler(directory)
    first = make_sequence(list(range(30)), max_new_tokens=10)
    run(scheduler, [first])
    turn = list(range(30)) + first.output_ids + [33, 34]
    second = make_sequence(turn)
    run(scheduler, [second])
    assert second.num_cached == 39  # the last sampled token was never an input
    scheduler.flush()
    third = make_sequence(turn)
    run(scheduler, [third])
    assert third.num_cached == 0
    assert_same([second], [third])


def test_prefixes_of_other_weights_are_not_used(directory: Path) -> None:
    scheduler = make_scheduler(directory)
    prompt = list(range(30))
    run(scheduler, [make_sequence(prompt)])
    name = "model.layers.0.mlp.down_proj.weight"
    scheduler.store.update([(name, scheduler.store.named[name] * 1.5)], "1")
    after = make_sequence(prompt)
    run(scheduler, [after])
    assert after.num_cached == 0 and after.versions == [(0, "1")]


# -- abort, retract, versions ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_abort_keeps_what_was_generated(directory: Path, steps: int) -> None:
    group = [make_sequence(PROMPTS[1], rid=str(i), sampling_seed=i) for i in range(3)]
    scheduler = make_scheduler(directory, prefill_tokens=30)  # the prompt takes two steps
    scheduler.submit(group)
    for _ in range(steps):
        scheduler.step()
    scheduler.abort([group[0]], "enough")
    ended = run(scheduler, [])
    assert ended[0] is group[0] and group[0].finish_reason is not None
    assert (
        group[0].finish_reason["type"] == "abort" and group[0].finish_reason["message"] == "enough"
    )
    expected = [make_sequence(PROMPTS[1], sampling_seed=i) for i in range(3)]
    for sequence in expected:
        run(make_scheduler(directory), [sequence])
    assert_same(group[1:], expected[1:])
    assert group[0].output_ids == expected[0].output_ids[: len(group[0].output_ids)]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_retracted_sequences_go_on_where_they_were(directory: Path, steps: int) -> None:
    sequences = seven()
    scheduler = make_scheduler(directory, max_slots=4)
    scheduler.submit(sequences)
    for _ in range(steps):
        scheduler.step()
    scheduler.retract_all()
    assert scheduler.num_active == 0
    run(scheduler, [])
    assert_same(sequences, alone(directory))
    assert any(s.num_retractions for s in sequences)


def test_too_little_memory_retracts_instead_of_failing(directory: Path) -> None:
    arch_bytes = bytes_per_token(make_scheduler(directory).cache)
    scheduler = make_scheduler(directory, kv_bytes=arch_bytes * 2 * 128)  # two slots of 128 tokens
    sequences = [
        make_sequence([i], rid=str(i), max_new_tokens=150, sampling_seed=i) for i in range(4)
    ]
    run(scheduler, sequences)
    assert scheduler.cache.nbytes <= arch_bytes * 2 * 192
    assert all(len(s.output_ids) == 150 for s in sequences)
    reference = [make_sequence([i], max_new_tokens=150, sampling_seed=i) for i in range(4)]
    run(make_scheduler(directory), reference)
    assert_same(sequences, reference)


def test_a_push_in_the_middle_is_recorded_per_token(directory: Path) -> None:
    scheduler = make_scheduler(directory)
    sequence = make_sequence(PROMPTS[0], max_new_tokens=10)
    scheduler.submit([sequence])
    for _ in range(4):
        scheduler.step()
    made = len(sequence.output_ids)
    scheduler.store.update([], "8")
    run(scheduler, [])
    assert sequence.versions == [(0, "0"), (made, "8")] and sequence.final_version == "8"


def test_logits_that_are_not_finite_end_the_request_and_nobody_else(directory: Path) -> None:
    scheduler = make_scheduler(directory)
    name = "model.norm.weight"
    good = scheduler.store.named[name].clone()
    scheduler.store.update([(name, torch.full_like(good, torch.nan))])
    bad = make_sequence(PROMPTS[0])
    run(scheduler, [bad])
    assert bad.finish_reason is not None and "not finite" in bad.finish_reason["message"]
    scheduler.store.update([(name, good)])
    sequences = seven()
    run(scheduler, sequences)
    assert_same(sequences, alone(directory))


# -- ends ------------------------------------------------------------------------------------------


def test_stop_token_stop_string_and_length(directory: Path) -> None:
    free = make_sequence(PROMPTS[0], max_new_tokens=12)
    run(make_scheduler(directory), [free])
    ids = free.output_ids
    position = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    by_token = make_sequence(
        PROMPTS[0], max_new_tokens=12, ignore_eos=False, stop_token_ids=[ids[position]]
    )
    by_length = make_sequence(
        PROMPTS[0], max_new_tokens=position + 1, ignore_eos=False, stop_token_ids=[ids[position]]
    )
    not_yet = make_sequence(
        PROMPTS[0],
        max_new_tokens=12,
        min_new_tokens=12,
        ignore_eos=False,
        stop_token_ids=[ids[position]],
    )
    run(make_scheduler(directory), [by_token, by_length, not_yet])
    assert by_token.output_ids == ids[: position + 1]
    assert by_token.finish_reason == {"type": "stop", "matched": ids[position]}
    # SGLang's order of checks
    assert by_length.finish_reason == {"type": "length", "length": position + 1}
    assert len(not_yet.output_ids) == 12 and ids[position] not in not_yet.output_ids


def test_no_new_tokens_only_scores_the_prompt(directory: Path) -> None:
    sequence = make_sequence(PROMPTS[1], max_new_tokens=0, logprob_start=3)
    run(make_scheduler(directory), [sequence])
    assert sequence.output_ids == [] and len(sequence.input_logprobs) == len(PROMPTS[1]) - 4
    assert sequence.finish_reason == {"type": "length", "length": 0}


# -- any order of events ---------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 6), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 6), st.just(0)),
        st.tuples(st.just("retract"), st.just(0), st.just(0)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


def check_invariants(scheduler: Scheduler, submitted: list[Sequence]) -> None:
    assert scheduler.num_active <= scheduler.cache.max_slots
    places = [*scheduler.slots.running, *scheduler.prefilling, *scheduler.waiting]
    assert len(set(places)) == len(places)
    assert set(places) == {s for s in submitted if s.status is not SequenceStatus.FINISHED}
    for sequence in scheduler.slots.running:
        assert sequence.num_computed == sequence.length - 1


@settings(max_examples=20)
@given(EVENTS, st.sampled_from([1, 2, 4]), st.sampled_from([5, 64]))
def test_any_order_of_events_gives_the_tokens_of_each_alone(
    directory: Path, events: list[tuple[str, int, int]], max_slots: int, prefill_tokens: int
) -> None:
    scheduler = make_scheduler(directory, max_slots=max_slots, prefill_tokens=prefill_tokens)
    submitted: list[Sequence] = []
    for kind, number, length in events:
        if kind == "submit":
            sequence = make_sequence(
                PROMPTS[number],
                rid=str(len(submitted)),
                max_new_tokens=length,
                sampling_seed=number,
            )
            submitted.append(sequence)
            scheduler.submit([sequence])
        elif kind == "step":
            for _ in range(number):
                scheduler.step()
        elif kind == "abort":
            scheduler.abort(scheduler.everything()[number : number + 1], "")
        elif kind == "retract":
            scheduler.retract_all()
        else:
            scheduler.flush()
        check_invariants(scheduler, submitted)
    run(scheduler, [])
    longest = {}
    for number in {PROMPTS.index(s.prompt.tolist()) for s in submitted}:
        longest[number] = make_sequence(PROMPTS[number], max_new_tokens=20, sampling_seed=number)
        run(make_scheduler(directory), [longest[number]])
    for sequence in submitted:
        expected = longest[PROMPTS.index(sequence.prompt.tolist())].output_ids[
            : len(sequence.output_ids)
        ]
        assert sequence.output_ids == expected
        aborted = sequence.finish_reason is not None and sequence.finish_reason["type"] == "abort"
        assert aborted or len(sequence.output_ids) == sequence.max_new_tokens


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    length = common_prefix(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64))
    assert a[:length] == b[:length] and (length == min(len(a), len(b)) or a[length] != b[length])
