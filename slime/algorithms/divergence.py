"""Divergences of a student's distribution from a teacher's, computed from hidden states without
holding a whole [tokens, vocabulary] matrix of either.

    student  hidden [N, H], weight [V, H] ─┐  block by block, twice:
                                           ├─ 1. log Σ exp of both    2. Σ of the divergence's terms
    teacher  hidden [N, G], weight [V, G] ─┘  backward: the same blocks again

With P the teacher's and S the student's distribution of one token:

    reverse_kl   KL(S ‖ P) = Σ S log(S / P)
    forward_kl   KL(P ‖ S) = Σ P log(P / S)
    jsd          β KL(P ‖ M) + (1 - β) KL(S ‖ M),  M = β P + (1 - β) S

Source: Agarwal et al., "On-Policy Distillation of Language Models" (GKD, arXiv:2306.13649),
section 2 and eq. 1.

With only the teacher's k most likely tokens, all other tokens form one more outcome, the rest. The
divergence of these k + 1 outcomes is at most that of the whole vocabulary. Unlike the sum over k
tokens without the rest, it does not fall when the student moves probability away from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.fusion import fused
from slime.algorithms.logprobs import (
    VocabShard,
    columns_per_block,
    log_sums,
    rows_per_block,
    softmax_dtype,
)
from slime.algorithms.products import add_product

DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: tuple[DivergenceKind, ...] = get_args(DivergenceKind)

#: Minimum probability of the rest. Below it, rounding leaves no digits of 1 - Σ p.
_MIN_REST = 1e-6


@dataclass(frozen=True)
class OutputRows:
    """Hidden states and output layer, whose product is a model's logits.

    Attributes:
        hidden: [N, H], one row per predicted token.
        weight: [V, H], the output layer (this rank's rows of it).
        temperature: logits are divided by it.
    """

    hidden: Tensor
    weight: Tensor
    temperature: float = 1.0

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Return the logits [rows, columns], before division by the temperature."""
        return self.hidden[rows] @ self.weight[columns].t()


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens of each row's distribution, in falling order.

    Attributes:
        ids: int64 [N, k].
        log_probs: [N, k], normalised over the whole vocabulary, so the sum is less than 1.
    """

    ids: Tensor
    log_probs: Tensor


# -- the whole vocabulary --------------------------------------------------------------------------


def divergence(
    student: OutputRows,
    teacher: OutputRows,
    kind: DivergenceKind,
    *,
    beta: float = 0.5,
    shard: VocabShard | None = None,
    chunk_size: int = -1,
    grad_accumulator: Tensor | None = None,
) -> Tensor:
    """Return the divergence of each row, [N], over the whole vocabulary.

    Products run in the dtype of the inputs, everything else in float32 (float64 for float64
    inputs). Differentiable once, in the student's ``hidden`` and ``weight``; the teacher gets no
    gradient. With a sharded vocabulary the gradient of ``hidden`` is this shard's part, as in
    `slime.algorithms.logprobs.linear_log_probs`.

    Args:
        beta: weight of the teacher in the mixture of ``jsd``, between 0 and 1.
        shard: the rows that both weights hold; default: all rows, without padding.
        chunk_size: rows per block; -1: at most 8192.
        grad_accumulator: [V, H]; the gradient of ``weight`` is added to it instead of returned.

    Example (the student is uniform, the teacher gives 3/4 to the first of two tokens):
        >>> one = torch.ones(1, 1)
        >>> student = OutputRows(one, torch.zeros(2, 1))
        >>> teacher = OutputRows(one, torch.tensor([[1.0986123], [0.0]]))
        >>> [round(divergence(student, teacher, kind).item(), 4) for kind in DIVERGENCES]
        [0.1438, 0.1308, 0.0338]
    """
    options = _options(student, shard, chunk_size, grad_accumulator, kind, beta)
    found: Tensor = _Divergence.apply(student.hidden, student.weight, teacher, options)
    return found


@dataclass(frozen=True)
class _BlockOptions:
    temperature: float
    shard: VocabShard
    rows: int
    grad_accumulator: Tensor | None
    kind: DivergenceKind
    beta: float

    def blocks(self, hidden: Tensor) -> Iterator[tuple[slice, list[slice]]]:
        """Yield blocks of rows, each with its blocks of columns."""
        n = hidden.size(0)
        for lo in range(0, n, self.rows):
            rows = slice(lo, min(lo + self.rows, n))
            step = columns_per_block(hidden.device, rows.stop - rows.start)
            size = self.shard.size
            yield rows, [slice(at, min(at + step, size)) for at in range(0, size, step)]

    def reduce(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks that hold the vocabulary."""
        group = self.shard.group
        if group is not None and dist.get_world_size(group) > 1 and values.numel() > 0:
            dist.all_reduce(values, group=group)
        return values


def _options(
    student: OutputRows,
    shard: VocabShard | None,
    chunk_size: int,
    grad_accumulator: Tensor | None = None,
    kind: DivergenceKind = "reverse_kl",
    beta: float = 0.5,
) -> _BlockOptions:
    return _BlockOptions(
        temperature=student.temperature,
        shard=VocabShard(0, student.weight.size(0)) if shard is None else shard,
        rows=rows_per_block(student.hidden, chunk_size),
        grad_accumulator=grad_accumulator,
        kind=kind,
        beta=beta,
    )


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: OutputRows, options: _BlockOptions
    ) -> Tensor:
        student = OutputRows(hidden, weight, options.temperature)
        log_sums = _log_sums([student, teacher], options)
        # rows: the divergence, and Σ S ∂D/∂S, which centres the gradient
        sums = torch.zeros(2, hidden.size(0), dtype=softmax_dtype(hidden), device=hidden.device)
        for rows, columns in options.blocks(hidden):
            for part in columns:
                sums[:, rows] += _row_sums(
                    student.logits(rows, part),
                    teacher.logits(rows, part),
                    log_sums[:, rows],
                    1.0 / student.temperature,
                    1.0 / teacher.temperature,
                    options.kind,
                    options.beta,
                )
        total, centre = options.reduce(sums).unbind()
        ctx.save_for_backward(hidden, weight, teacher.hidden, teacher.weight, log_sums, centre)
        ctx.options = options
        ctx.teacher_temperature = teacher.temperature
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, teacher_hidden, teacher_weight, log_sums, centre = ctx.saved_tensors
        options: _BlockOptions = ctx.options
        student = OutputRows(hidden, weight, options.temperature)
        teacher = OutputRows(teacher_hidden, teacher_weight, ctx.teacher_temperature)
        grads = _StudentGrads(ctx, student, options)
        per_row = torch.stack([*log_sums, centre, grad.to(log_sums.dtype)])
        for rows, columns in options.blocks(hidden):
            for part in columns:
                slopes = _slopes(
                    student.logits(rows, part),
                    teacher.logits(rows, part),
                    per_row[:, rows],
                    1.0 / student.temperature,
                    1.0 / teacher.temperature,
                    options.kind,
                    options.beta,
                )
                grads.add(slopes, rows, part)
        return *grads.gradients(), None, None


