"""Tokens to their experts and back, over the ranks that hold the experts.

    tokens [n, H] ─ take ─► rows by expert ─ all-to-all ─► rows of my experts ─ sort ─► experts
    output [n, H] ◄─ sum ── rows by expert ◄─ all-to-all ─ rows of my experts ◄─ unsort ───┘

A token becomes one row per expert it is sent to. Rows are only ever gathered: going forward by the
index of their token, coming back by the table of each token's rows, whose sum is taken in a fixed
order. Nothing is scattered, so the same inputs give the same bits, on a GPU too, where scattered
additions in bfloat16 do not.

megatron-core's own dispatchers stand aside: its all-to-all one hands tensors to
``all_to_all_single`` as split sizes where no GPU is present, the all-gather one refuses variable
lengths, and both add up with scattered additions unless Transformer Engine's fused permutation is
there.

Expert tensor parallelism cuts each expert over several ranks. They all get the row, each computes
its part of the result, and the parts are summed where the token lives: to the exchange they are
just more destinations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from slime.algorithms.fusion import fused


@dataclass(frozen=True)
class ExpertPlace:
    """Which experts this rank holds, and the ranks that hold the others.

    Attributes:
        num_experts: of a layer, over all ranks.
        expert_ranks, expert_rank: expert-parallel size and place; experts are dealt out in equal
            runs.
        shards: expert tensor-parallel size.
        group: all of them, shards of one expert next to each other; None for one rank alone.
    """

    num_experts: int
    expert_ranks: int = 1
    expert_rank: int = 0
    shards: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(groups: ProcessGroupCollection, num_experts: int) -> ExpertPlace:
        alone = groups.tp_ep.size() == 1
        return ExpertPlace(
            num_experts,
            groups.ep.size(),
            groups.ep.rank(),
            groups.expt_tp.size(),
            None if alone else groups.tp_ep,
        )

    @property
    def num_local(self) -> int:
        return self.num_experts // self.expert_ranks


@dataclass(frozen=True)
class Dispatch:
    """The way of one micro-batch's rows through one layer. S rows are sent from here, R arrive.

    Attributes:
        tokens: int64 [S], the token that each sent row is a copy of.
        slots: int64 [S], its place in the flattened [n, k] choices.
        rows: int64 [n, k · shards], each token's rows among the sent ones.
        ends: int32 [local experts], where each expert's rows end among the arrived ones, sorted by
            expert.
        sent, arrived: rows to and from each rank of the group; None for one rank alone.
        order, place: int64 [R], arrival order → order by expert, and back; None where they are the
            same.
        group: to exchange over.
    """

    tokens: Tensor
    slots: Tensor
    rows: Tensor
    ends: Tensor
    sent: list[int] | None = None
    arrived: list[int] | None = None
    order: Tensor | None = None
    place: Tensor | None = None
    group: dist.ProcessGroup | None = None

    def to_experts(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [n, H] and router weights [n, k] → rows [R, H] and weights [R] by expert.
        Collective."""
        rows = take_rows(tokens, self.tokens, self.rows)
        row_weights = weights.reshape(-1).index_select(0, self.slots)
        if self.group is not None:
            rows = all_to_all(self.group, rows, self.arrived, self.sent)
            row_weights = all_to_all(self.group, row_weights, self.arrived, self.sent)
        if self.order is not None and self.place is not None:
            rows = take_rows(rows, self.order, self.place[:, None])
            row_weights = row_weights.index_select(0, self.order)
        return rows, row_weights

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Expert outputs [R, H] → [n, H], the rows of each token added up. Collective."""
        if self.order is not None and self.place is not None:
            rows = take_rows(rows, self.place, self.order[:, None])
        if self.group is not None:
            rows = all_to_all(self.group, rows, self.sent, self.arrived)
        return sum_rows(rows, self.tokens, self.rows)


def dispatch(choices: Tensor, place: ExpertPlace) -> Dispatch:
    """Plan the way of each token to the experts it chose. Collective; one rank alone never waits
    for the device.

    Args:
        choices: int64 [n, k], global expert numbers.

    Example (two tokens, three experts: token 0 chose 2 and 0, token 1 chose 2 and 1):
        >>> plan = dispatch(torch.tensor([[2, 0], [2, 1]]), ExpertPlace(num_experts=3))
        >>> plan.tokens.tolist(), plan.ends.tolist(), plan.rows.tolist()
        ([0, 1, 0, 1], [1, 2, 4], [[2, 0], [3, 1]])
    """
    n, k = choices.shape
    experts, slots = choices.reshape(-1).sort(stable=True)
    numbers = torch.arange(place.num_experts, device=choices.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    if place.group is None:
        return Dispatch(slots // k, slots, _inverse(slots).view(n, k), ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    everyones = counts.new_empty(place.group.size() * place.num_experts)
    dist.all_gather_into_tensor(everyones, counts, group=place.group)
    first = place.num_local * place.expert_rank
    mine = everyones.view(-1, place.num_experts)[:, first : first + place.num_local]
    to_rank = counts.view(place.expert_ranks, place.num_local).sum(dim=1)
    # the one wait for the device: the exchange needs its sizes on the host
    both = torch.cat([to_rank, mine.sum(dim=1)]).tolist()
    per_rank = both[: place.expert_ranks]
    arrived = both[place.expert_ranks :]
    sent = [size for size in per_rank for _ in range(place.shards)]
    if place.shards > 1:
        slots = torch.cat([run for run in slots.split(per_rank) for _ in range(place.shards)])
        rows = slots.argsort(stable=True).view(n, k * place.shards)
    else:
        rows = _inverse(slots).view(n, k)
    order = back = None
    if place.num_local > 1:
        labels = numbers[: place.num_local].repeat(place.group.size())
        labels = labels.repeat_interleave(mine.reshape(-1), output_size=sum(arrived))
        order = labels.argsort(stable=True)
        back = _inverse(order)
    local_ends = mine.sum(dim=0).cumsum(0, dtype=torch.int32)
    return Dispatch(slots // k, slots, rows, local_ends, sent, arrived, order, back, place.group)


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def take_rows(values: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """``values[index]``. ``table`` [len(values), m] tells where each row of ``values`` went, for
    the gradient."""
    return cast(Tensor, _TakeRows.apply(values, index, table))


def sum_rows(values: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """``values[table].sum(1)``, added up in the order of the table: the transpose of
    `take_rows`."""
    return cast(Tensor, _SumRows.apply(values, index, table))


@fused
def _summed(values: Tensor, table: Tensor) -> Tensor:
    picked = values.index_select(0, table.reshape(-1))
    return picked if table.size(1) == 1 else picked.view(*table.shape, -1).sum(dim=1)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return _summed(grad, table), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return _summed(values, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None
