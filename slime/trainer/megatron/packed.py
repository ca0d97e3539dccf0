"""A micro-batch as the model's input: concatenated sequences without padding between them.

    samples          p p p r r r     q q r r
    tokens   [1, T]  p p p r r       q q r        without each sample's last, which predicts nothing
    rows     [N]         2 3 4         6 7        positions that predict a response token
    targets  [N]         r r r         r r

The output projection is computed only for ``rows``, which saves most of it with long prompts.

Under context parallelism a rank keeps its stripe of ``tokens``, ``positions``, ``rows`` and
``targets`` (`slime.trainer.megatron.context`). Fields about whole sequences and samples are not
split.

Samples of one prompt may share it: the prompt is computed once, and each response is a branch that
attends to the prompt and to itself. Results equal those of separate sequences (the prompt's
gradients sum over its branches). With long prompts and short responses this saves most tokens:

    p p p r r r , p p p s s   ─►   p p p r r s        positions 0 1 2 3 4 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.algorithms.logprobs import KeptTokens
from slime.models.delta_rule import TokenRuns, reached
from slime.models.spec import RotaryKind
from slime.models.vision import VisionKind
from slime.samples.media import Media
from slime.trainer.megatron.context import ContextGroup, ContextSplit
from slime.trainer.megatron.embedder import PackedImages, ReadImage, SampleMedia
from slime.trainer.megatron.moe_router import Routing

# sequences in a block are padded to the longest one; a larger ratio of cells to tokens than this
# starts another block
_MAX_PADDED_RATIO = 1.25


@dataclass
class AttentionBlock:
    """Sequences of similar length that one dense attention call handles.

    Attributes:
        batch, length: shape of the block: sequences, and cells of each.
        positions: int64 [batch or 1, length], 0-based within each sample.
        owners: int64 [batch, length], the branch of each cell, 0 for the prompt; None if no prompt
            is shared.
        images: int64 [batch, length], the image of each cell, -1 for none; None if no sequence has
            images whose tokens attend to each other.
        window: how many positions queries attend to, including their own; None: no limit.
    """

    batch: int
    length: int
    positions: Tensor
    owners: Tensor | None = None
    images: Tensor | None = None
    window: int | None = None
    _within: dict[int, AttentionBlock] = field(default_factory=dict, init=False)

    @property
    def masked(self) -> bool:
        """Tell whether queries attend to other keys than those of the plain causal mask."""
        return self.owners is not None or self.images is not None or self.window is not None

    @cached_property
    def bias(self) -> Tensor:
        """Which keys each query attends to, as summand of the scores: 0 or -inf, float32 [batch or
        1, 1, length, length]. All layers share this tensor."""
        place = torch.arange(self.length, device=self.positions.device)
        hidden = (place[None, :] > place[:, None])[None]
        images = self.images
        if images is not None:
            is_other = images[:, :, None] != images[:, None, :]
            hidden = is_other.logical_or_((images < 0)[:, None, :]).logical_and_(hidden)
        owners = self.owners
        if owners is not None:
            is_other = owners[:, :, None] != owners[:, None, :]
            hidden = is_other.logical_and_((owners != 0)[:, None, :]).logical_or_(hidden)
        if self.window is not None:
            reach = self.positions - self.window
            hidden = hidden | (self.positions[:, None, :] <= reach[:, :, None])
        zeros = torch.zeros(hidden.shape, device=place.device)
        return zeros.masked_fill_(hidden, float("-inf"))[:, None]

    def within(self, window: int | None) -> AttentionBlock:
        """Return the same block for a layer whose queries attend to ``window`` positions, including
        their own."""
        if window is None or window >= self.length:
            return self
        if window not in self._within:
            self._within[window] = replace(self, window=window)
        return self._within[window]

    def release(self) -> None:
        """Forget the masks."""
        self.__dict__.pop("bias", None)
        self._within.clear()

    def to(self, device: torch.device) -> AttentionBlock:
        owners = None if self.owners is None else self.owners.to(device)
        images = None if self.images is None else self.images.to(device)
        return replace(self, positions=self.positions.to(device), owners=owners, images=images)


@dataclass
class PaddedLayout:
    """Dense blocks of sequences. Cells after a sequence repeat its last token, hidden from queries.

    Attributes:
        gather: int64 [cells], packed position of each cell; blocks are concatenated.
        cells: int64 [T], the cell of each packed position.
        padding: bool [cells, 1, 1].
        identity: there is one block without padding, so packed and padded order are equal.
    """

    blocks: list[AttentionBlock]
    gather: Tensor
    cells: Tensor
    padding: Tensor
    identity: bool

    def to(self, device: torch.device) -> PaddedLayout:
        blocks = [block.to(device) for block in self.blocks]
        gather, cells, padding = (x.to(device) for x in (self.gather, self.cells, self.padding))
        return PaddedLayout(blocks, gather, cells, padding, self.identity)

    def release(self) -> None:
        """Forget the masks of all blocks; their next use builds them again."""
        for block in self.blocks:
            block.release()


@dataclass
class LaterTokens:
    """The later tokens of their image that tokens of images attend to, as causal sequences: those
    of an image in reversed order.

    Attributes:
        queries: int64 [N], packed positions of the tokens of images but the last one of each.
        keys: int64 [N], the position after that of each query.
        ends: int32 [images + 1], cumulative lengths.
        longest: the largest length.
    """

    queries: Tensor
    keys: Tensor
    ends: Tensor
    longest: int

    @staticmethod
    def of(images: Tensor, starts: Tensor) -> LaterTokens | None:
        """Find the images' tokens; None if no image has two.

        Args:
            images: int64 [T], as in `padded_layout`.
            starts: the first position of each sequence.

        Example (an image of three tokens):
            >>> later = LaterTokens.of(torch.tensor([-1, 0, 0, 0, -1]), torch.tensor([0]))
            >>> later.queries.tolist(), later.keys.tolist(), later.ends.tolist()
            ([2, 1], [3, 2], [0, 2])
        """
        # bounds[t + 1]: tokens t and t + 1 are of one image
        bounds = torch.zeros(images.numel() + 1, dtype=torch.int8)
        bounds[1:-1] = (images[1:] == images[:-1]) & (images[1:] >= 0)
        bounds[starts] = 0
        steps = bounds.diff(append=bounds.new_zeros(1))
        begins = torch.nonzero(steps == 1)[:, 0].tolist()
        stops = torch.nonzero(steps == -1)[:, 0].tolist()
        if not begins:
            return None
        queries = torch.cat(
            [torch.arange(stop - 1, begin - 1, -1) for begin, stop in zip(begins, stops)]
        )
        lengths = [stop - begin for begin, stop in zip(begins, stops)]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return LaterTokens(queries, queries + 1, ends, max(lengths))

    def to(self, device: torch.device) -> LaterTokens:
        queries, keys, ends = (x.to(device) for x in (self.queries, self.keys, self.ends))
        return LaterTokens(queries, keys, ends, self.longest)


@dataclass
class DeltaRuns:
    """The tokens of a micro-batch as input of gated delta nets: one run for each shared prompt and
    one for each branch that continues it.

    Attributes:
        lengths, parents: fields of each run, as in `slime.models.delta_rule.TokenRuns`.
    """

    lengths: list[int]
    parents: list[int]
    device: torch.device
    _reads: dict[int, Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of(branches: Sequence[Sequence[int]], device: torch.device) -> DeltaRuns:
        """Build the runs from the lengths of each prompt and of its branches.

        Example (a single response is one run with its prompt; two responses are runs of their own):
            >>> runs = DeltaRuns.of([[3, 2], [2, 1, 1]], torch.device("cpu"))
            >>> runs.lengths, runs.parents
            ([5, 2, 1, 1], [-1, -1, 1, 1])
        """
        lengths: list[int] = []
        parents: list[int] = []
        for prompt, *others in branches:
            own = [length for length in others if length]
            if len(own) < 2:
                lengths.append(prompt + sum(own))
                parents.append(-1)
                continue
            parent = len(lengths)
            lengths += [prompt, *own]
            parents += [-1, *[parent] * len(own)]
        return DeltaRuns(lengths, parents, device)

    @property
    def are_whole(self) -> bool:
        """No run continues another."""
        return max(self.parents) < 0

    @cached_property
    def chunks(self) -> TokenRuns:
        return TokenRuns.of(self.lengths, self.parents, self.device)

    @cached_property
    def host_ends(self) -> Tensor:
        """The start of each run and the end of the last, int64 [runs + 1] in host memory."""
        return torch.tensor([0, *accumulate(self.lengths)])

    @cached_property
    def ends(self) -> Tensor:
        """`host_ends` on the device. All layers have to pass this very tensor:
        flash-linear-attention keeps what it derives from it by the tensor's identity, and waits
        for the GPU whenever it derives it again."""
        return self.host_ends.to(self.device, non_blocking=True)

    def reads(self, width: int) -> Tensor:
        """Return the rows that a convolution reads (`slime.models.delta_rule.reached`)."""
        if width not in self._reads:
            self._reads[width] = reached(self.lengths, self.parents, width).to(self.device)
        return self._reads[width]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus values that are computed once per
    micro-batch.

    Attributes:
        lengths: tokens of each sequence, including the padding sequence.
        positions: int64 [T], 0-based within each sample.
        branches: for each sequence the length of its prompt and of each branch that continues it;
            the sums are ``lengths``.
        padded: the same tokens as dense blocks; None for the packed kernel.
        later: the later tokens that tokens of images attend to, for the packed kernel; None if
            attention is causal.
        rotary: (cos, sin) of every position for each rotary embedding of the model's layers; the
            model sets it on first use.
        query_factors: [T, 1, 1], factors of the queries by position, set with ``rotary``; None for
            models without query scaling.
        context: how the tokens are split over a context-parallel group; None if one rank has all.
        routing: instructions to the expert routers; None for dense models.
        rotary_positions: int64 [3, T], positions in time, row and column, for models that see
            images; None if ``positions`` are used for all three.
        images: images that replace some tokens; None if there are none.
        seen: ``images`` restricted to the rank's own part of the tokens; the model sets it.
    """

    lengths: list[int] = field(default_factory=list)
    branches: list[list[int]] = field(default_factory=list)
    positions: Tensor | None = None
    padded: PaddedLayout | None = None
    later: LaterTokens | None = None
    rotary: dict[RotaryKind, tuple[Tensor, Tensor]] | None = None
    query_factors: Tensor | None = None
    context: ContextSplit | None = None
    routing: Routing | None = None
    rotary_positions: Tensor | None = None
    images: PackedImages | None = None
    seen: PackedImages | None = None

    @cached_property
    def delta_runs(self) -> DeltaRuns:
        """All tokens of the micro-batch, as input of gated delta nets."""
        return DeltaRuns.of(self.branches, self.cu_seqlens_q.device)


