"""Log-probs of given tokens, computed from hidden states block by block: the full
[tokens, vocabulary] logits are never materialised.

    hidden [N, H] ──┐
                    ├─ block of rows × block of vocabulary ─► running max, sum, target logit, Σ p·x
    weight [V, H] ──┘                                         ─► log-prob, entropy

    backward: the same blocks again, each written once into the gradients

Logits of 16k tokens over a vocabulary of 150k take 10 GB in float32, and a backward pass holds
several such tensors. Here only one block exists at a time (4 million logits on a CPU, 67 million on
a GPU), at the cost of one more matrix product in the backward pass. On a CPU the block stays in the
cache, which also makes it faster than one large product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.fusion import fused
from slime.algorithms.products import add_product

_ROWS_PER_BLOCK = 8192
_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
_MIN_COLUMNS = 512
_LOWEST = -1e30  # finite: with -inf, 0 · (old max - new max) would be NaN


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output weight that this rank holds.

    Attributes:
        start: token id of the first row.
        size: rows of real tokens; the padding rows after them are not part of the softmax.
        group: process group of the ranks that share the vocabulary; None if this rank holds it all.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class LowRankLogits:
    """The LoRA adapter of the output layer: hidden @ up.T is added to the logits.

    Attributes:
        hidden: scaled A·x of each row, [N, rank].
        up: B, [V, rank], sharded like the output layer.
        on_up_grad: called with the gradient of ``up`` in float32; returns what autograd gets.
    """

    hidden: Tensor
    up: Tensor
    on_up_grad: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KeptTokens:
    """The tokens of each row's softmax: those that top-k, top-p and min-p kept when the row's token
    was sampled. A row without ids uses the whole vocabulary.

    Attributes:
        ids: int64 [n], token ids, row after row.
        rows: int64 [n], the row of each id.
        bounds: offsets of the rows in ``ids``, N + 1 numbers in host memory.
        whole: bool [N, 1], whether the row uses the whole vocabulary.
    """

    ids: Tensor
    rows: Tensor
    bounds: list[int]
    whole: Tensor

    def left_out(self, rows: slice, lo: int, hi: int) -> Tensor:
        """Return which of the tokens lo to hi each row excludes: bool [rows, hi - lo]."""
        own = slice(self.bounds[rows.start], self.bounds[rows.stop])
        ids = self.ids[own]
        whole = self.whole[rows]
        width = hi - lo
        # tokens outside lo to hi go to an extra column, so no shape depends on the values
        column = torch.where((ids >= lo) & (ids < hi), ids - lo, width)
        out = torch.ones(whole.size(0), width + 1, dtype=torch.bool, device=ids.device)
        out[self.rows[own] - rows.start, column] = False
        return out[:, :width] & ~whole


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
    chunk_size: int = -1,
    grad_accumulator: Tensor | None = None,
    low_rank: LowRankLogits | None = None,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature)[target] of each row, and the entropy of each
    row's distribution.

    Products run in the dtype of the inputs, the softmax in float32 (float64 for float64 inputs).
    Differentiable once, in ``hidden`` and ``weight``. With a sharded vocabulary the gradient of
    ``hidden`` is this shard's part; the caller sums it over the group (as
    ``copy_to_tensor_model_parallel_region`` does).

    Args:
        hidden: [N, H], one row per target.
        weight: [V, H], the output layer (this rank's rows of it).
        targets: int64 [N], token ids.
        temperature: logits are divided by it, as in sampling.
        with_entropy: also compute the entropy, differentiably.
        shard: the rows that ``weight`` holds; default: all rows, without padding.
        chunk_size: rows per block; -1: at most 8192.
        grad_accumulator: [V, H], any float dtype. If given (Megatron's ``main_grad``), the gradient
            of ``weight`` is added to it instead of returned, which saves a copy of the model's
            largest matrix.
        low_rank: adapter of the output layer, differentiable once like ``hidden``.
        kept: the tokens of each row's softmax and entropy, which must include its target; None: the
            whole vocabulary.
    Returns:
        (log_probs [N], entropy [N] or None), float32 (float64 for float64 inputs).
    Source: the running softmax: Milakov & Gimelshein (arXiv:1805.02867); blocks of it together with
        the linear layer: Wijmans et al., "Cut Your Losses" (arXiv:2411.09009).

    Example:
        >>> h, w = torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        >>> lp, entropy = linear_log_probs(h, w, torch.tensor([0, 2]), with_entropy=True)
        >>> [round(v, 4) for v in lp.tolist() + entropy.tolist()]  # uniform over 3 tokens: ∓ log 3
        [-1.0986, -1.0986, 1.0986, 1.0986]
    """
    if shard is None:
        shard = VocabShard(0, weight.size(0))
    options = _Options(
        1.0 / temperature,
        with_entropy,
        shard,
        rows_per_block(hidden, chunk_size),
        grad_accumulator,
        None if low_rank is None else low_rank.on_up_grad,
        kept,
    )
    factors = (None, None) if low_rank is None else (low_rank.hidden, low_rank.up)
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, options, *factors)
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Options:
    scale: float
    with_entropy: bool
    shard: VocabShard
    rows: int
    grad_accumulator: Tensor | None
    on_up_grad: Callable[[Tensor], Tensor] | None
    kept: KeptTokens | None


