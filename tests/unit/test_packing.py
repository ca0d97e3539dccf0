"""Packing: the invariants listed in `slime.samples.packing`, for any samples and any layout."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.samples.packing import (
    PackingPlan,
    PackingRules,
    pack_micro_batches,
    plan_steps,
    split_steps,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@st.composite
def packing_problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], PackingRules]:
    lengths = draw(LENGTHS)
    ids, current = [], 0
    for _ in lengths:  # runs of one id: trajectories that fanned out
        ids.append(current)
        current += draw(st.sampled_from([1, 1, 1, 0]))
    mask_sums = [draw(st.integers(0, length)) for length in lengths]
    rules = PackingRules(
        global_batch_size=draw(st.integers(1, 40)),
        data_parallel_size=draw(st.integers(1, 5)),
        micro_batch_multiple=draw(st.integers(1, 3)),
        micro_batch_size=draw(st.integers(1, 4)),
        max_tokens=draw(st.one_of(st.none(), st.integers(5, 120))),
        balance=draw(st.booleans()),
    )
    return lengths, ids, mask_sums, rules


def batches_of(schedule: PackingPlan) -> list[list[list[list[int]]]]:
    """[step][rank][micro-batch] → positions."""
    return [
        [
            [[schedule.shards[rank][i] for i in batch] for batch in plans[step].micro_batches]
            for rank, plans in enumerate(schedule.steps)
        ]
        for step in range(len(schedule.steps[0]))
    ]


@given(packing_problems(), st.none() | st.integers(1, 9))
@settings(max_examples=300)
def test_every_invariant(
    problem: tuple[list[int], list[int], list[int], PackingRules], num_images: int | None
) -> None:
    lengths, ids, mask_sums, rules = problem
    images = num_images and [length % num_images for length in lengths]
    schedule = plan_steps(lengths, ids, mask_sums, rules, images=images or None)
    steps = batches_of(schedule)

    placed = [i for step in steps for rank in step for batch in rank for i in batch]
    assert sorted(placed) == list(range(len(lengths))), "every sample exactly once"
    for rank, plans in enumerate(schedule.steps):
        local = [i for plan in plans for batch in plan.micro_batches for i in batch]
        assert local == list(range(len(schedule.shards[rank]))), (
            "shards lie in the order they are trained"
        )

    step_of: dict[int, int] = {}
    for number, step in enumerate(steps):
        counts = {len(rank) for rank in step}
        assert len(counts) == 1, "same number of micro-batches on every rank"
        assert counts.pop() % rules.micro_batch_multiple == 0
        inside = [i for rank in step for batch in rank for i in batch]
        for i in inside:
            assert step_of.setdefault(ids[i], number) == number, "a trajectory stays in one step"
        for plans in schedule.steps:
            assert plans[number].global_batch_size == len({ids[i] for i in inside})
            assert plans[number].num_loss_tokens == sum(mask_sums[i] for i in inside)
        for batch in (batch for rank in step for batch in rank):
            if rules.max_tokens is None:
                assert len(batch) <= rules.micro_batch_size
            else:
                assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= rules.max_tokens
    cap = rules.max_tokens
    assert schedule.oversize == [
        i for i, length in enumerate(lengths) if cap is not None and length > cap
    ]


@given(packing_problems())
@settings(max_examples=200)
def test_steps_are_filled_evenly_and_none_is_needlessly_small(problem) -> None:
    _, ids, _, rules = problem
    sizes = [len({ids[i] for i in step}) for step in split_steps(ids, rules.global_batch_size)]
    assert sum(sizes) == len(set(ids)), "a remainder is spread, not dropped"
    assert max(sizes) - min(sizes) <= 1
    if len(sizes) > 1:
        assert min(sizes) * 3 >= rules.global_batch_size * 2 - 3, (
            "the nearest whole number of steps"
        )


@given(LENGTHS, st.integers(1, 4), st.integers(60, 200))
@settings(max_examples=200)
def test_balanced_ranks_differ_by_less_than_the_largest_micro_batch(lengths, ranks, cap) -> None:
    rules = PackingRules(len(lengths), data_parallel_size=ranks, max_tokens=cap, balance=True)
    schedule = plan_steps(lengths, list(range(len(lengths))), lengths, rules)
    loads = [sum(lengths[i] for i in shard) for shard in schedule.shards]
    largest = max(
        sum(lengths[i] for i in batch) for rank in batches_of(schedule)[0] for batch in rank
    )
    assert max(loads) - min(loads) <= largest


def test_balancing_beats_round_robin_on_skewed_lengths() -> None:
    lengths = [100, 1, 100, 1, 100, 1, 100, 1]  # round robin gives rank 0 all the long ones
    loads = {}
    for balance in (False, True):
        rules = PackingRules(8, data_parallel_size=2, micro_batch_size=1, balance=balance)
        schedule = plan_steps(lengths, list(range(8)), lengths, rules)
        loads[balance] = [sum(lengths[i] for i in shard) for shard in schedule.shards]
    assert loads == {False: [400, 4], True: [202, 202]}


@given(st.lists(st.integers(20, 60), min_size=64, max_size=64), st.integers(1, 4))
def test_samples_with_the_same_images_are_together(lengths: list[int], ranks: int) -> None:
    """Sixteen images of four samples each, which come in turns: a cut between two micro-batches
    divides at most one group. Costs are as even as whole samples allow."""
    images = [place % 16 for place in range(64)]
    rules = PackingRules(64, data_parallel_size=ranks, max_tokens=max(lengths) + sum(lengths) // 6)
    bins = pack_micro_batches(list(range(64)), lengths, lengths, rules, images)
    assert sum(len({images[i] for i in one}) for one in bins) <= 16 + len(bins) - 1
    assert max(sum(lengths[i] for i in one) for one in bins) <= sum(lengths) / len(bins) + 60


def test_costs_replace_tokens_as_what_is_balanced() -> None:
    lengths = [4, 2, 2, 1, 1, 1, 1]
    rules = PackingRules(7, data_parallel_size=2, max_tokens=8, balance=True)
    schedule = plan_steps(lengths, list(range(7)), lengths, rules, costs=[n * n for n in lengths])
    long_rank = next(shard for shard in schedule.shards if 0 in shard)
    assert sum(lengths[i] ** 2 for i in long_rank) == 16, (
        "the long sample is as much work as all the others"
    )


def test_the_costliest_micro_batch_is_halved_where_one_more_is_needed() -> None:
    rules = PackingRules(4, data_parallel_size=3, max_tokens=10, balance=False)
    lengths = [5, 5, 4, 6]
    costs = [1.0, 1.0, 9.0, 9.0]
    assert sorted(pack_micro_batches([0, 1, 2, 3], lengths, costs, rules)) == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("trajectories", "batch", "sizes"),
    [
        (256, 256, [256]),
        (255, 128, [128, 127]),
        (129, 128, [129]),
        (3, 8, [3]),
        (193, 128, [97, 96]),
    ],
)
def test_step_sizes(trajectories: int, batch: int, sizes: list[int]) -> None:
    assert [len(step) for step in split_steps(list(range(trajectories)), batch)] == sizes


def test_static_batches_without_balance_keep_the_order() -> None:
    rules = PackingRules(6, data_parallel_size=2, micro_batch_size=2, balance=False)
    schedule = plan_steps([5] * 6, list(range(6)), [5] * 6, rules)
    assert batches_of(schedule) == [[[[0, 1], [4]], [[2, 3], [5]]]]


def test_a_rank_without_samples_has_empty_micro_batches() -> None:
    rules = PackingRules(1, data_parallel_size=3, micro_batch_multiple=2, max_tokens=10)
    schedule = plan_steps([4], [0], [4], rules)
    assert [plans[0].micro_batches for plans in schedule.steps] == [[[0], []], [[], []], [[], []]]
