"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) and the short convolution before it, in
torch, for packed tokens.

A head keeps a matrix S [key, value]. Each token first decays S, then adds the difference between
its value and what S returns for its key, and reads S with its query:

    S ← e^g · S        d = β · (v − Sᵀk)        S ← S + k dᵀ        o = Sᵀq

`recurrent_step` does this for one token per sequence. `chunked` does it for runs of tokens: within
a chunk of C tokens the writes are the solution of a triangular system (WY representation,
arXiv:2406.06484, section 3), and a loop goes over chunks. A run starts with zeros, with a given
state, or with the final state of another run: samples that share a prompt continue the prompt's
run.

The trainer and the embedded engine use these functions on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens per chunk. If all runs fit into one of `_SMALL_CHUNKS`, that size is used.
CHUNK = 64
_SMALL_CHUNKS = (16, 32)
_L2_EPS = 1e-6

Keep = Callable[[int, int, Tensor], None]
"""(run, number of its tokens so far, state [heads, key, value]): called between chunks."""


@dataclass(frozen=True)
class ChunkStage:
    """Runs that can be computed in parallel, the longest first.

    Attributes:
        runs: numbers of the runs.
        parents: for each run, the index of the run that it continues in ``runs`` of the previous
            stage; None for runs without a parent.
        steps: (first chunk, number of chunks) per step; step n computes the n-th chunk of each run
            that has one.
    """

    runs: Tensor
    parents: Tensor | None
    steps: list[tuple[int, int]]