class _StudentGrads:
    """The gradients of the student's hidden states and weight, accumulated over blocks."""

    def __init__(self, ctx: Any, student: OutputRows, options: _BlockOptions) -> None:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        self._student = student
        self._is_given = options.grad_accumulator is not None
        self._hidden: Tensor | None = None
        self._weight: Tensor | None = None
        if need_hidden:
            wide = softmax_dtype(student.hidden)
            self._hidden = torch.zeros_like(student.hidden, dtype=wide)
        if need_weight:
            given = options.grad_accumulator
            self._weight = torch.zeros_like(student.weight) if given is None else given

    def add(self, slopes: Tensor, rows: slice, columns: slice) -> None:
        """Add a block's contribution; ``slopes`` is the gradient of its logits."""
        if self._weight is not None:
            add_product(self._weight[columns], slopes.t(), self._student.hidden[rows])
        if self._hidden is not None:
            add_product(self._hidden[rows], slopes, self._student.weight[columns])

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients for autograd: of ``hidden``, and of ``weight`` unless a given
        accumulator has it."""
        hidden = None if self._hidden is None else self._hidden.to(self._student.hidden.dtype)
        return hidden, None if self._is_given else self._weight


def _log_sums(models: list[OutputRows], options: _BlockOptions) -> Tensor:
    """Return log Σ exp of each model's logits per row, over all shards: [models, N]."""
    found = [
        log_sums(model.hidden, model.weight, model.temperature, options.shard, options.rows)
        for model in models
    ]
    return torch.stack(found)


