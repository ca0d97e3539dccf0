"""The adapter tensors that engines receive, made from the trainer's.

Engines fuse q, k and v (gate and up; the first two projections of latent attention) and accept the
adapters of fused layers only as complete sets. So a layer without an adapter gets one of zeros if a
layer fused with it has one. The routed experts of a layer are stacked: that is one tensor instead
of a hundred, and the form that SGLang applies:

    ….mlp.experts.gate_proj.lora_A.weight    [experts, rank, in], or [1, rank, in] if they share it

An engine multiplies a whole adapter by one factor, alpha / rank. Adapters of a lower rank are
padded with zeros, and their B is multiplied by the ratio of the ranks. Where gate and up of an
expert need the same A (`slime.models.adapters.joins_gate_and_up`), both get both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from slime.engines.adapters import FUSED_SETS
from slime.engines.wire.buckets import TensorEntry, dtype_name
from slime.engines.wire.expert_runs import ExpertRun
from slime.models.adapters import (
    AdapterConfig,
    Side,
    begins_with_zeros,
    joins_gate_and_up,
    peft_name,
    served_rank,
    with_single_experts,
)
from slime.models.layouts import ROW
from slime.models.parameters import ModelParameters, Shape
from slime.models.peft_config import plain_config

#: The two matrices of an adapter.
SIDES: tuple[Side, ...] = ("A", "B")
_GATE_AND_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Piece:
    """A trained tensor's place in a sent one.

    Attributes:
        name: of the sent tensor.
        expert: index in its first axis; None for a tensor of two axes.
        side: tells the axis of the rank: the last but one of A, the last of B.
        factor: multiplies the numbers.
        start: index on the axis of the rank.
    """

    name: str
    expert: int | None
    side: Side
    factor: float
    start: int

    def view(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the place in the sent tensor for a trained tensor of this shape, or for a run of
        them that begins with this piece."""
        if self.expert is not None and len(shape) == 3:
            tensor = tensor[self.expert : self.expert + shape[0]]
        elif self.expert is not None:
            tensor = tensor[self.expert]
        axis = -2 if self.side == "A" else -1
        return tensor.narrow(axis, self.start, shape[axis])


@dataclass(frozen=True)
class LargestValues:
    """The largest absolute value of each trained tensor.

    Attributes:
        names: of the tensors.
        values: [tensors], float32; NaN or infinity if a tensor contains one.
        may_be_zero: [tensors], whether a tensor is zero in a new adapter.
    """

    names: Sequence[str]
    values: torch.Tensor
    may_be_zero: torch.Tensor

    def where(self, mask: torch.Tensor) -> list[str]:
        """Return the names of the chosen tensors."""
        return [self.names[index] for index in mask.nonzero().flatten().tolist()]