@dataclass
class PackedMicroBatch:
    """See the module's diagram. N = sum of ``response_lengths``. Tensors are on the trainer's
    device unless stated otherwise.

    Attributes:
        samples: indices into this rank's `TrainBatch`; rows and targets are in this order.
        response_lengths: int64 [samples].
        num_tokens: T, over all ranks of a context-parallel group.
        origins: int64 [T], in host memory: the index of each token in the concatenated samples
            (including their last tokens), -1 for padding.
        copies: float32 [T], in host memory: number of samples to which each token belongs; more
            than 1 for a shared prompt, 0 for padding.
        kept: the tokens from which each target was sampled; None: the whole vocabulary.
    """

    samples: list[int]
    tokens: Tensor
    sequences: PackedSequences
    rows: Tensor
    targets: Tensor
    response_lengths: Tensor
    num_tokens: int
    origins: Tensor
    copies: Tensor
    kept: KeptTokens | None = None

    def split(self, values: Tensor) -> list[Tensor]:
        """Split flat values [N] into one tensor [R_i] per sample."""
        return list(torch.split(values, self.response_lengths.tolist()))


@dataclass(frozen=True)
class PackingOptions:
    """How to lay samples out.

    Attributes:
        device: device of the tensors.
        multiple: the total length is padded to a multiple of this (sequence parallelism, kernels).
        at_least: minimum of the padded length (pipelines that need equal micro-batches).
        dense: attention runs on dense blocks (CPU; float32) instead of a kernel for packed
            sequences.
        pair_cost: cost of one query-key pair in attention, relative to the cost of one token in
            everything else. Samples share a prompt if that is cheaper by this estimate. None: never
            share (kernels that do not support branches).
        context: the context-parallel group; its size divides ``multiple``.
        read_image: prepares images, for a model that sees them; None for other models.
        vision: the model's tower; None for other models.
        has_tower: this rank computes image features; other ranks need only the positions.
    """

    device: torch.device
    multiple: int = 1
    at_least: int = 0
    dense: bool = True
    pair_cost: float | None = None
    context: ContextGroup = field(default_factory=ContextGroup)
    read_image: ReadImage | None = None
    vision: VisionKind | None = None
    has_tower: bool = True