def _terms(
    log_s: Tensor, log_p: Tensor, kind: DivergenceKind, beta: float
) -> tuple[Tensor, Tensor]:
    """Return each outcome's term of the divergence D, and S ∂D/∂S up to a multiple of S, which the
    gradient of the softmax cancels."""
    if kind == "reverse_kl":
        term = torch.exp(log_s) * (log_s - log_p)
        return term, term
    if kind == "forward_kl":
        p = torch.exp(log_p)
        return p * (log_p - log_s), -p
    log_m = torch.logaddexp(log_p + math.log(beta), log_s + math.log1p(-beta))
    of_student = (1.0 - beta) * torch.exp(log_s) * (log_s - log_m)
    return beta * torch.exp(log_p) * (log_p - log_m) + of_student, of_student


@fused
def _row_sums(
    student: Tensor,
    teacher: Tensor,
    log_sums: Tensor,
    student_scale: float,
    teacher_scale: float,
    kind: DivergenceKind,
    beta: float,
) -> Tensor:
    """Return the sums of `_terms` over a block: [2, rows]."""
    log_s = student.to(log_sums.dtype) * student_scale - log_sums[0][:, None]
    log_p = teacher.to(log_sums.dtype) * teacher_scale - log_sums[1][:, None]
    term, slope = _terms(log_s, log_p, kind, beta)
    return torch.stack([term.sum(dim=1), slope.sum(dim=1)])


@fused
def _slopes(
    student: Tensor,
    teacher: Tensor,
    per_row: Tensor,
    student_scale: float,
    teacher_scale: float,
    kind: DivergenceKind,
    beta: float,
) -> Tensor:
    """Return the gradient of the student's logits in a block, in their dtype. ``per_row``: both
    log-sums, the centre, and the gradient of the divergence."""
    log_sum_s, log_sum_p, centre, grad = per_row[:, :, None].unbind()
    log_s = student.to(per_row.dtype) * student_scale - log_sum_s
    log_p = teacher.to(per_row.dtype) * teacher_scale - log_sum_p
    _, slope = _terms(log_s, log_p, kind, beta)
    slope = (slope - torch.exp(log_s) * centre) * (grad * student_scale)
    return slope.to(student.dtype)


# -- the most likely tokens ------------------------------------------------------------------------


@torch.no_grad()
def top_tokens(
    rows: OutputRows, k: int, *, shard: VocabShard | None = None, chunk_size: int = -1
) -> TopTokens:
    """Return the ``k`` most likely tokens of each row.

    Args:
        k: at most the size of the vocabulary.
        shard, chunk_size: as of `divergence`. Collective if the vocabulary is sharded.

    Example:
        >>> found = top_tokens(OutputRows(torch.ones(1, 1), torch.zeros(4, 1)), 2)
        >>> found.ids.shape, [round(v, 4) for v in found.log_probs[0].tolist()]
        (torch.Size([1, 2]), [-1.3863, -1.3863])
    """
    options = _options(rows, shard, chunk_size)
    hidden = rows.hidden
    log_sum = _log_sums([rows], options)[0]
    n = hidden.size(0)
    values = torch.full((n, k), -math.inf, dtype=log_sum.dtype, device=hidden.device)
    ids = torch.zeros((n, k), dtype=torch.long, device=hidden.device)
    for part, columns in options.blocks(hidden):
        for block in columns:
            logits = rows.logits(part, block).to(values.dtype) / rows.temperature
            new, at = logits.topk(min(k, logits.size(1)), dim=1)
            at = at + (block.start + options.shard.start)
            values[part], ids[part] = _best(
                torch.cat([values[part], new], dim=1), torch.cat([ids[part], at], dim=1), k
            )
    group = options.shard.group
    if group is not None and dist.get_world_size(group) > 1 and n > 0:
        values, ids = _best(_gather_columns(values, group), _gather_columns(ids, group), k)
    return TopTokens(ids, values - log_sum[:, None])


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, at = values.topk(k, dim=1)
    return best, ids.gather(1, at)