@dataclass(frozen=True)
class TokenRuns:
    """How packed tokens are split into runs and chunks.

    Attributes:
        lengths: tokens of each run, at least 1, in the order of the packed tokens.
        size: tokens per chunk.
        gather: int64 [chunks · size], the token of each cell; ``sum(lengths)`` for cells after the
            end of a run.
        cells: int64 [tokens], the cell of each token.
        stages: runs without a parent, then the runs that continue them.
    """

    lengths: list[int]
    size: int
    gather: Tensor
    cells: Tensor
    stages: list[ChunkStage]

    @staticmethod
    def of(
        lengths: Sequence[int],
        parents: Sequence[int] | None = None,
        device: torch.device | None = None,
        size: int | None = None,
    ) -> TokenRuns:
        """Split runs into chunks.

        Args:
            parents: the number of the run that each run continues, or -1. A parent has no parent
                itself.
            size: tokens per chunk; None: the smallest size that fits the longest run, or `CHUNK`.

        Example (two runs of one chunk each, the second continues the first):
            >>> runs = TokenRuns.of([3, 2], [-1, 0])
            >>> runs.size, runs.gather[:4].tolist(), runs.cells.tolist(), len(runs.stages)
            (16, [0, 1, 2, 5], [0, 1, 2, 16, 17], 2)
        """
        parents = [-1] * len(lengths) if parents is None else parents
        total = sum(lengths)
        longest = max(lengths)
        if size is None:
            size = next((small for small in _SMALL_CHUNKS if longest <= small), CHUNK)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        gather: list[Tensor] = []
        stages: list[ChunkStage] = []
        earlier: list[int] = []
        for continues in (False, True):
            members = [run for run in range(len(lengths)) if (parents[run] >= 0) == continues]
            members.sort(key=lambda run: -lengths[run])
            steps = []
            passes = -(-max((lengths[run] for run in members), default=0) // size)
            for step in range(passes):
                active = [run for run in members if lengths[run] > step * size]
                steps.append((len(gather), len(active)))
                for run in active:
                    offsets = torch.arange(step * size, (step + 1) * size)
                    inside = offsets < lengths[run]
                    gather.append(torch.where(inside, starts[run] + offsets, total))
            if members:
                places = [earlier.index(parents[run]) for run in members] if continues else None
                indices = None if places is None else torch.tensor(places, device=device)
                stages.append(ChunkStage(torch.tensor(members, device=device), indices, steps))
            earlier = members
        tokens_of = torch.cat(gather)
        cells = torch.empty(total + 1, dtype=torch.long)
        cells[tokens_of] = torch.arange(tokens_of.numel())
        cells = cells[:total].to(device)
        return TokenRuns(list(lengths), size, tokens_of.to(device), cells, stages)

    def padded(self, x: Tensor) -> Tensor:
        """[tokens, heads, …] → [chunks, heads, size, …], with zeros after the ends of runs. Rows of
        ``x`` after the last token are ignored."""
        tokens = x[: self.cells.numel()]
        rows = torch.cat([tokens, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.gather)
        return rows.view(-1, self.size, *x.shape[1:]).transpose(1, 2)


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    runs: TokenRuns,
    initial: Tensor | None = None,
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to runs of packed tokens, in float32 or wider. Differentiable.

    Args:
        query, key: [tokens, key heads, key width], from `normalised`. Each key head serves
            ``value heads / key heads`` neighbouring value heads.
        value: [tokens, value heads, value width].
        decay: [tokens, value heads], the logarithm g ≤ 0 of the factor.
        beta: [tokens, value heads], in 0 … 1.
        initial: [runs, value heads, key width, value width], initial states of runs without a
            parent; None: zeros.
        keep: receives the state after every chunk of a run except the last.
    Returns:
        (outputs [tokens, value heads, value width], final states of all runs, shaped as
        ``initial``).
    """
    heads = value.size(1)
    repeats = heads // key.size(1)
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v = (runs.padded(x.to(dtype)) for x in (query, key, value))
    b = runs.padded(beta.to(dtype)[..., None])
    # float64, as the gradient of a decay is a difference of nearly equal sums over a chunk
    total = runs.padded(decay.double()[..., None])[..., 0].cumsum(-1)
    # without the diagonal, whose gradient is in both sums and would hide that of a small factor
    gaps = (total[..., :, None] - total[..., None, :]).tril(-1)
    fading = gaps.to(dtype).exp()
    kept = total.exp()[..., None].to(dtype)
    overlap = _repeated(k @ k.transpose(-1, -2), repeats) * fading  # read below the diagonal only
    read = (_repeated(q @ k.transpose(-1, -2), repeats) * fading).tril()
    q = _repeated(q, repeats)
    k = _repeated(k, repeats)
    writes = torch.linalg.solve_triangular(
        b * overlap, torch.cat([b * v, b * kept * k], dim=-1), upper=False, unitriangular=True
    )
    new, known = writes.split([v.size(-1), k.size(-1)], dim=-1)
    q = q * kept
    k = k * (total[..., -1:] - total).exp()[..., None].to(dtype)
    last = kept[..., -1:, :]
    states: Tensor | None = None
    order: list[Tensor] = []
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    for stage in runs.stages:
        if stage.parents is not None:
            assert states is not None
            state = states.index_select(0, stage.parents)
        elif initial is not None:
            state = initial.to(dtype).index_select(0, stage.runs)
        else:
            state = v.new_zeros(stage.runs.numel(), heads, k.size(-1), v.size(-1))
        ended: list[Tensor] = []
        for number, (first, count) in enumerate(stage.steps):
            if count < state.size(0):
                ended.append(state[count:])
                state = state[:count]
            if keep is not None and number:
                for run, one in zip(stage.runs.tolist(), state, strict=False):
                    keep(run, number * runs.size, one)
            part = slice(first, first + count)
            written = new[part] - known[part] @ state
            outputs.append(q[part] @ state + read[part] @ written)
            state = state * last[part] + k[part].transpose(-1, -2) @ written
        finals.append(torch.cat([state, *reversed(ended)]))
        order.append(stage.runs)
        states = finals[0]
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, runs.cells)
    return output, torch.cat(finals).index_select(0, torch.cat(order).argsort())


def recurrent_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to one token of each sequence.

    Args:
        query, key, value, decay, beta: as of `chunked`, a row for each sequence.
        state: [sequences, value heads, key width, value width].
    Returns:
        (outputs [sequences, value heads, value width], new states), in the dtype of ``state``.
    """
    repeats = value.size(1) // key.size(1)
    q, k = (_repeated(x.to(state.dtype), repeats) for x in (query, key))
    faded = state * decay.to(state.dtype).exp()[..., None, None]
    known = (k[..., None] * faded).sum(-2)
    written = beta.to(state.dtype)[..., None] * (value.to(state.dtype) - known)
    new = faded + k[..., None] * written[..., None, :]
    return (q[..., None] * new).sum(-2), new


def _repeated(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def normalised(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Scale queries and keys [tokens, heads, width] to norm 1 (queries: width^−½), in float32 or
    wider."""
    q, k = (_unit(_wide(x)) for x in (query, key))
    return q * query.size(-1) ** -0.5, k


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


def decay_of(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = −e^A · softplus(a + bias), in float32 or wider; a [tokens, value heads]."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))


def gated_norm(output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over each head, times ``weight`` (not 1 + weight), times silu(gate).

    Args:
        output, gate: [tokens, heads, width].
    Returns:
        the same shape in the dtype of ``gate``.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    normed = F.rms_norm(output.to(dtype), weight.shape, weight.to(dtype), eps)
    return (normed * F.silu(gate.to(dtype))).to(gate.dtype)


# -- the convolution -------------------------------------------------------------------------------


def reached(lengths: Sequence[int], parents: Sequence[int], width: int) -> Tensor:
    """Return the rows that the convolution of each packed token reads.

    Args:
        lengths, parents: as of `TokenRuns.of`.
        width: width of the convolution.
    Returns:
        int64 [width, tokens], oldest first; ``sum(lengths)`` stands for a row of zeros before the
        first token of a sample.

    Example (the second run continues the first):
        >>> reached([2, 1, 1], [-1, 0, -1], 2).tolist()
        [[4, 0, 1, 4], [0, 1, 2, 3]]
    """
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    columns = []
    for run, length in enumerate(lengths):
        before = torch.full((width - 1,), total)
        parent = parents[run]
        if parent >= 0:
            known = min(width - 1, lengths[parent])
            end = starts[parent] + lengths[parent]
            before[width - 1 - known :] = torch.arange(end - known, end)
        line = torch.cat([before, torch.arange(starts[run], starts[run] + length)])
        columns.append(torch.stack([line[j : j + length] for j in range(width)]))
    return torch.cat(columns, dim=1)


class CausalConv(torch.autograd.Function):
    """silu of a depthwise convolution over the rows that each token reads, in float32 or wider. For
    the backward pass it saves only the inputs.

    Args of ``apply``: rows [rows, channels]; weight [channels, width]; reads int64 [width, tokens]
    as from `reached`, where the number of rows stands for zeros. Returns [tokens, channels].
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, reads: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, reads)
        return F.silu(_convolved(_wide(_with_zeros(rows)), _wide(weight), reads))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, reads = ctx.saved_tensors
        extended = _wide(_with_zeros(rows))
        wide_weight = _wide(weight)
        before = _convolved(extended, wide_weight, reads)
        grad = torch.ops.aten.silu_backward(grad, before)
        grad_rows = torch.zeros_like(extended)
        grad_weight = torch.empty_like(wide_weight)
        for j, index in enumerate(reads):
            grad_rows.index_add_(0, index, grad * wide_weight[:, j])
            grad_weight[:, j] = (grad * extended.index_select(0, index)).sum(0)
        return grad_rows[:-1].to(rows.dtype), grad_weight.to(weight.dtype), None


def convolved_step(window: Tensor, weight: Tensor) -> Tensor:
    """Compute `CausalConv` for the last token of each sequence.

    Args:
        window: [sequences, channels, width], the inputs of the convolution, oldest first.
        weight: [channels, width].
    """
    window = _wide(window)
    weight = _wide(weight)
    total = window[..., 0] * weight[:, 0]
    for j in range(1, weight.size(1)):  # the order of additions does not depend on the batch size
        total.addcmul_(window[..., j], weight[:, j])
    return F.silu(total)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.size(1))])


def _convolved(extended: Tensor, weight: Tensor, reads: Tensor) -> Tensor:
    total = extended.index_select(0, reads[0]) * weight[:, 0]
    for j, index in enumerate(reads[1:], start=1):
        total.addcmul_(extended.index_select(0, index), weight[:, j])
    return total