def columns_per_block(device: torch.device, rows: int) -> int:
    """Return how many tokens of the vocabulary a block of ``rows`` rows covers on this device."""
    elements = _BLOCK_ELEMENTS.get(device.type, 1 << 22)
    return max(_MIN_COLUMNS, elements // max(rows, 1) // 64 * 64)


def rows_per_block(hidden: Tensor, chunk_size: int) -> int:
    """Return the rows of ``hidden`` [N, H] per block: ``chunk_size`` if positive, else at most
    8192."""
    return chunk_size if chunk_size > 0 else min(_ROWS_PER_BLOCK, max(hidden.size(0), 1))


def softmax_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: _Options,
        low: Tensor | None,
        up: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = _LogitInputs(
            slice(0, hidden.size(0)), hidden, weight, low, up, options.kept, options.shard.start
        )
        log_sum, target, mean = _statistics(inputs, targets, options)
        log_probs = target - log_sum
        entropy = log_sum - mean
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy, low, up)
        # for an entropy that is only logged, backward gets None and skips its terms
        ctx.set_materialize_grads(False)
        ctx.options = options
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, Tensor | None, Tensor | None]:
        hidden, weight, targets, log_sum, entropy, low, up = ctx.saved_tensors
        options: _Options = ctx.options
        inputs = _LogitInputs(
            slice(0, hidden.size(0)), hidden, weight, low, up, options.kept, options.shard.start
        )
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sum)
        sink = options.grad_accumulator
        if need_weight and sink is None:
            sink = torch.zeros_like(weight)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_low = grad_up = None
        if low is not None:
            grad_low = torch.empty_like(low)
            grad_up = torch.zeros_like(up, dtype=softmax_dtype(hidden))
        for lo in range(0, hidden.size(0), options.rows):
            rows = slice(lo, min(lo + options.rows, hidden.size(0)))
            entropy_part = None if grad_entropy is None else (grad_entropy[rows], entropy[rows])
            block, low_block = _backward_rows(
                inputs.part(rows),
                targets[rows],
                log_sum[rows],
                grad_log_probs[rows],
                entropy_part,
                sink if need_weight else None,
                grad_up,
                need_hidden,
                options,
            )
            if grad_hidden is not None and block is not None:
                grad_hidden[rows] = block.to(hidden.dtype)
            if grad_low is not None and low_block is not None:
                grad_low[rows] = low_block.to(grad_low.dtype)
        returned = sink if need_weight and options.grad_accumulator is None else None
        if grad_up is not None and options.on_up_grad is not None:
            grad_up = options.on_up_grad(grad_up)
        return grad_hidden, returned, None, None, grad_low, grad_up


