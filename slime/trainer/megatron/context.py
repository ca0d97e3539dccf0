"""Context parallelism: the ranks of a context group split the tokens of a micro-batch, and the
heads of its attention.

    tokens of the micro-batch     0 1 2 3 4 5 6 7      attention of a layer, group of two
    rank 0 holds                  0   2   4   6        rank 0: all tokens, first half of the heads
    rank 1 holds                    1   3   5   7      rank 1: all tokens, second half

Everything outside attention works token by token, so a rank computes it only for its stripe.
Before attention an all-to-all gives each rank all tokens of some heads; after it another one
restores the stripes (DeepSpeed-Ulysses, arXiv:2309.14509). The kernel gets whole packed sequences:
none is split or padded, and all ranks have equal causal work. Stripes also balance the work of the
output layer, wherever the responses are.

The stripes' log-probs are gathered, so that the loss gets whole samples. Every rank computes the
same loss; its backward pass uses only the gradient of its own stripe, and the data-parallel
reduction, which includes the context group, sums over the stripes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place among the ranks that share a micro-batch; ``group`` is None in
    single-process tests."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def stripe(self, values: Tensor, axis: int = 0) -> Tensor:
        """Return every ``size``-th entry along ``axis``, starting at ``rank``. The axis has a
        multiple of ``size`` entries."""
        index = torch.arange(self.rank, values.size(axis), self.size, device=values.device)
        return values.index_select(axis, index)


@dataclass(frozen=True)
class ContextSplit:
    """How one micro-batch is split over a context group.

    Attributes:
        place: the group.
        order: per rank of the group, int64 indices of the response tokens whose rows the rank
            holds, in the rank's order.
    """

    place: ContextGroup
    order: list[Tensor]

    @staticmethod
    def of(place: ContextGroup, rows: Tensor) -> ContextSplit:
        """Split the rows [N] of a whole micro-batch.

        Example (rows 2, 3, 4 over two ranks: rank 0 has rows 2 and 4, its local rows 1 and 2):
            >>> split = ContextSplit.of(ContextGroup(0, 2), torch.tensor([2, 3, 4]))
            >>> [o.tolist() for o in split.order]
            [[0, 2], [1]]
        """
        return ContextSplit(
            place, [(rows % place.size == rank).nonzero()[:, 0] for rank in range(place.size)]
        )

    def mine(self, values: Tensor) -> Tensor:
        """Return this rank's entries [n, …] of values of the whole micro-batch [N, …]."""
        return values.index_select(0, self.order[self.place.rank])

    def whole(self, values: Tensor) -> Tensor:
        """Gather over the group, the inverse of `mine`: [n, …] → [N, …], differentiable.
        Collective, even if n is 0."""
        return cast(Tensor, _Whole.apply(values, self))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, heads, dim] each, this rank's tokens → [T, heads / size, dim] each, all tokens.
        Collective.

        Keys and values whose heads cannot be split over the ranks are repeated first, as few times
        as possible.
        """
        key, value = (_repeated(x, query.size(1), self.place.size) for x in (key, value))
        heads = (query, key, value)
        swapped = swap([x.reshape(x.size(0), self.place.size, -1) for x in heads], self.place)
        q, k, v = (
            part.view(-1, part.size(2) // x.size(2), x.size(2))
            for part, x in zip(swapped, heads, strict=True)
        )
        return q, k, v

    def to_tokens(self, output: Tensor) -> Tensor:
        """[T, heads / size, dim] → [t, heads, dim]. Collective."""
        total, heads, dim = output.shape
        [mine] = swap(
            [output.reshape(total // self.place.size, self.place.size, heads * dim)], self.place
        )
        return mine.view(mine.size(0), -1, dim)


def swap(parts: list[Tensor], place: ContextGroup) -> list[Tensor]:
    """[t, size, width] each → the same shapes: entry [:, j] of rank i goes to entry [:, i] of rank
    j. Collective, in one exchange. It is its own inverse and its own gradient.
    """
    return list(_Swap.apply(place, *parts))


def _repeated(x: Tensor, query_heads: int, size: int) -> Tensor:
    """Repeat key or value heads until each rank can get those of its query heads."""
    heads = x.size(1)
    if heads % size == 0:
        return x
    copies = size // heads if size % heads == 0 else query_heads // heads
    return x.repeat_interleave(copies, dim=1)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: ContextGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.place = place
        return _exchange(parts, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_exchange(grads, ctx.place)


def _exchange(parts: Sequence[Tensor], place: ContextGroup) -> tuple[Tensor, ...]:
    """Exchange all parts in one all-to-all, with one copy of each part before and one after;
    results are contiguous."""
    length, size = parts[0].shape[:2]
    widths = [part.size(2) for part in parts]
    send = parts[0].new_empty(size, length, sum(widths))
    for there, part in zip(send.split(widths, dim=2), parts, strict=True):
        _copy_rows(there, part.transpose(0, 1))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=place.group)
    results = tuple(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
    for result, came in zip(results, received.split(widths, dim=2), strict=True):
        _copy_rows(result.transpose(0, 1), came)
    return results


def _copy_rows(target: Tensor, source: Tensor) -> None:
    """Run ``target.copy_(source)`` for tensors of one dtype, in wide words if possible.

    Element by element, a GPU copies strided 16-bit numbers with half of its bandwidth.
    """
    for word in (torch.complex128, torch.complex64, torch.float32):
        ratio = word.itemsize // source.element_size()
        if ratio > 1 and all(_has_words(x, ratio) for x in (target, source)):
            target = target.view(word)
            source = source.view(word)
            break
    target.copy_(source)


def _has_words(x: Tensor, ratio: int) -> bool:
    *strides, last = x.stride()
    return last == 1 and all(
        value % ratio == 0 for value in (*strides, x.size(-1), x.storage_offset())
    )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        sizes = [order.numel() for order in split.order]
        if max(sizes) == 0:
            return values.clone()
        mine = values.new_zeros(max(sizes), *values.shape[1:])
        mine[: values.size(0)] = values
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=split.place.group)
        whole = values.new_empty(sum(sizes), *values.shape[1:])
        for part, order in zip(parts, split.order, strict=True):
            whole[order] = part[: order.numel()]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.split.mine(grad), None