@dataclass(frozen=True)
class AdapterLayout:
    """The tensors in every push of an adapter.

    Attributes:
        adapters: rank, factor and layers.
        trained: name → shape of the trainer's tensors.
        sent: name → shape of the engines' tensors, in the order of layers.
        pieces: name of a trained tensor → its places.
        rank: of all sent tensors.
        targets: last name parts of all layers with an adapter in an engine.
        lone_queries: the model has a ``q_proj`` without ``k_proj`` and ``v_proj``.
    """

    adapters: AdapterConfig
    trained: dict[str, Shape]
    sent: dict[str, Shape]
    pieces: dict[str, tuple[Piece, ...]]
    rank: int
    targets: tuple[str, ...]
    lone_queries: bool

    @staticmethod
    def of(parameters: ModelParameters) -> AdapterLayout:
        """Make the layout of a model's adapters."""
        adapters = parameters.adapters
        assert adapters is not None, "a model without adapters"
        trained = parameters.trained
        modules = dict(_modules(parameters, adapters))
        joins = joins_gate_and_up(parameters.family, adapters)
        rank = served_rank(parameters.family, adapters)
        sent: dict[str, Shape] = {}
        pieces: dict[str, tuple[Piece, ...]] = {}
        for owner in modules.values():
            own_rank = adapters.expert_rank if owner.experts else adapters.rank
            is_half = joins and owner.experts > 0 and owner.leaf in _GATE_AND_UP
            start = own_rank if is_half and owner.leaf == "up_proj" else 0
            for side in SIDES:
                sent[owner.name_of(side)] = owner.shape_of(side, rank)
                receivers = [owner]
                if is_half and side == "A":
                    receivers = [owner.beside(leaf) for leaf in _GATE_AND_UP]
                for name, expert in owner.sources(side, trained):
                    pieces[name] = tuple(
                        Piece(
                            receiver.name_of(side),
                            expert,
                            side,
                            rank / own_rank if side == "B" else 1.0,
                            start,
                        )
                        for receiver in receivers
                    )
        leaves = sorted({module.rpartition(".")[2] for module in modules})
        lone = any(
            module.endswith(".q_proj") and module.removesuffix("q_proj") + "k_proj" not in modules
            for module in modules
        )
        return AdapterLayout(adapters, trained, sent, pieces, rank, tuple(leaves), lone)

    @property
    def has_experts(self) -> bool:
        return any(len(shape) == 3 for shape in self.sent.values())

    @property
    def shares_outer_experts(self) -> bool:
        """Whether the experts of a layer share the outer matrices."""
        return self.has_experts and self.adapters.experts == "shared-outer"

    def entries(self, dtype: torch.dtype) -> list[TensorEntry]:
        """Return the table of the sent tensors in one flat buffer, in the order of layers. Tensors
        with matrices of one size are adjacent in the buffer."""
        starts: dict[str, int] = {}
        end = 0
        for names in self._by_size.values():
            for name in names:
                starts[name] = end
                end += prod(self.sent[name])
        width = dtype.itemsize
        kind = dtype_name(dtype)
        return [
            TensorEntry(name, kind, shape, starts[name] * width)
            for name, shape in self.sent.items()
        ]

    def fits(self, name: str, shape: Shape) -> bool:
        """Tell whether these are a trained tensor, or a run of experts, and its shape."""
        return all(self.trained.get(one) == own for one, own in split_runs({name: shape}))

    def place(self, name: str, tensor: torch.Tensor, views: Mapping[str, torch.Tensor]) -> None:
        """Copy a trained tensor, or a run of experts, to its place among the sent ones, which start
        as zeros.

        Raises:
            KeyError: no trained tensor has this name.
        """
        run = ExpertRun.parse(name)
        for piece in self.pieces[name if run is None else run.expert_name(run.first)]:
            view = piece.view(views[piece.name], tensor.shape)
            if piece.factor == 1.0:
                view.copy_(tensor)
            else:
                view.copy_(tensor.float() * piece.factor)

    def largest(self, flat: torch.Tensor, dtype: torch.dtype) -> LargestValues:
        """Return the largest absolute value of each trained tensor.

        Args:
            flat: uint8, the sent tensors in the places of `entries`.
        """
        # few reductions, without copies: a model may have ten thousand experts
        numbers = flat.view(dtype)
        tops = []
        begin = 0
        for size, names in self._by_size.items():
            count = sum(prod(self.sent[name]) for name in names) // size
            matrices = numbers[begin : begin + count * size].view(count, size)
            tops.append(torch.maximum(matrices.amax(1), matrices.amin(1).neg()).float())
            begin += count * size
        values = torch.cat(tops).cpu()
        names, places, may_be_zero = self._matrices
        return LargestValues(names, values[places], may_be_zero)

    @cached_property
    def _by_size(self) -> dict[int, list[str]]:
        """Numbers in a matrix → names of the sent tensors, single or stacked, of such matrices. The
        A's of gate and up that are in one tensor count as two matrices."""
        sizes: dict[int, list[str]] = {}
        for name, shape in self.sent.items():
            rows = self.adapters.expert_rank if name in self._joined else shape[-2]
            sizes.setdefault(rows * shape[-1], []).append(name)
        return sizes

    @cached_property
    def _joined(self) -> set[str]:
        """Names of the sent tensors with the A's of gate and up."""
        return {piece.name for places in self.pieces.values() if places[1:] for piece in places}

    @cached_property
    def _matrices(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Names of the trained tensors, the number of each one's matrix in the buffer, and whether
        it begins with zeros."""
        first: dict[str, int] = {}
        end = 0
        for size, names in self._by_size.items():
            for name in names:
                first[name] = end
                end += prod(self.sent[name]) // size
        places = []
        for piece, *_ in self.pieces.values():
            place = piece.expert or 0
            if piece.name in self._joined:
                place = (place * self.rank + piece.start) // self.adapters.expert_rank
            places.append(first[piece.name] + place)
        zeros = [begins_with_zeros(name) for name in self.pieces]
        return list(self.pieces), torch.tensor(places), torch.tensor(zeros)

    def config_dict(self, base: str) -> dict[str, Any]:
        """Return the fields of PEFT's ``adapter_config.json`` for the sent tensors.

        Args:
            base: name or directory of the base model.
        """
        return plain_config(self.rank, self.adapters.alpha, self.targets, base)


def split_runs(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield (name, shape) of each tensor, with single experts in place of runs."""
    for name, shape in shapes.items():
        run = ExpertRun.parse(name)
        if run is None or len(shape) != 3 or shape[0] != run.last - run.first + 1:
            yield name, shape
            continue
        for number in range(run.first, run.last + 1):
            yield run.expert_name(number), shape[1:]


@dataclass(frozen=True)
class _Module:
    """A layer with an adapter in engines, or the same layer of all routed experts.

    Attributes:
        path: its Hugging Face name; without the number for experts.
        out_in: the shape of its weight.
        experts: number of experts; 0 for a layer without them.
    """

    path: str
    out_in: Shape
    experts: int
    shared: tuple[Side, ...] = ()

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    def beside(self, leaf: str) -> _Module:
        return replace(self, path=f"{self.path.rpartition('.')[0]}.{leaf}")

    def name_of(self, side: Side) -> str:
        return peft_name(self.path, side)

    def shape_of(self, side: Side, rank: int) -> Shape:
        rows, columns = self.out_in
        shape = (rank, columns) if side == "A" else (rows, rank)
        if not self.experts:
            return shape
        return (1 if side in self.shared else self.experts, *shape)

    def sources(self, side: Side, trained: dict[str, Shape]) -> Iterator[tuple[str, int | None]]:
        """Yield (trained tensor, place in the first axis)."""
        whole = self.name_of(side)
        if whole in trained:
            yield whole, 0 if self.experts else None
        owner, _, leaf = self.path.rpartition(".")
        for expert in range(self.experts):
            name = peft_name(f"{owner}.{expert}.{leaf}", side)
            if name in trained:
                yield name, expert


def _modules(parameters: ModelParameters, adapters: AdapterConfig) -> Iterator[tuple[str, _Module]]:
    """Yield (path, layer) for layers with an adapter in engines; a layer of experts once."""
    spec = parameters.spec
    shapes: dict[str, _Module] = {}
    family = with_single_experts(parameters.family)
    for name, shape in family.hf_tensors(spec):
        found = family.match_hf(name)
        if found is None:
            continue
        rule, numbers = found
        path = name.removesuffix(".weight")
        if rule.is_embedding:  # maps tokens to features, so the axes are swapped
            shapes[path] = _Module(path, (shape[1], shape[0]), 0)
            continue
        if not (rule.is_linear and (rule.is_of_layer or rule.is_output)):
            continue
        if not rule.is_expert:
            shapes[path] = _Module(path, shape, 0)
            continue
        owner, _, leaf = path.rpartition(".")
        path = f"{owner.removesuffix('.' + str(numbers['expert']))}.{leaf}"
        outer: tuple[Side, ...] = ("B",) if rule.layout is ROW else ("A",)
        shares = adapters.experts == "shared-outer"
        shapes[path] = _Module(path, shape, spec.num_experts, outer if shares else ())
    for path, module in shapes.items():
        if adapters.targets & set(_fused_with(path, shapes)):
            yield path, module


def _fused_with(path: str, modules: Iterable[str]) -> list[str]:
    """Return the last name parts of the layers that engines fuse with ``path``, itself included."""
    owner, _, leaf = path.rpartition(".")
    for members in FUSED_SETS:
        if leaf in members:
            return [member for member in members if f"{owner}.{member}" in modules]
    return [leaf]