def _gather_columns(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the [N, k] of every rank: [N, ranks × k]."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def log_probs_at(
    student: OutputRows,
    ids: Tensor,
    *,
    shard: VocabShard | None = None,
    chunk_size: int = -1,
    grad_accumulator: Tensor | None = None,
) -> Tensor:
    """Return the log-probs of several tokens per row, differentiable like `divergence`.

    Args:
        ids: int64 [N, k].
        shard, chunk_size, grad_accumulator: as of `divergence`.
    Returns:
        [N, k], float32 (float64 for float64 inputs).

    Example:
        >>> rows = OutputRows(torch.ones(1, 1), torch.zeros(4, 1))
        >>> [round(v, 4) for v in log_probs_at(rows, torch.tensor([[0, 3]]))[0].tolist()]
        [-1.3863, -1.3863]
    """
    options = _options(student, shard, chunk_size, grad_accumulator)
    found: Tensor = _LogProbsAt.apply(student.hidden, student.weight, ids, options)
    return found


class _LogProbsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, options: _BlockOptions
    ) -> Tensor:
        student = OutputRows(hidden, weight, options.temperature)
        log_sum = _log_sums([student], options)[0]
        picked = torch.zeros(ids.shape, dtype=log_sum.dtype, device=hidden.device)
        local = ids - options.shard.start
        for rows, columns in options.blocks(hidden):
            for part in columns:
                here, column = _within(local[rows], part)
                logits = student.logits(rows, part).gather(1, column).to(log_sum.dtype)
                picked[rows] += torch.where(here, logits / student.temperature, 0.0)
        ctx.save_for_backward(hidden, weight, ids, log_sum)
        ctx.options = options
        return options.reduce(picked) - log_sum[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, ids, log_sum = ctx.saved_tensors
        options: _BlockOptions = ctx.options
        student = OutputRows(hidden, weight, options.temperature)
        grads = _StudentGrads(ctx, student, options)
        grad = grad.to(log_sum.dtype) / student.temperature
        local = ids - options.shard.start
        for rows, columns in options.blocks(hidden):
            for part in columns:
                here, column = _within(local[rows], part)
                logits = student.logits(rows, part)
                x = logits.to(log_sum.dtype) / student.temperature
                slopes = -torch.exp(x - log_sum[rows, None]) * grad[rows].sum(dim=1)[:, None]
                slopes.scatter_add_(1, column, torch.where(here, grad[rows], 0.0))
                grads.add(slopes.to(logits.dtype), rows, part)
        return *grads.gradients(), None, None


def _within(local: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return which tokens are in a block, and their columns in it (0 for the others)."""
    here = (local >= part.start) & (local < part.stop)
    return here, torch.where(here, local - part.start, 0)


def top_divergence(
    log_probs: Tensor, teacher: Tensor, kind: DivergenceKind, *, beta: float = 0.5
) -> Tensor:
    """Return the divergence of each row over k tokens and, as one more outcome, the rest of the
    vocabulary.

    Args:
        log_probs: [N, k], the student's log-probs, with gradient.
        teacher: [N, k], the teacher's log-probs of the same tokens.
        beta: as of `divergence`.
    Returns:
        [N], at most the result of `divergence`.
    Source: the rest as an outcome, as in self-distillation fine-tuning (arXiv:2601.19897).

    Example (the token has the same probability in both, and so has the rest):
        >>> half = torch.tensor([[0.5]]).log()
        >>> top_divergence(half, half, "reverse_kl").item()
        0.0
    """
    term, _ = _terms(_with_rest(log_probs), _with_rest(teacher), kind, beta)
    return term.sum(dim=1)


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: [N, k] → [N, k + 1]."""
    largest = math.log1p(-_MIN_REST)
    known = torch.logsumexp(log_probs, dim=1, keepdim=True).clamp(max=largest)
    return torch.cat([log_probs, torch.log(-torch.expm1(known))], dim=1)