def log_sums(
    hidden: Tensor, weight: Tensor, temperature: float, shard: VocabShard, rows: int
) -> Tensor:
    """Return log Σ exp of each row's logits over the whole vocabulary, [N]. Not differentiable.

    Args:
        hidden, weight, temperature, shard: as of `linear_log_probs`.
        rows: rows per block.
    """
    options = _Options(1.0 / temperature, False, shard, rows, None, None, None)
    unused_targets = torch.zeros(hidden.size(0), dtype=torch.long, device=hidden.device)
    all_rows = slice(0, hidden.size(0))
    inputs = _LogitInputs(all_rows, hidden, weight, None, None, None, shard.start)
    return _statistics(inputs, unused_targets, options)[0]


def _statistics(
    inputs: _LogitInputs, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_combine` for all rows."""
    hidden = inputs.hidden
    n = hidden.size(0)
    # rows: max, Σ exp, target logit, Σ exp · x; x relative to the max
    stats = torch.zeros(4, n, dtype=softmax_dtype(hidden), device=hidden.device)
    for lo in range(0, n, options.rows):
        rows = slice(lo, min(lo + options.rows, n))
        stats[:, rows] = _running_softmax(inputs.part(rows), targets[rows], options)
    return _combine(stats, options.shard.group)


@dataclass(frozen=True)
class _LogitInputs:
    """The factors of the logits of some rows. ``rows`` is their slice of all rows, ``start`` the
    token id of the weight's first row."""

    rows: slice
    hidden: Tensor
    weight: Tensor
    low: Tensor | None
    up: Tensor | None
    kept: KeptTokens | None
    start: int

    def part(self, rows: slice) -> _LogitInputs:
        """Return the factors of these rows."""
        low = None if self.low is None else self.low[rows]
        return replace(self, rows=rows, hidden=self.hidden[rows], low=low)

    def logits(self, lo: int, hi: int) -> Tensor:
        """Return the logits of rows lo to hi of the weight: [rows, hi - lo]."""
        logits = self.hidden @ self.weight[lo:hi].t()
        if self.low is not None and self.up is not None:
            logits.addmm_(self.low, self.up[lo:hi].t())
        if self.kept is not None:
            lowest = max(_LOWEST, torch.finfo(logits.dtype).min)
            left_out = self.kept.left_out(self.rows, lo + self.start, hi + self.start)
            logits.masked_fill_(left_out, lowest)
        return logits


def _running_softmax(inputs: _LogitInputs, targets: Tensor, options: _Options) -> Tensor:
    """Return max, Σ exp(x - max), target logit (0 if another rank holds it) and
    Σ exp(x - max)·(x - max): [4, rows]."""
    hidden = inputs.hidden
    n = hidden.size(0)
    shard = options.shard
    stats = torch.zeros(4, n, dtype=softmax_dtype(hidden), device=hidden.device)
    stats[0] = _LOWEST
    local = targets - shard.start
    step = columns_per_block(hidden.device, n)
    # on a GPU the entropy costs nothing in the fused kernel; computing it always makes log-probs
    # bitwise independent of ``with_entropy``
    with_entropy = options.with_entropy or hidden.is_cuda
    for lo in range(0, shard.size, step):
        hi = min(lo + step, shard.size)
        stats = _absorb(inputs.logits(lo, hi), local - lo, stats, options.scale, with_entropy)
    return stats


@fused
def _absorb(
    logits: Tensor, targets: Tensor, stats: Tensor, scale: float, with_entropy: bool
) -> Tensor:
    """Update the statistics of `_running_softmax` with a block of logits; overwrites the block."""
    top, total, target, weighted = stats.unbind()
    width = logits.size(1)
    picked = logits.gather(1, targets.clamp(0, width - 1)[:, None])[:, 0].to(stats.dtype) * scale
    target = torch.where((targets >= 0) & (targets < width), picked, target)
    x = logits.to(stats.dtype)
    if scale != 1.0:
        x = x.mul_(scale)
    new_top = torch.maximum(top, x.amax(dim=1))
    x = x.sub_(new_top[:, None])
    fallen = top - new_top
    rescale = torch.exp(fallen)
    if with_entropy:
        p = torch.exp(x)
        weighted = rescale * (weighted + fallen * total) + torch.linalg.vecdot(p, x)
    else:
        p = x.exp_()
    return torch.stack([new_top, rescale * total + p.sum(dim=1), target, weighted])


def _combine(stats: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ exp, the target's logit and Σ p·x over the whole vocabulary."""
    top, total, target, weighted = stats.unbind()
    if group is not None and dist.get_world_size(group) > 1 and stats.numel() > 0:
        global_top = top.clone()
        dist.all_reduce(global_top, op=dist.ReduceOp.MAX, group=group)
        rescale = torch.exp(top - global_top)
        sums = torch.stack(
            [rescale * total, target, rescale * (weighted + (top - global_top) * total)]
        )
        dist.all_reduce(sums, group=group)
        top = global_top
        (total, target, weighted) = sums.unbind()
    return top + torch.log(total), target, top + weighted / total


def _backward_rows(
    inputs: _LogitInputs,
    targets: Tensor,
    log_sum: Tensor,
    grad_log_probs: Tensor,
    entropy_part: tuple[Tensor, Tensor] | None,
    weight_sink: Tensor | None,
    up_sink: Tensor | None,
    need_hidden: bool,
    options: _Options,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of these rows of ``hidden`` and ``low`` in the dtype of the softmax, and
    add the gradients of ``weight`` and ``up`` to their sinks.

    With p = softmax: d log_prob / d x_j = 1[j = target] - p_j and d entropy / d x_j = -p_j (log p_j
    + entropy).
    """
    hidden = inputs.hidden
    weight = inputs.weight
    n = hidden.size(0)
    shard = options.shard
    dtype = softmax_dtype(hidden)
    low = inputs.low
    grad_low = None if low is None else low.new_zeros(low.shape, dtype=dtype)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=dtype) if need_hidden else None
    grad_log_probs = grad_log_probs.to(dtype)[:, None]
    per_row: list[Any] = [log_sum[:, None], grad_log_probs]
    if entropy_part is not None:
        per_row.append(tuple(part.to(dtype)[:, None] for part in entropy_part))
    local = targets - shard.start
    step = columns_per_block(hidden.device, n)
    for lo in range(0, shard.size, step):
        hi = min(lo + step, shard.size)
        logits = inputs.logits(lo, hi)
        here = ((local >= lo) & (local < hi))[:, None]
        # with one target per row, the scatter neither accumulates nor sorts
        column = (local - lo).clamp(0, hi - lo - 1)[:, None]
        at_target = _logit_grad(logits.gather(1, column).to(dtype), options.scale, *per_row)
        at_target += torch.where(here, grad_log_probs * options.scale, 0.0)
        grad = _logit_grad(logits, options.scale, *per_row).scatter_(
            1, column, at_target.to(hidden.dtype)
        )
        if weight_sink is not None:
            add_product(weight_sink[lo:hi], grad.t(), hidden)
        if grad_hidden is not None:
            add_product(grad_hidden, grad, weight[lo:hi])
        if up_sink is not None and inputs.up is not None:
            assert low is not None and grad_low is not None
            # a CPU would round the product of 16-bit matrices to 16 bits
            wide = grad if grad.is_cuda else grad.to(up_sink.dtype)
            add_product(up_sink[lo:hi], wide.t(), low.to(wide.dtype))
            add_product(grad_low, grad, inputs.up[lo:hi])
    return grad_hidden, grad_low


@fused
def _logit_grad(
    logits: Tensor,
    scale: float,
    log_sum: Tensor,
    grad_log_probs: Tensor,
    entropy_part: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the gradient of the logits without the target's own term, in their dtype. Overwrites
    ``logits``. The other tensors are [rows, 1]; ``entropy_part`` is the entropy's gradient and the
    entropy."""
    x = logits.to(log_sum.dtype)
    if scale != 1.0:
        x = x.mul_(scale)
    x = x.sub_(log_sum)
    if entropy_part is None:
        grad = x.exp_().mul_(grad_log_probs * -scale)
    else:
        grad_entropy, entropy = entropy_part
        slope = (x + entropy).mul_(grad_entropy * scale).add_(grad_log_probs * scale).neg_()
        grad = x.exp_().mul_(slope)
    return grad.to(logits.dtype)
