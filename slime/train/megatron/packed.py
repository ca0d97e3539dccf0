"""A micro-batch as the model sees it: sequences one after the other, no padding between them.

    sequences      [p p p r r] [p p r r r]
    tokens  [1, T]  p p p r r   p p r r r  (+ one sequence of padding where the layout wants a multiple)
    rows    [N]         2 3       6 7 8      the positions whose hidden state predicts a response token
    targets [N]         r r       r r r

Only ``rows`` go through the vocabulary product: with long prompts that saves most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

# sequences of one attention call are padded to the longest of them; more waste than this starts another call
_MAX_PADDED_RATIO = 1.25


@dataclass
class PaddedLayout:
    """Packed tokens as dense blocks, for devices without a packed attention kernel.

    Sequences of similar length share a block of shape [batch, length]; its cells past the end of a sequence repeat the
    sequence's last token, which no real query sees under the causal mask.

    Attributes:
        shapes: (batch, length) of each block.
        gather: int64 [cells], packed position of each cell, block after block.
        cells: int64 [T], the cell of each packed position.
        padding: bool [cells, 1, 1].
        identity: one block without padding: packed and padded order are the same.
    """

    shapes: list[tuple[int, int]]
    gather: Tensor
    cells: Tensor
    padding: Tensor
    identity: bool


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus what is worth computing once per micro-batch.

    Attributes:
        lengths: tokens of each sequence, padding sequence included.
        positions: int64 [T], 0-based within each sequence.
        padded: the same tokens as dense blocks (CPU only).
        rotary: (cos, sin) of every position, filled by the model on first use.
    """

    lengths: list[int] = field(default_factory=list)
    positions: Tensor | None = None
    padded: PaddedLayout | None = None
    rotary: tuple[Tensor, Tensor] | None = None


@dataclass
class PackedMicroBatch:
    """See the module's drawing. N = sum of ``response_lengths``; all tensors on the trainer's device.

    Attributes:
        samples: indices into the `TrainBatch` of this rank, in packed order.
        response_lengths: int64 [samples].
    """

    samples: list[int]
    tokens: Tensor
    sequences: PackedSequences
    rows: Tensor
    targets: Tensor
    response_lengths: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.numel())

    def split(self, values: Tensor) -> list[Tensor]:
        """Flat [N] values as one tensor per sample."""
        return list(torch.split(values, self.response_lengths.tolist()))


def pack(
    samples: Sequence[int],
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    *,
    device: torch.device,
    multiple: int = 1,
    at_least: int = 0,
) -> PackedMicroBatch:
    """Pack the given samples of a rank into one micro-batch.

    Args:
        samples: indices into ``tokens`` and ``response_lengths``; empty for a rank that has nothing left to train,
            which then computes on a sequence of padding to take part in every collective.
        tokens: int64 [L_i], prompt and response.
        multiple: pad the total length to a multiple of it (tensor-parallel ranks with sequence parallelism, kernels).
        at_least: pad to this length or more (a pipeline that wants all micro-batches alike).
    Raises:
        ValueError: a sample whose response leaves no prompt token to predict its first token from.

    Example:
        >>> mb = pack([0], [torch.tensor([7, 8, 9])], [2], device=torch.device("cpu"))
        >>> mb.tokens.tolist(), mb.rows.tolist(), mb.targets.tolist()
        ([[7, 8, 9]], [0, 1], [8, 9])
    """
    chosen = [tokens[i] for i in samples]
    responses = [response_lengths[i] for i in samples]
    lengths = [int(t.numel()) for t in chosen]
    rows: list[Tensor] = []
    start = 0
    for index, length, response in zip(samples, lengths, responses):
        if response >= length:
            raise ValueError(f"sample {index} of the batch has {response} response tokens but {length} tokens in all")
        rows.append(torch.arange(start + length - response - 1, start + length - 1))
        start += length
    targets = [t[t.numel() - response :] for t, response in zip(chosen, responses)]
    padding = -(-max(start, at_least, 1) // multiple) * multiple - start
    if padding:
        chosen.append(torch.zeros(padding, dtype=torch.long))
        lengths.append(padding)
    empty = torch.zeros(0, dtype=torch.long)
    return PackedMicroBatch(
        samples=list(samples),
        tokens=torch.cat(chosen)[None].to(device),
        sequences=_describe(lengths, device),
        rows=torch.cat([empty, *rows]).to(device),
        targets=torch.cat([empty, *targets]).to(device),
        response_lengths=torch.tensor(responses, dtype=torch.long, device=device),
    )


def _describe(lengths: list[int], device: torch.device) -> PackedSequences:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends.to(device),
        cu_seqlens_kv=ends.to(device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
    )
    if device.type == "cpu":
        sequences.padded = padded_layout(lengths)
    return sequences


def padded_layout(lengths: list[int]) -> PaddedLayout:
    """Group sequences by length so that little is padded.

    Example:
        >>> layout = padded_layout([3, 2])
        >>> layout.shapes, layout.gather.tolist(), layout.cells.tolist()
        ([(2, 3)], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4])
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if blocks:
            longest = lengths[blocks[-1][0]]
            tokens = sum(lengths[j] for j in blocks[-1]) + lengths[i]
            if longest * (len(blocks[-1]) + 1) <= tokens * _MAX_PADDED_RATIO:
                blocks[-1].append(i)
                continue
        blocks.append([i])
    shapes, gather, padding = [], [], []
    for members in blocks:
        longest = lengths[members[0]]
        members.sort()
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        begins = torch.tensor([starts[i] for i in members])[:, None]
        offsets = torch.arange(longest)[None, :]
        shapes.append((len(members), longest))
        gather.append((begins + torch.minimum(offsets, sizes - 1)).reshape(-1))
        padding.append((offsets >= sizes).reshape(-1))
    all_cells, is_padding = torch.cat(gather), torch.cat(padding)
    real = torch.nonzero(~is_padding)[:, 0]
    cells = torch.empty(starts[-1], dtype=torch.long)
    cells[all_cells[real]] = real
    identity = len(blocks) == 1 and not bool(is_padding.any())
    return PaddedLayout(shapes, all_cells, cells, is_padding[:, None, None], identity)
