"""Context parallelism: the ranks of a context group share the tokens of a micro-batch, and the heads of its attention.

    tokens of the micro-batch     0 1 2 3 4 5 6 7          attention of a layer, group of two
    rank 0 holds                  0   2   4   6            rank 0: all tokens, first half of the heads
    rank 1 holds                    1   3   5   7          rank 1: all tokens, second half

Everything outside attention works token by token, so a rank computes it for its stripe alone. Around the attention
one all-to-all gives each rank all tokens of some heads, and one gives the tokens back (DeepSpeed-Ulysses,
arXiv:2309.14509). The kernel sees whole packed sequences: no sequence is cut, none is padded, causal work is even by
construction, and the stripes make the work of the output layer even too, wherever the responses are.

The log-probs of the stripes are put together again, so that the loss sees whole samples and does not know of any of
this. Every rank computes the same loss; going back, it takes the gradient of its own stripe, and the data-parallel
reduction, which runs over the context group too, adds the stripes up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place among the ranks that share a micro-batch; ``group`` is None in tests of one process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def stripe(self, values: Tensor, axis: int = 0) -> Tensor:
        """Every ``size``-th entry along ``axis``, from ``rank`` on. The axis' length is a multiple of ``size``."""
        index = torch.arange(self.rank, values.size(axis), self.size, device=values.device)
        return values.index_select(axis, index)


@dataclass(frozen=True)
class ContextSplit:
    """How one micro-batch is divided.

    Attributes:
        place: the group.
        order: per rank of the group, int64 indices of the response tokens whose rows it holds, in its order.
    """

    place: ContextGroup
    order: list[Tensor]

    @staticmethod
    def of(place: ContextGroup, rows: Tensor) -> ContextSplit:
        """From the rows [N] of the whole micro-batch.

        Example (rows 2, 3, 4 over two ranks: rank 0 has rows 2 and 4, its local rows 1 and 2):
            >>> [o.tolist() for o in ContextSplit.of(ContextGroup(0, 2), torch.tensor([2, 3, 4])).order]
            [[0, 2], [1]]
        """
        return ContextSplit(place, [(rows % place.size == rank).nonzero()[:, 0] for rank in range(place.size)])

    def mine(self, values: Tensor) -> Tensor:
        """The entries [n, …] of this rank out of those of the whole micro-batch [N, …]."""
        return values.index_select(0, self.order[self.place.rank])

    def whole(self, values: Tensor) -> Tensor:
        """Inverse of `mine`, over the group: [n, …] → [N, …], differentiable. Collective, also where n is 0."""
        result = _Whole.apply(values, self)
        assert isinstance(result, Tensor)
        return result

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[t, heads, dim] each, this rank's tokens → [T, heads / size, dim] each, all tokens. Collective.

        Keys and values with fewer heads than the group has ranks are repeated first, as little as possible.
        """
        key, value = (_repeated(x, query.size(1), self.place.size) for x in (key, value))
        parts = [x.reshape(x.size(0), self.place.size, -1) for x in (query, key, value)]
        widths = [part.size(2) for part in parts]
        swapped = swap(torch.cat(parts, dim=2), self.place).flatten(0, 1).split(widths, dim=1)
        q, k, v = (
            part.reshape(part.size(0), -1, x.size(2)) for part, x in zip(swapped, (query, key, value), strict=True)
        )
        return q, k, v

    def to_tokens(self, output: Tensor) -> Tensor:
        """[T, heads / size, dim] → [t, heads, dim]. Collective."""
        total, heads, dim = output.shape
        mine = swap(output.reshape(total // self.place.size, self.place.size, heads * dim), self.place)
        return mine.reshape(mine.size(0), -1, dim)


def swap(values: Tensor, place: ContextGroup) -> Tensor:
    """[t, size, width] → [t, size, width]: entry [:, j] of rank i goes to entry [:, i] of rank j. Collective.

    The exchange is its own inverse and its own gradient.
    """
    result = _Swap.apply(values, place)
    assert isinstance(result, Tensor)
    return result


def _repeated(x: Tensor, query_heads: int, size: int) -> Tensor:
    """Keys or values with enough heads to give each rank those that its query heads attend to."""
    heads = x.size(1)
    if heads % size == 0:
        return x
    copies = size // heads if size % heads == 0 else query_heads // heads
    return x.repeat_interleave(copies, dim=1)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, place: ContextGroup) -> Tensor:
        ctx.place = place
        return _exchange(values, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.place), None


def _exchange(values: Tensor, place: ContextGroup) -> Tensor:
    send = values.transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=place.group)
    return received.transpose(0, 1).contiguous()


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
