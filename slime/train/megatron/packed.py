"""A micro-batch as the model sees it: sequences one after the other, no padding between them.

    samples          p p p r r r     q q r r
    tokens   [1, T]  p p p r r       q q r        a sample's last token predicts nothing and is left out
    rows     [N]         2 3 4         6 7        the positions whose hidden state predicts a response token
    targets  [N]         r r r         r r

Only ``rows`` go through the vocabulary product: with long prompts that saves most of it.

Under context parallelism a rank keeps its stripe of ``tokens``, ``positions``, ``rows`` and ``targets``
(`slime.train.megatron.context`); what describes whole sequences and whole samples stays whole.

Samples of one prompt may share it: the prompt is computed once and each response is a branch behind it, which attends
to the prompt and to itself. The numbers are those of separate sequences (the gradients of the branches add up in the
prompt), for a fraction of the tokens when prompts are long and responses short:

    p p p r r r , p p p s s   ─►   p p p r r s        positions 0 1 2 3 4 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.train.megatron.context import ContextGroup, ContextSplit
from slime.train.megatron.moe_router import Routing
from slime.train.megatron.padded import PaddedLayout, padded_layout


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus what is worth computing once per micro-batch.

    Attributes:
        lengths: tokens of each sequence, padding sequence included.
        positions: int64 [T], 0-based within each sample.
        padded: the same tokens as dense blocks; None for the packed kernel.
        rotary: (cos, sin) of every position, filled by the model on first use.
        context: how the tokens are divided over a context-parallel group; None where one rank has all.
        routing: what the routers of experts are told; None for dense models.
    """

    lengths: list[int] = field(default_factory=list)
    positions: Tensor | None = None
    padded: PaddedLayout | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    context: ContextSplit | None = None
    routing: Routing | None = None


@dataclass
class PackedMicroBatch:
    """See the module's drawing. N = sum of ``response_lengths``; all tensors on the trainer's device.

    Attributes:
        samples: indices into the `TrainBatch` of this rank; rows and targets are in their order.
        response_lengths: int64 [samples].
        num_tokens: T, over all ranks of a context-parallel group.
        origins: int64 [T], in host memory: which of the samples' tokens (one after the other, last ones included) each
            token is, -1 for padding.
    """

    samples: list[int]
    tokens: Tensor
    sequences: PackedSequences
    rows: Tensor
    targets: Tensor
    response_lengths: Tensor
    num_tokens: int
    origins: Tensor

    def split(self, values: Tensor) -> list[Tensor]:
        """Flat [N] values as one tensor per sample."""
        return list(torch.split(values, self.response_lengths.tolist()))


@dataclass(frozen=True)
class PackingOptions:
    """How to lay samples out.

    Attributes:
        device: where the tensors go.
        multiple: the total length is padded to a multiple of it (sequence parallelism, kernels).
        at_least: and to this length or more (a pipeline that wants all micro-batches alike).
        dense: attention runs on dense blocks (CPU; float32) instead of a kernel for packed sequences.
        pair_cost: what a pair of query and key costs in attention, as a fraction of what a token costs everywhere
            else. Samples share a prompt where that is cheaper by this measure. None: never share (kernels without
            branches).
        context: the context-parallel group; its size divides ``multiple``.
    """

    device: torch.device
    multiple: int = 1
    at_least: int = 0
    dense: bool = True
    pair_cost: float | None = None
    context: ContextGroup = field(default_factory=ContextGroup)


def pack(
    samples: Sequence[int], tokens: Sequence[Tensor], response_lengths: Sequence[int], options: PackingOptions
) -> PackedMicroBatch:
    """Pack the given samples of a rank into one micro-batch.

    Args:
        samples: indices into ``tokens`` and ``response_lengths``; empty for a rank that has nothing left to train,
            which then computes on a sequence of padding to take part in every collective.
        tokens: int64 [L_i], prompt and response.
    Raises:
        ValueError: a sample whose response leaves no prompt token to predict its first token from.

    Example:
        >>> mb = pack([0], [torch.tensor([7, 8, 9])], [2], PackingOptions(torch.device("cpu")))
        >>> mb.tokens.tolist(), mb.rows.tolist(), mb.targets.tolist()
        ([[7, 8]], [0, 1], [8, 9])
    """
    responses = [response_lengths[i] for i in samples]
    for i, response in zip(samples, responses):
        if response >= tokens[i].numel():
            raise ValueError(f"sample {i} of the batch has {response} response tokens but {tokens[i].numel()} in all")
    stream = _lay_out(samples, tokens, responses, options)
    targets = torch.cat([_NONE, *(tokens[i][tokens[i].numel() - r :] for i, r in zip(samples, responses))])
    num_tokens, place = stream.tokens.numel(), options.context
    sequences = _describe(stream.branches, options)
    if place.size > 1:
        split = ContextSplit.of(place, stream.rows)
        targets = split.mine(targets)
        stream = stream.stripe(split)
        sequences.context = ContextSplit(place, [order.to(options.device) for order in split.order])
    sequences.positions = stream.positions.to(options.device)
    return PackedMicroBatch(
        samples=list(samples),
        tokens=stream.tokens[None].to(options.device),
        sequences=sequences,
        rows=stream.rows.to(options.device),
        targets=targets.to(options.device),
        response_lengths=torch.tensor(responses, dtype=torch.long, device=options.device),
        num_tokens=num_tokens,
        origins=stream.origins,
    )