def pack(
    samples: Sequence[int],
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    options: PackingOptions,
    masks: Mapping[str, Sequence[Tensor]] | None = None,
    media: Sequence[Sequence[Media]] = (),
    images: Mapping[str, bytes] | None = None,
) -> PackedMicroBatch:
    """Pack the given samples of a rank into one micro-batch.

    Args:
        samples: indices into ``tokens`` and ``response_lengths``; empty for a rank without samples
            left, which computes on a sequence of padding to take part in all collectives.
        tokens: prompt and response of each sample, int64 [L_i].
        masks: payloads of the batch; the sampling mask among them is packed too.
        media: images of each sample; empty if no sample has any.
        images: reference of an image → its encoded bytes.
    Raises:
        ValueError: a sample has no prompt token from which to predict its first response token.

    Example:
        >>> mb = pack([0], [torch.tensor([7, 8, 9])], [2], PackingOptions(torch.device("cpu")))
        >>> mb.tokens.tolist(), mb.rows.tolist(), mb.targets.tolist()
        ([[7, 8]], [0, 1], [8, 9])
    """
    responses = [response_lengths[i] for i in samples]
    for i, response in zip(samples, responses):
        if response >= tokens[i].numel():
            raise ValueError(
                f"sample {i} of the batch has {response} response tokens but {tokens[i].numel()} "
                "in all"
            )
    own_media = None
    if options.read_image is not None and any(media[i] for i in samples if media):
        own_media = SampleMedia([media[i] for i in samples], [tokens[i].numel() for i in samples])
    stream = _lay_out(samples, tokens, responses, options, own_media)
    targets = torch.cat(
        [_NONE, *(tokens[i][tokens[i].numel() - r :] for i, r in zip(samples, responses))]
    )
    order = torch.arange(targets.numel())
    num_tokens = stream.tokens.numel()
    place = options.context
    sequences = _describe(stream, options)
    if place.size > 1:
        split = ContextSplit.of(place, stream.rows)
        targets = split.mine(targets)
        order = split.mine(order)
        stream = stream.stripe(split)
        sequences.context = ContextSplit(place, [order.to(options.device) for order in split.order])
    sequences.positions = stream.positions.to(options.device)
    if own_media is not None:
        _add_images(sequences, stream, own_media, options, images or {})
    return PackedMicroBatch(
        samples=list(samples),
        tokens=stream.tokens[None].to(options.device),
        sequences=sequences,
        rows=stream.rows.to(options.device),
        targets=targets.to(options.device),
        response_lengths=torch.tensor(responses, dtype=torch.long, device=options.device),
        num_tokens=num_tokens,
        origins=stream.origins,
        copies=stream.copies,
        kept=_kept_tokens(samples, responses, order, masks or {}, options.device),
    )


