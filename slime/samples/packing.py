"""Packing: which sample goes into which optimizer step, data-parallel rank and micro-batch. Pure
functions.

    samples ─► steps         ─► micro-batches  ─► ranks
               (whole           (token cap)       (equal counts,
               trajectories)                      balanced cost)

Invariants, each one a property test:
  * every sample is in exactly one micro-batch of one rank of one step; nothing is dropped;
  * the samples of one trajectory are in one step; with ``keeps_trajectories`` in one micro-batch;
  * the trajectories of two steps differ by at most one, so a remainder is spread, never lost;
  * in a step every rank has the same number of micro-batches, a multiple of
    ``micro_batch_multiple``; a rank with nothing left has empty ones;
  * a micro-batch holds at most ``max_tokens`` tokens (dynamic) or ``micro_batch_size`` samples
    (static); a single sample above ``max_tokens`` gets its own micro-batch and is reported in
    `PackingPlan.oversize`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slime.samples.batch import StepPlan


@dataclass(frozen=True)
class PackingRules:
    """The limits that packing must obey.

    Attributes:
        global_batch_size: trajectories per optimizer step.
        data_parallel_size: ranks to spread over.
        micro_batch_multiple: the micro-batch count of a step is a multiple of it (virtual pipeline
            stages), else 1.
        micro_batch_size: most samples of a micro-batch, when ``max_tokens`` is None.
        max_tokens: most tokens of a micro-batch: ``max_tokens_per_gpu`` × context-parallel size.
        balance: choose micro-batches for each rank so that all ranks have about the same cost.
        keeps_trajectories: the samples of a trajectory stay in one micro-batch, and
            ``micro_batch_size`` counts trajectories.
    """

    global_batch_size: int
    data_parallel_size: int = 1
    micro_batch_multiple: int = 1
    micro_batch_size: int = 1
    max_tokens: int | None = None
    balance: bool = True
    keeps_trajectories: bool = False


@dataclass
class PackingPlan:
    """The plan of one rollout.

    Attributes:
        shards: per data-parallel rank the positions of its samples.
        steps: per data-parallel rank its `StepPlan`s; their indices point into the shard.
        oversize: positions of samples longer than ``max_tokens``.
    """

    shards: list[list[int]]
    steps: list[list[StepPlan]]
    oversize: list[int] = field(default_factory=list)


def plan_steps(
    lengths: Sequence[int],
    trajectory_ids: Sequence[int],
    mask_sums: Sequence[int],
    rules: PackingRules,
    costs: Sequence[float] | None = None,
    images: Sequence[Hashable] | None = None,
) -> PackingPlan:
    """Plan all optimizer steps of one rollout.

    Args:
        lengths: tokens of each sample, prompt and response.
        trajectory_ids: samples with the same id stay in one step.
        mask_sums: trained tokens of each sample.
        costs: the quantity to balance, e.g. FLOPs (`slime.models.flops`); tokens when None.
        images: an identifier of each sample's images. Samples with the same images are put
            together, because a micro-batch computes the features of an image once.

    Example (at most 10 tokens, two ranks, so four micro-batches: 8 | 7 | 4 | 3 + 2):
        >>> rules = PackingRules(global_batch_size=5, data_parallel_size=2, max_tokens=10)
        >>> plan_steps([8, 7, 3, 4, 2], [0, 1, 2, 3, 4], [1] * 5, rules).shards
        [[0, 3], [1, 2, 4]]
    """
    assert len(lengths) == len(trajectory_ids) == len(mask_sums)
    costs = lengths if costs is None else costs
    if rules.keeps_trajectories:
        return _plan_trajectories(lengths, trajectory_ids, mask_sums, rules, costs, images)
    shards: list[list[int]] = [[] for _ in range(rules.data_parallel_size)]
    plans: list[list[StepPlan]] = [[] for _ in range(rules.data_parallel_size)]
    for members in split_steps(trajectory_ids, rules.global_batch_size):
        bins = pack_micro_batches(members, lengths, costs, rules, images)
        num_trajectories = len({trajectory_ids[i] for i in members})
        num_loss_tokens = sum(mask_sums[i] for i in members)
        for rank, rank_bins in enumerate(assign_ranks(bins, costs, rules)):
            start = len(shards[rank])
            local = []
            for bin_ in rank_bins:
                local.append(list(range(start, start + len(bin_))))
                start += len(bin_)
                shards[rank].extend(bin_)
            plans[rank].append(StepPlan(local, num_trajectories, num_loss_tokens))
    cap = rules.max_tokens
    oversize = [] if cap is None else [i for i, length in enumerate(lengths) if length > cap]
    return PackingPlan(shards, plans, oversize)


def _plan_trajectories(
    lengths: Sequence[int],
    trajectory_ids: Sequence[int],
    mask_sums: Sequence[int],
    rules: PackingRules,
    costs: Sequence[float],
    images: Sequence[Hashable] | None,
) -> PackingPlan:
    """Return the plan for whole trajectories, with each replaced by its samples."""
    members = list(_members(trajectory_ids).values())
    plan = plan_steps(
        [sum(lengths[i] for i in unit) for unit in members],
        range(len(members)),
        [sum(mask_sums[i] for i in unit) for unit in members],
        replace(rules, keeps_trajectories=False),
        [sum(costs[i] for i in unit) for unit in members],
        None if images is None else [tuple(images[i] for i in unit) for unit in members],
    )
    shards = [[i for unit in shard for i in members[unit]] for shard in plan.shards]
    steps = []
    for shard, rank_steps in zip(plan.shards, plan.steps, strict=True):
        ends = list(itertools.accumulate(len(members[unit]) for unit in shard))
        places = [
            range(end - len(members[unit]), end) for unit, end in zip(shard, ends, strict=True)
        ]
        steps.append(
            [
                replace(
                    step,
                    micro_batches=[
                        [i for unit in samples for i in places[unit]]
                        for samples in step.micro_batches
                    ],
                )
                for step in rank_steps
            ]
        )
    return PackingPlan(shards, steps, [i for unit in plan.oversize for i in members[unit]])


def with_scored(plan: PackingPlan, scored: PackingPlan, positions: Sequence[int]) -> PackingPlan:
    """Add samples that are scored before each step to a plan.

    Args:
        scored: a plan of the same trajectories, and therefore of the same steps.
        positions: position of each sample of ``scored`` in the rollout.
    """
    shards = []
    steps = []
    for own, other, own_steps, other_steps in zip(
        plan.shards, scored.shards, plan.steps, scored.steps, strict=True
    ):
        shards.append(own + [positions[i] for i in other])
        steps.append(
            [
                replace(
                    step,
                    scored=[[len(own) + i for i in samples] for samples in before.micro_batches],
                )
                for step, before in zip(own_steps, other_steps, strict=True)
            ]
        )
    oversize = [*plan.oversize, *(positions[i] for i in scored.oversize)]
    return PackingPlan(shards, steps, oversize)


def split_steps(trajectory_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Return the positions per step: trajectories in first-seen order, spread evenly over the
    nearest whole number of steps.

    Example (7 trajectories of which one has two samples, 3 a step: 2 steps of 4 and 3):
        >>> split_steps([0, 0, 1, 2, 3, 4, 5, 6], 3)
        [[0, 1, 2, 3, 4], [5, 6, 7]]
    """
    trajectories = list(_members(trajectory_ids).values())
    if not trajectories:
        return []
    num_steps = max(1, (2 * len(trajectories) + global_batch_size) // (2 * global_batch_size))
    chunks = _even_chunks(trajectories, min(num_steps, len(trajectories)))
    return [list(itertools.chain.from_iterable(chunk)) for chunk in chunks]


def _members(trajectory_ids: Sequence[int]) -> dict[int, list[int]]:
    """Return the positions of each trajectory's samples."""
    members: dict[int, list[int]] = {}
    for position, trajectory in enumerate(trajectory_ids):
        members.setdefault(trajectory, []).append(position)
    return members


T = TypeVar("T")


def _even_chunks(items: list[T], count: int) -> list[list[T]]:
    """Return ``count`` contiguous chunks whose sizes differ by at most one, longer ones first."""
    size, extra = divmod(len(items), count)
    bounds = [index * size + min(index, extra) for index in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def pack_micro_batches(
    members: list[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    rules: PackingRules,
    images: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Return the micro-batches of one step over all ranks: as few as the cap allows, rounded up for
    the layout.

    The count is a multiple of ``data_parallel_size × micro_batch_multiple``; surplus micro-batches
    stay empty. With ``balance`` they are filled evenly (largest cost first into the least filled,
    or in the order of ``images`` if there are any); without it samples keep their order.
    """

    def filled(sizes: Sequence[int], count: int, cap: int) -> list[list[int]] | None:
        if images is not None:
            place = {key: i for i, key in reversed([*enumerate(images)])}
            order = sorted(members, key=lambda i: (place[images[i]], i))
            together = _fill_in_order(order, sizes, costs, count, cap)
            if together is not None:
                return together
        return _fill_evenly(members, sizes, costs, count, cap)

    unit = rules.data_parallel_size * rules.micro_batch_multiple
    if rules.max_tokens is None:
        count = _round_up(len(members), unit * rules.micro_batch_size) // rules.micro_batch_size
        if not rules.balance:
            return _even_chunks(members, count)
        even = filled([1] * len(lengths), count, rules.micro_batch_size)
        assert even is not None, "count × micro_batch_size samples always fit"
        return even
    order = sorted(members, key=lambda i: -lengths[i]) if rules.balance else members
    tight = _first_fit(order, lengths, rules.max_tokens)
    count = _round_up(len(tight), unit)
    if rules.balance:
        even = filled(lengths, count, rules.max_tokens)
        if even is not None:
            return even
    return _split_to(tight, costs, count)


def assign_ranks(
    bins: list[list[int]], costs: Sequence[float], rules: PackingRules
) -> list[list[list[int]]]:
    """Return the micro-batches per rank, the same number for each; balanced, or rank r gets r, r +
    dp, r + 2 dp, …"""
    size = rules.data_parallel_size
    if not rules.balance:
        return [bins[rank::size] for rank in range(size)]
    per_rank = len(bins) // size
    ranks: list[list[list[int]]] = [[] for _ in range(size)]
    loads = [(0.0, rank) for rank in range(size)]
    for load, bin_ in sorted(
        ((sum(costs[i] for i in b), b) for b in bins), key=lambda item: -item[0]
    ):
        total, rank = heapq.heappop(loads)
        ranks[rank].append(bin_)
        if len(ranks[rank]) < per_rank:
            heapq.heappush(loads, (total + load, rank))
    return ranks


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _first_fit(members: Sequence[int], sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Pack members by first fit, in the given order; one above the cap gets its own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    smallest = min((sizes[member] for member in members), default=0)
    open_bins: list[int] = []  # bins with room for the smallest member
    for member in members:
        index = next((b for b in open_bins if sizes[member] <= room[b]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(cap)
            open_bins.append(index)
        bins[index].append(member)
        room[index] -= sizes[member]
        if room[index] < smallest:
            open_bins.remove(index)
    return bins


def _fill_evenly(
    members: Sequence[int], sizes: Sequence[int], costs: Sequence[float], count: int, cap: int
) -> list[list[int]] | None:
    """Put each member, largest cost first, into the cheapest bin with room; None if members are
    left over."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    heap = [(0.0, index) for index in range(count)]
    for member in sorted(members, key=lambda i: (-costs[i], i)):
        full = []
        while heap and bins[heap[0][1]] and room[heap[0][1]] < sizes[member]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heapq.heappop(heap)
        bins[index].append(member)
        room[index] -= sizes[member]
        heapq.heappush(heap, (cost + costs[member], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _fill_in_order(
    members: Sequence[int], sizes: Sequence[int], costs: Sequence[float], count: int, cap: int
) -> list[list[int]] | None:
    """Return ``count`` bins of neighbours whose largest cost is within 0.1 % of the least possible;
    None if the members need more bins."""

    def cut(limit: float) -> list[list[int]]:
        bins: list[list[int]] = []
        cost = math.inf
        size = 0
        for member in members:
            cost += costs[member]
            size += sizes[member]
            if cost > limit or size > cap:
                bins.append([])
                cost = costs[member]
                size = sizes[member]
            bins[-1].append(member)
        return bins

    high = sum(costs[member] for member in members)
    if len(cut(high)) > count:
        return None
    low = 0.0
    while high - low > 1e-3 * high:
        limit = (low + high) / 2
        low, high = (low, limit) if len(cut(limit)) <= count else (limit, high)
    bins = cut(high)
    return bins + [[] for _ in range(count - len(bins))]


def _split_to(bins: list[list[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Halve the costliest bins of several samples until there are ``count``; then add empty
    ones."""
    single = [bin_ for bin_ in bins if len(bin_) == 1]
    heap = [
        (-sum(costs[i] for i in bin_), position, bin_)
        for position, bin_ in enumerate(bins)
        if len(bin_) > 1
    ]
    heapq.heapify(heap)
    position = len(bins)
    while heap and len(single) + len(heap) < count:
        _, _, bin_ = heapq.heappop(heap)
        for half in _halves(bin_, costs):
            position += 1
            if len(half) == 1:
                single.append(half)
            else:
                heapq.heappush(heap, (-sum(costs[i] for i in half), position, half))
    done = single + [bin_ for _, _, bin_ in heap]
    return done + [[] for _ in range(count - len(done))]


def _halves(bin_: list[int], costs: Sequence[float]) -> tuple[list[int], list[int]]:
    """Split a bin into two non-empty parts of about equal cost."""
    first = []
    second = []
    balance = 0.0
    for member in sorted(bin_, key=lambda i: (-costs[i], i)):
        if balance <= 0:
            first.append(member)
            balance += costs[member]
        else:
            second.append(member)
            balance -= costs[member]
    if not second:  # all costs are zero
        second.append(first.pop())
    return first, second
