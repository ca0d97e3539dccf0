"""Mappings between one Megatron parameter and its Hugging Face tensors, including the sharding of
the parameter over tensor-parallel ranks.

A `ParamMapping` works in both directions:

    Hugging Face tensors ── load(sources, shard) ──► this rank's piece of the Megatron parameter
    all ranks' pieces    ── export(pieces) ───────► Hugging Face tensors

``load`` slices its sources, so a rank reads only the bytes that it keeps. Sources may be torch
tensors or anything with ``shape`` and slicing (`slime.checkpoints.hf_files.LazyTensor`).

Importing the tables imports no torch, as the launch compares a directory with them early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class DeltaNetSizes(NamedTuple):
    """Heads of a gated delta net.

    Attributes:
        key_heads: heads of queries, and of keys.
        per_key: value heads per key head.
        key, value: widths of a key head and of a value head.
        conv: width of the convolution in tokens.
    """

    key_heads: int
    per_key: int
    key: int
    value: int
    conv: int

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.per_key

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return self.key_heads * sum(self.of_key_head[:3])

    @property
    def of_key_head(self) -> tuple[int, int, int, int, int, int]:
        """Rows per key head: query, key, values, gates, write strengths (b) and decays (a)."""
        values = self.per_key * self.value
        return self.key, self.key, values, values, self.per_key, self.per_key


class ModelSizes(Protocol):
    """Sizes of a model that mappings read, implemented by `slime.models.spec.ModelSpec`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def padded_vocab_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_query_groups(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def delta_net(self) -> DeltaNetSizes: ...


class TensorSource(Protocol):
    """A tensor that may not be in memory yet."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def stack_slices(index: Any) -> list[Any]:
    """Return an index for each axis of a stack [experts, rows, columns], given that of
    ``stack[index]``."""
    given = list(index) if isinstance(index, tuple) else [index]
    if given == [...]:
        given = []
    return given + [slice(None)] * (3 - len(given))


@dataclass(frozen=True)
class OneExpert:
    """One expert's tensor in a stack [experts, …]; indexing reads only this expert's bytes."""

    stack: TensorSource
    number: int

    @property
    def shape(self) -> Sequence[int]:
        return tuple(self.stack.shape[1:])

    def __getitem__(self, index: Any) -> torch.Tensor:
        own = slice(self.number, self.number + 1)
        rest = index if isinstance(index, tuple) else (index,)
        return self.stack[(own, *rest)][0]


@dataclass(frozen=True)
class _TransposedSource:
    """The transpose of a matrix, read by slices."""

    matrix: TensorSource

    @property
    def shape(self) -> Sequence[int]:
        rows, columns = self.matrix.shape
        return columns, rows

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return self.matrix[columns, rows].t()


@dataclass(frozen=True)
class Shard:
    """Piece ``rank`` of ``size`` of a parameter, along the mapping's tensor-parallel axis."""

    rank: int = 0
    size: int = 1

    def bounds(self, length: int, what: str = "axis") -> tuple[int, int]:
        """Return the half-open range of this piece.

        Raises:
            ValueError: ``size`` does not divide ``length``.
        """
        if length % self.size:
            raise ValueError(
                f"{what} of length {length} cannot be cut into {self.size} equal pieces"
            )
        step = length // self.size
        return self.rank * step, (self.rank + 1) * step


@dataclass(frozen=True)
class Layout:
    """The trainer's parallel sizes.

    Attributes:
        world: trainer ranks.
        virtual: model chunks per pipeline rank (1 without interleaving).
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        """Data-parallel replicas: ranks that train on different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks over which the distributed optimizer shards the states of dense parameters."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks over which the distributed optimizer shards the states of experts."""
        return max(1, self.world // (self.expert_tensor * self.expert * self.pipeline))

    def layers_of(self, stage: int, num_layers: int) -> list[int]:
        """Global indices of a pipeline rank's layers, chunk after chunk.

        Example (eight layers, two ranks with two chunks each):
            >>> Layout(world=2, pipeline=2, virtual=2).layers_of(1, 8)
            [2, 3, 6, 7]
        """
        size = num_layers // (self.pipeline * self.virtual)
        starts = [(chunk * self.pipeline + stage) * size for chunk in range(self.virtual)]
        return [start + i for start in starts for i in range(size)]


class ParamMapping(ABC):
    """A stateless mapping between a Megatron parameter and Hugging Face tensors.

    Attributes:
        tp_axis: axis along which tensor parallelism shards the Megatron parameter; None if every
            rank has the whole parameter.
    """

    tp_axis: int | None = None

    @abstractmethod
    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        """Return this rank's piece.

        Raises:
            ValueError: a source has a wrong shape.
        """

    @abstractmethod
    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        """Return the Hugging Face tensors for the pieces of all tensor-parallel ranks, in rank
        order. With one piece the results are views of it if the layout allows, else copies.
        """


class Replicated(ParamMapping):
    """Every rank has the same tensor (norms, routers, biases added after a row-parallel
    product)."""

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        return sources[0][:]

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [pieces[0]]


class OneRow(Replicated):
    """A vector [n], the same on every rank, stored as a tensor [1, n]."""

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        return sources[0][:].flatten()

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [pieces[0].unsqueeze(0)]


class ColumnParallel(ParamMapping):
    """Output features are sharded: rows of [out, in], entries of a bias [out]."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        start, end = shard.bounds(sources[0].shape[0], "output features")
        return sources[0][start:end]

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [_joined(pieces, 0)]


class LatentProjection(ColumnParallel):
    """Projection to the latents of multi-latent attention: column-parallel in the trainer, whole on
    every engine rank."""


class RowParallel(ParamMapping):
    """Input features are sharded: columns of [out, in]."""

    tp_axis = 1

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        start, end = shard.bounds(sources[0].shape[1], "input features")
        return sources[0][:, start:end]

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [_joined(pieces, 1)]


class VocabParallel(ParamMapping):
    """Embedding or output layer: rows are padded with zeros to ``spec.padded_vocab_size`` and
    sharded."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        (rows, *rest) = sources[0].shape
        padded = spec.padded_vocab_size
        if rows != spec.vocab_size:
            raise ValueError(f"it has {rows} rows, the config says vocab_size {spec.vocab_size}")
        start, end = shard.bounds(padded, "padded vocabulary")
        present = sources[0][min(start, rows) : min(end, rows)]
        missing = (end - start) - present.shape[0]
        return _joined([present, present.new_zeros(missing, *rest)], 0) if missing else present

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [_joined(pieces, 0)[: spec.vocab_size]]


class TransposedVocabParallel(VocabParallel):
    """A Hugging Face tensor [rank, vocabulary], whose transpose is sharded as `VocabParallel`."""

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        return super().load([sources[0][:].t()], shard, spec)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [super().export(pieces, spec)[0].t().contiguous()]


class FusedQKV(ParamMapping):
    """Query, key and value in one parameter, interleaved by query group as Megatron's attention
    unpacks it.

    With H heads of size D in G groups, the rows are, group after group, H/G query heads, one key
    head, one value head: for H=4, G=2 ``q0 q1 k0 v0 | q2 q3 k1 v1``. Ranks get equal ranges of
    rows: whole groups, or parts of a group if there are more ranks than groups. Works for weights
    [rows, hidden] and biases [rows]. Hugging Face tensors: q [H·D, …], k [G·D, …], v [G·D, …].
    """

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        groups = spec.num_query_groups
        per_group = spec.num_heads // spec.num_query_groups
        heads_of = (per_group, 1, 1)
        for source, heads, name in zip(sources, heads_of, "qkv", strict=True):
            expected = heads * groups * spec.head_dim
            if source.shape[0] != expected:
                raise ValueError(
                    f"{name} has {source.shape[0]} rows, heads and head size make it {expected}"
                )
        group_rows = sum(heads_of) * spec.head_dim
        start, end = shard.bounds(groups * group_rows, "query, key and value rows")
        first = start // group_rows  # first and last: the groups of this rank
        last = -(-end // group_rows)
        count = last - first
        rest = tuple(sources[0].shape[1:])
        parts = [
            source[first * heads * spec.head_dim : last * heads * spec.head_dim].reshape(
                count, -1, *rest
            )
            for source, heads in zip(sources, heads_of, strict=True)
        ]
        rows = _joined(parts, 1).reshape(count * group_rows, *rest)
        return rows[start - first * group_rows : end - first * group_rows]

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        groups = spec.num_query_groups
        per_group = spec.num_heads // spec.num_query_groups
        fused = _joined(pieces, 0)
        rest = fused.shape[1:]
        grouped = fused.reshape(groups, (per_group + 2) * spec.head_dim, *rest)
        parts = grouped.split([per_group * spec.head_dim, spec.head_dim, spec.head_dim], dim=1)
        return [part.reshape(-1, *rest) for part in parts]


class GatedQKV(FusedQKV):
    """Query, output gate, key and value in one parameter, by query group: query heads, their gates,
    one key head, one value head.

    In the Hugging Face tensor of queries each head is followed by its gate.
    """

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        query, key, value = (source[:] for source in sources)
        groups = spec.num_query_groups
        per_group = spec.num_heads // groups
        expected = 2 * spec.num_heads * spec.head_dim
        if query.shape[0] != expected:
            raise ValueError(
                f"query and gate have {query.shape[0]} rows, heads and head size make it {expected}"
            )
        rest = query.shape[1:]
        by_head = query.reshape(groups, per_group, 2, spec.head_dim, *rest)
        paired = by_head.transpose(1, 2).reshape(groups, -1, *rest)
        parts = [paired, *(x.reshape(groups, spec.head_dim, *rest) for x in (key, value))]
        rows = _joined(parts, 1).flatten(0, 1)
        start, end = shard.bounds(rows.shape[0], "query, gate, key and value rows")
        return rows[start:end]

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        groups = spec.num_query_groups
        per_group = spec.num_heads // groups
        fused = _joined(pieces, 0)
        rest = fused.shape[1:]
        grouped = fused.reshape(groups, -1, *rest)
        query, key, value = grouped.split(
            [2 * per_group * spec.head_dim, spec.head_dim, spec.head_dim], dim=1
        )
        by_head = query.reshape(groups, 2, per_group, spec.head_dim, *rest).transpose(1, 2)
        return [by_head.reshape(-1, *rest), *(x.reshape(-1, *rest) for x in (key, value))]


class StackedQKV(ParamMapping):
    """Query, key and value as in `FusedQKV`, from one Hugging Face tensor of all queries, then all
    keys, then all values (Phi-3)."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        (stacked,) = sources
        query = spec.num_heads * spec.head_dim
        key = spec.num_query_groups * spec.head_dim
        if stacked.shape[0] != query + 2 * key:
            raise ValueError(
                f"query, key and value stacked have {stacked.shape[0]} rows, heads and head size "
                f"make it {query + 2 * key}"
            )
        rows = stacked[:]
        parts = [rows[:query], rows[query : query + key], rows[query + key :]]
        return QKV.load(parts, shard, spec)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [_joined(QKV.export(pieces, spec), 0)]


class GateUp(ParamMapping):
    """Gate and up projection in one parameter; every rank holds [its gate rows; its up rows]."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        gate, up = sources
        if tuple(gate.shape) != tuple(up.shape):
            raise ValueError(f"gate has shape {list(gate.shape)}, up has {list(up.shape)}")
        start, end = shard.bounds(gate.shape[0], "intermediate features")
        return _joined([gate[start:end], up[start:end]], 0)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        halves = [piece.chunk(2, dim=0) for piece in pieces]
        return [_joined([half[0] for half in halves], 0), _joined([half[1] for half in halves], 0)]


class StackedGateUp(ParamMapping):
    """Gate and up projection as in `GateUp`, from one Hugging Face tensor [2·I, …] of all gate
    rows, then all up rows (GLM-4)."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        (stacked,) = sources
        half, rest = divmod(stacked.shape[0], 2)
        if rest:
            raise ValueError(f"gate and up stacked have {stacked.shape[0]} rows, an odd number")
        start, end = shard.bounds(half, "intermediate features")
        return _joined([stacked[start:end], stacked[half + start : half + end]], 0)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        if len(pieces) == 1:
            return list(pieces)
        return [_joined(GATE_UP.export(pieces, spec), 0)]


class InterleavedGateUp(ParamMapping):
    """Gate and up projection as in `GateUp`, from one Hugging Face tensor [2·I, …] with gate rows
    at even and up rows at odd indices (gpt-oss)."""

    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        (mixed,) = sources
        half, rest = divmod(mixed.shape[0], 2)
        if rest:
            raise ValueError(f"gate and up interleaved have {mixed.shape[0]} rows, an odd number")
        start, end = shard.bounds(half, "intermediate features")
        rows = mixed[2 * start : 2 * end]
        return _joined([rows[0::2], rows[1::2]], 0)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        import torch

        gate, up = GATE_UP.export(pieces, spec)
        return [torch.stack([gate, up], dim=1).flatten(0, 1)]


@dataclass(frozen=True)
class Transposed(ParamMapping):
    """Matrices that Hugging Face tensors hold as [in, out].

    Attributes:
        plain: mapping of the transposed matrices.
    """

    plain: ParamMapping

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp_axis", self.plain.tp_axis)

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        return self.plain.load([_TransposedSource(source) for source in sources], shard, spec)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return [tensor.t() for tensor in self.plain.export(pieces, spec)]


@dataclass(frozen=True)
class StackedRows(ParamMapping):
    """Matrices of one shape, stacked along rows, the same on every rank.

    Attributes:
        count: number of matrices.
    """

    count: int

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        return _joined([source[:] for source in sources], 0)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        return list(pieces[0].chunk(self.count, dim=0))


@dataclass(frozen=True)
class KeyHeadRows(ParamMapping):
    """Rows of several tensors, grouped by the key heads of a gated delta net.

    With two heads, one source of queries q and keys k, and another of values v, the parameter is
    ``q0 k0 v0 | q1 k1 v1``. Ranks get whole key heads.

    Attributes:
        sources: for each Hugging Face tensor, its blocks of rows; a block contains all key heads.
            For each block, the kinds of rows that it holds per head, as indices into
            `DeltaNetSizes.of_key_head`.
    """

    sources: tuple[tuple[tuple[int, ...], ...], ...]
    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        heads = spec.delta_net.key_heads
        first, last = shard.bounds(heads, "key heads")
        parts = []
        for source, widths in zip(sources, self._widths(spec), strict=True):
            if source.shape[0] != heads * sum(widths):
                raise ValueError(
                    f"it has {source.shape[0]} rows, key heads and their sizes make it "
                    f"{heads * sum(widths)}"
                )
            begin = 0
            for size in widths:
                rows = source[begin + first * size : begin + last * size]
                parts.append(rows.reshape(last - first, size, *rows.shape[1:]))
                begin += heads * size
        return _joined(parts, 1).flatten(0, 1)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        whole = _joined(pieces, 0)
        by_head = whole.reshape(spec.delta_net.key_heads, -1, *whole.shape[1:])
        widths = self._widths(spec)
        blocks = iter(by_head.split([size for source in widths for size in source], dim=1))
        return [_joined([next(blocks).flatten(0, 1) for _ in source], 0) for source in widths]

    def _widths(self, spec: ModelSizes) -> list[list[int]]:
        """Return the rows of a key head in each block of each source."""
        rows = spec.delta_net.of_key_head
        return [[sum(rows[i] for i in block) for block in source] for source in self.sources]


@dataclass(frozen=True)
class SomeParts(ParamMapping):
    """A fused parameter in which some parts have no Hugging Face tensor, and zero rows instead.

    Attributes:
        fused: mapping of all parts, sharded along rows.
        rows: rows of each part.
        present: which parts have a tensor.
    """

    fused: ParamMapping
    rows: tuple[int, ...]
    present: tuple[bool, ...]
    tp_axis = 0

    def load(self, sources: Sequence[TensorSource], shard: Shard, spec: ModelSizes) -> torch.Tensor:
        given = iter(sources)
        like = sources[0][:1]
        parts = [
            next(given) if is_there else like.new_zeros(rows, *like.shape[1:])
            for rows, is_there in zip(self.rows, self.present, strict=True)
        ]
        return self.fused.load(parts, shard, spec)

    def export(self, pieces: Sequence[torch.Tensor], spec: ModelSizes) -> list[torch.Tensor]:
        parts = self.fused.export(pieces, spec)
        return [part for part, is_there in zip(parts, self.present, strict=True) if is_there]


def _joined(pieces: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    import torch

    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)


REPLICATED = Replicated()
ONE_ROW = OneRow()
COLUMN = ColumnParallel()
LATENT = LatentProjection()
ROW = RowParallel()
VOCAB = VocabParallel()
TRANSPOSED_VOCAB = TransposedVocabParallel()
QKV = FusedQKV()
GATED_QKV = GatedQKV()
STACKED_QKV = StackedQKV()
GATE_UP = GateUp()
STACKED_GATE_UP = StackedGateUp()
INTERLEAVED_GATE_UP = InterleavedGateUp()