def _add_images(
    sequences: PackedSequences,
    stream: _TokenStream,
    media: SampleMedia,
    options: PackingOptions,
    images: Mapping[str, bytes],
) -> None:
    assert stream.rotary_positions is not None and stream.features is not None
    assert options.vision is not None
    read_image = options.read_image
    assert read_image is not None
    if options.vision.has_axes:
        sequences.rotary_positions = stream.rotary_positions.to(options.device)
    if not options.has_tower:
        return
    found = media.packed(stream.features, lambda reference: read_image(images[reference]))
    sequences.images = None if found is None else found.to(options.device)


def _kept_tokens(
    samples: Sequence[int],
    responses: Sequence[int],
    order: Tensor,
    masks: Mapping[str, Sequence[Tensor]],
    device: torch.device,
) -> KeptTokens | None:
    """Pack the sampling mask. ``order`` selects response tokens by their number over all
    samples."""
    if "sampling_mask_offsets" not in masks:
        return None
    ids = [_NONE]
    sizes = [_NONE]
    for i, response in zip(samples, responses):
        offsets = masks["sampling_mask_offsets"][i].long()
        sizes.append(offsets.diff() if offsets.numel() else torch.zeros(response).long())
        ids.append(masks["sampling_mask_ids"][i].long())
    all_sizes = torch.cat(sizes)
    starts = all_sizes.cumsum(0) - all_sizes
    own = all_sizes[order]
    ends = own.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(own.numel()), own)
    places = torch.arange(rows.numel()) + (starts[order] - ends + own)[rows]
    return KeptTokens(
        ids=torch.cat(ids)[places].to(device),
        rows=rows.to(device),
        bounds=[0, *ends.tolist()],
        whole=(own == 0)[:, None].to(device),
    )