_NONE = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class _Stream:
    """The tokens of a micro-batch one after the other, in host memory; see `PackedMicroBatch` for the attributes."""

    tokens: Tensor
    positions: Tensor
    origins: Tensor
    rows: Tensor
    branches: list[list[int]]

    def stripe(self, split: ContextSplit) -> _Stream:
        """What a rank of a context-parallel group holds of it."""
        place = split.place
        tokens, positions, origins = map(place.stripe, (self.tokens, self.positions, self.origins))
        return _Stream(tokens, positions, origins, split.mine(self.rows) // place.size, self.branches)


def _lay_out(
    samples: Sequence[int], tokens: Sequence[Tensor], responses: list[int], options: PackingOptions
) -> _Stream:
    """Prompts, the responses behind them, and the padding."""
    lengths = [tokens[i].numel() for i in samples]
    before = list(accumulate(lengths, initial=0))
    prompts = [tokens[i][: length - response] for i, length, response in zip(samples, lengths, responses)]
    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    origins: list[Tensor] = []
    rows = [_NONE] * len(responses)
    branches: list[list[int]] = []
    start = 0
    for members in _families(prompts, responses, options.pair_cost):
        length = prompts[members[0]].numel()
        pieces.append(prompts[members[0]])
        positions.append(torch.arange(length))
        origins.append(before[members[0]] + positions[-1])
        branch_lengths = [length]
        end = start + length
        for member in members:
            own = max(responses[member] - 1, 0)
            pieces.append(tokens[samples[member]][length : length + own])
            positions.append(torch.arange(length, length + own))
            origins.append(before[member] + positions[-1])
            if responses[member]:
                rows[member] = torch.cat([torch.tensor([start + length - 1]), torch.arange(end, end + own)])
            branch_lengths.append(own)
            end += own
        branches.append(branch_lengths)
        start = end
    padding = -(-max(start, options.at_least, 1) // options.multiple) * options.multiple - start
    if padding:
        pieces.append(torch.zeros(padding, dtype=torch.long))
        positions.append(torch.arange(padding))
        origins.append(torch.full((padding,), -1))
        branches.append([padding])
    return _Stream(torch.cat(pieces), torch.cat(positions), torch.cat(origins), torch.cat([_NONE, *rows]), branches)


def _families(prompts: list[Tensor], responses: list[int], pair_cost: float | None) -> list[list[int]]:
    """Which samples are computed together behind one prompt; every sample alone when ``pair_cost`` is None."""
    if pair_cost is None:
        return [[i] for i in range(len(prompts))]
    by_prompt: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt.numpy().tobytes(), []).append(i)
    families: list[list[int]] = []
    for members in by_prompt.values():
        mean_response = sum(responses[i] for i in members) / len(members)
        size = branches_per_prompt(prompts[members[0]].numel(), mean_response, len(members), pair_cost)
        families += [members[k : k + size] for k in range(0, len(members), size)]
    return families


def branches_per_prompt(prompt: int, response: float, siblings: int, pair_cost: float) -> int:
    """How many of ``siblings`` should share one computation of their prompt.

    A family of m costs ``prompt + m · response`` tokens and that squared pairs in a dense attention block.

    Example (a long prompt is shared by all; long responses are better off alone):
        >>> branches_per_prompt(45, 12, 8, pair_cost=1 / 900), branches_per_prompt(45, 500, 8, pair_cost=1 / 900)
        (8, 1)
    """

    def cost(m: int) -> float:
        families = -(-siblings // m)
        tokens = prompt + m * response
        return families * (tokens + pair_cost * tokens * tokens)

    return min(range(1, siblings + 1), key=cost)


def _describe(branches: list[list[int]], options: PackingOptions) -> PackedSequences:
    """The whole stream, as attention sees it; positions are a rank's own."""
    lengths = [sum(family) for family in branches]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends.to(options.device),
        cu_seqlens_kv=ends.to(options.device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        padded=padded_layout(branches).to(options.device) if options.dense else None,
    )
