"""Send tokens to their experts and back, over the ranks that hold the experts.

    tokens [n, H] ─ take ─► rows by expert ─ all-to-all ─► rows of my experts ─ sort ─► experts
    output [n, H] ◄─ sum ── rows by expert ◄─ all-to-all ─ rows of my experts ◄─ unsort ───┘

A token becomes one row per chosen expert. Rows are only gathered: on the way to the experts by the
index of their token, on the way back by a table of each token's rows, which are summed in a fixed
order. Without scattered additions, which are not deterministic on a GPU, equal inputs give equal
results, bit for bit.

megatron-core's dispatchers are not used. Without a GPU its all-to-all dispatcher passes tensors as
split sizes to ``all_to_all_single``, its all-gather dispatcher refuses variable lengths, and both
use scattered additions unless Transformer Engine's fused permutation is installed.

Expert tensor parallelism shards each expert over several ranks. Each of them gets the row and
computes a partial sum, and the token's rank adds these up. For the exchange they are additional
destinations.
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
        num_experts: experts of a layer, over all ranks.
        expert_ranks, expert_rank: expert-parallel size and rank; each rank has an equal number of
            consecutive experts.
        shards: expert tensor-parallel size.
        group: all these ranks, shards of an expert being adjacent; None for a single rank.
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
    """The plan for one micro-batch's rows in one layer. This rank sends S rows and receives R.

    Attributes:
        tokens: int64 [S], the token of which each sent row is a copy.
        slots: int64 [S], index of each sent row in the flattened choices [n, k].
        rows: int64 [n, k · shards], indices of each token's rows among the sent rows.
        ends: int32 [local experts], where each expert's rows end among the received rows, sorted by
            expert.
        sent, arrived: number of rows to and from each rank of the group; None for a single rank.
        order, place: int64 [R], permutation from arrival order to order by expert, and its inverse;
            None if the orders are equal.
        group: the group of the exchange; None for a single rank.
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
        """tokens [n, H] and router weights [n, k] → rows [R, H] and weights [R], sorted by expert.
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
        """Expert outputs [R, H] → [n, H], summed over each token's rows. Collective."""
        if self.order is not None and self.place is not None:
            rows = take_rows(rows, self.place, self.order[:, None])
        if self.group is not None:
            rows = all_to_all(self.group, rows, self.sent, self.arrived)
        return sum_rows(rows, self.tokens, self.rows)


def dispatch(choices: Tensor, place: ExpertPlace) -> Dispatch:
    """Plan the exchange between tokens and their chosen experts. Collective; a single rank never
    waits for the device.

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
    # the only wait for the device: the exchange needs its sizes on the host
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
    """Return ``values[index]``. For the gradient, ``table`` [len(values), m] has the result rows
    that are copies of each row of ``values``."""
    return cast(Tensor, _TakeRows.apply(values, index, table))


def sum_rows(values: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Return ``values[table].sum(1)``, summed in the table's order: the transpose of
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