_NONE = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class _TokenStream:
    """The concatenated tokens of a micro-batch, in host memory; see `PackedMicroBatch` for the
    other attributes.

    Attributes:
        features: as `SampleMedia.features`; None without images.
        images: as `SampleMedia.numbers`; None without images, and for a part of the tokens.
    """

    tokens: Tensor
    positions: Tensor
    origins: Tensor
    copies: Tensor
    rows: Tensor
    branches: list[list[int]]
    rotary_positions: Tensor | None = None
    features: Tensor | None = None
    images: Tensor | None = None

    def stripe(self, split: ContextSplit) -> _TokenStream:
        """Return the stripe of this rank of the context-parallel group."""
        stripe = split.place.stripe
        return _TokenStream(
            tokens=stripe(self.tokens),
            positions=stripe(self.positions),
            origins=stripe(self.origins),
            copies=stripe(self.copies),
            rows=split.mine(self.rows) // split.place.size,
            branches=self.branches,
            rotary_positions=None
            if self.rotary_positions is None
            else torch.stack([stripe(row) for row in self.rotary_positions]),
            features=None if self.features is None else stripe(self.features),
        )


def _lay_out(
    samples: Sequence[int],
    tokens: Sequence[Tensor],
    responses: list[int],
    options: PackingOptions,
    media: SampleMedia | None,
) -> _TokenStream:
    """Concatenate prompts, each followed by its responses, and padding."""
    lengths = [tokens[i].numel() for i in samples]
    before = list(accumulate(lengths, initial=0))
    prompts = [
        tokens[i][: length - response] for i, length, response in zip(samples, lengths, responses)
    ]
    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    origins: list[Tensor] = []
    copies: list[Tensor] = []
    rows = [_NONE] * len(responses)
    branches: list[list[int]] = []
    turns: list[Tensor] = []
    features: list[Tensor] = []
    images: list[Tensor] = []

    def add_media(member: int, part: slice) -> None:
        if media is not None:
            turns.append(media.positions(member)[:, part])
            features.append(media.features(member)[part])
            images.append(media.numbers(member)[part])

    start = 0
    for members in _families(prompts, responses, options.pair_cost, media):
        length = prompts[members[0]].numel()
        pieces.append(prompts[members[0]])
        positions.append(torch.arange(length))
        origins.append(before[members[0]] + positions[-1])
        copies.append(torch.full((length,), float(len(members))))
        add_media(members[0], slice(0, length))
        branch_lengths = [length]
        end = start + length
        for member in members:
            own = max(responses[member] - 1, 0)
            pieces.append(tokens[samples[member]][length : length + own])
            positions.append(torch.arange(length, length + own))
            origins.append(before[member] + positions[-1])
            copies.append(torch.ones(own))
            add_media(member, slice(length, length + own))
            if responses[member]:
                rows[member] = torch.cat(
                    [torch.tensor([start + length - 1]), torch.arange(end, end + own)]
                )
            branch_lengths.append(own)
            end += own
        branches.append(branch_lengths)
        start = end
    padding = -(-max(start, options.at_least, 1) // options.multiple) * options.multiple - start
    if padding:
        pieces.append(torch.zeros(padding, dtype=torch.long))
        positions.append(torch.arange(padding))
        origins.append(torch.full((padding,), -1))
        copies.append(torch.zeros(padding))
        branches.append([padding])
        turns.append(torch.arange(padding).expand(3, -1))
        features.append(torch.full((padding,), -1))
        images.append(features[-1])
    return _TokenStream(
        tokens=torch.cat(pieces),
        positions=torch.cat(positions),
        origins=torch.cat(origins),
        copies=torch.cat(copies),
        rows=torch.cat([_NONE, *rows]),
        branches=branches,
        rotary_positions=None if media is None else torch.cat(turns, dim=1),
        features=None if media is None else torch.cat(features),
        images=None if media is None else torch.cat(images),
    )


def _families(
    prompts: list[Tensor], responses: list[int], pair_cost: float | None, media: SampleMedia | None
) -> list[list[int]]:
    """Group the samples that share one computation of their prompt, including images; with
    ``pair_cost`` None each sample is its own group."""
    if pair_cost is None:
        return [[i] for i in range(len(prompts))]
    by_prompt: dict[tuple[bytes, bytes], list[int]] = {}
    for i, prompt in enumerate(prompts):
        seen = b"" if media is None else media.key(i, prompt.numel())
        by_prompt.setdefault((prompt.numpy().tobytes(), seen), []).append(i)
    families: list[list[int]] = []
    for members in by_prompt.values():
        mean_response = sum(responses[i] for i in members) / len(members)
        size = branches_per_prompt(
            prompts[members[0]].numel(), mean_response, len(members), pair_cost
        )
        families += [members[k : k + size] for k in range(0, len(members), size)]
    return families


def branches_per_prompt(prompt: int, response: float, siblings: int, pair_cost: float) -> int:
    """Return how many of ``siblings`` should share one computation of their prompt.

    A group of m samples costs t = ``prompt + m · response`` tokens, and t² pairs in a dense
    attention block.

    Example (all share a long prompt; with long responses sharing costs more):
        >>> (branches_per_prompt(45, 12, 8, pair_cost=1 / 900),
        ...  branches_per_prompt(45, 500, 8, pair_cost=1 / 900))
        (8, 1)
    """

    def cost(m: int) -> float:
        families = -(-siblings // m)
        tokens = prompt + m * response
        return families * (tokens + pair_cost * tokens * tokens)

    return min(range(1, siblings + 1), key=cost)


def _describe(stream: _TokenStream, options: PackingOptions) -> PackedSequences:
    """Describe the full token stream for attention, without the rank's positions."""
    branches = stream.branches
    is_bidirectional = options.vision is not None and options.vision.bidirectional
    images = stream.images if is_bidirectional else None
    lengths = [sum(family) for family in branches]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    padded = padded_layout(branches, images) if options.dense else None
    later = None
    if images is not None and not options.dense:
        later = LaterTokens.of(images, ends[:-1].long())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends.to(options.device),
        cu_seqlens_kv=ends.to(options.device),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        branches=branches,
        padded=None if padded is None else padded.to(options.device),
        later=None if later is None else later.to(options.device),
    )


# -- packed sequences as dense blocks, for devices without an attention kernel for them ------------


def padded_layout(branches: Sequence[Sequence[int]], images: Tensor | None = None) -> PaddedLayout:
    """Group sequences by length to reduce padding, and apart from those with images, which need
    masks of their own.

    Args:
        branches: per sequence the length of its prompt and of each response branch; [n] for a
            sequence without branches.
        images: int64 [T], the image of each token, whose tokens attend to each other; -1: none.

    Example:
        >>> layout = padded_layout([[3], [2]])
        >>> ([(b.batch, b.length) for b in layout.blocks],
        ...  layout.gather.tolist(), layout.cells.tolist())
        ([(2, 3)], [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4])
    """
    lengths = [sum(parts) for parts in branches]
    starts = list(accumulate(lengths, initial=0))
    blocks: list[AttentionBlock] = []
    gather = []
    padding = []
    has_images = [False] * len(lengths)
    if images is not None:
        has_images = [bool((own >= 0).any()) for own in images.split(lengths)]
    for members in _blocks_by_length(lengths, has_images):
        longest = max(lengths[i] for i in members)
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        begins = torch.tensor([starts[i] for i in members])[:, None]
        offsets = torch.arange(longest)[None, :]
        cells_of = begins + torch.minimum(offsets, sizes - 1)
        beyond = offsets >= sizes
        own = None
        if images is not None and has_images[members[0]]:
            own = images[cells_of].masked_fill_(beyond, -1)
        blocks.append(_block([branches[i] for i in members], longest, own))
        gather.append(cells_of.reshape(-1))
        padding.append(beyond.reshape(-1))
    all_cells = torch.cat(gather)
    is_padding = torch.cat(padding)
    real = torch.nonzero(~is_padding)[:, 0]
    cells = torch.empty(starts[-1], dtype=torch.long)
    cells[all_cells[real]] = real
    identity = len(blocks) == 1 and not bool(is_padding.any())
    return PaddedLayout(blocks, all_cells, cells, is_padding[:, None, None], identity)


def _blocks_by_length(lengths: Sequence[int], kinds: Sequence[bool]) -> list[list[int]]:
    """Group sequences of one kind and of similar length."""
    blocks: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (kinds[i], -lengths[i], i)):
        if blocks and kinds[i] == kinds[blocks[-1][0]]:
            longest = lengths[blocks[-1][0]]
            tokens = sum(lengths[j] for j in blocks[-1]) + lengths[i]
            if longest * (len(blocks[-1]) + 1) <= tokens * _MAX_PADDED_RATIO:
                blocks[-1].append(i)
                continue
        blocks.append([i])
    return [sorted(members) for members in blocks]


def _block(
    branches: Sequence[Sequence[int]], length: int, images: Tensor | None = None
) -> AttentionBlock:
    """Return the attention block of branches, padded to one length.

    Args:
        images: int64 [sequences, length], as in `padded_layout`.
    """
    positions = torch.arange(length)[None]
    owners = None
    # a single response continues its prompt and needs no mask beyond the causal one
    if any(len(parts) > 2 for parts in branches):
        positions = torch.stack([_positions(parts, length) for parts in branches])
        owners = torch.stack([_owners(parts, length) for parts in branches])
    return AttentionBlock(len(branches), length, positions, owners, images)


def _positions(parts: Sequence[int], length: int) -> Tensor:
    """Return the position of each cell in its sample; each branch continues the prompt."""
    prompt, *others = parts
    found = torch.cat(
        [torch.arange(prompt), *(torch.arange(prompt, prompt + own) for own in others)]
    )
    return torch.cat([found, found.new_full((length - found.numel(),), int(found[-1]))])


def _owners(parts: Sequence[int], length: int) -> Tensor:
    """Return the branch of each cell: 0 is the prompt, then 1, 2, …; padding is in the last one."""
    owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    return torch.cat([owner, owner.new_full((length - owner.numel(),), len(parts) - 1)])
