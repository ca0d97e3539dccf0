"""The adapter tensors that engines receive, made from the trainer's.

Engines fuse q, k and v (gate and up; the first two projections of latent attention) and accept the
adapters of fused layers only as complete sets. So a layer without an adapter gets one of zeros if a
layer fused with it has one. The routed experts of a layer are stacked: that is one tensor instead
of a hundred, and the form that SGLang applies:

    ….mlp.experts.gate_proj.lora_A.weight    [experts, rank, in], or [1, rank, in] if they share it

An engine multiplies a whole adapter by one factor, alpha / rank. If experts have a lower rank,
their adapters are padded with zeros, and B is multiplied by rank / expert rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slime.engines.adapters import FUSED_SETS
from slime.engines.wire.buckets import TensorEntry, dtype_name, entries_of
from slime.models.adapters import AdapterConfig, Side, peft_name
from slime.models.parameters import ModelParameters, Shape
from slime.models.peft_config import plain_config


@dataclass(frozen=True)
class Piece:
    """A trained tensor's place in a sent one.

    Attributes:
        name: of the sent tensor.
        expert: index in its first axis; None for a tensor of two axes.
        side: tells the axis of the rank: the last but one of A, the last of B.
        factor: multiplies the numbers.
    """

    name: str
    expert: int | None
    side: Side
    factor: float

    def view(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the piece's place in the sent tensor."""
        part = tensor if self.expert is None else tensor[self.expert]
        return part[:rank] if self.side == "A" else part[:, :rank]


@dataclass(frozen=True)
class AdapterLayout:
    """The tensors in every push of an adapter.

    Attributes:
        adapters: rank, factor and layers.
        trained: name → shape of the trainer's tensors.
        sent: name → shape of the engines' tensors, in the order of layers.
        pieces: name of a trained tensor → its place.
        targets: last name parts of all layers with an adapter in an engine.
        lone_queries: the model has a ``q_proj`` without ``k_proj`` and ``v_proj``.
    """

    adapters: AdapterConfig
    trained: dict[str, Shape]
    sent: dict[str, Shape]
    pieces: dict[str, Piece]
    targets: tuple[str, ...]
    lone_queries: bool

    @staticmethod
    def of(parameters: ModelParameters) -> AdapterLayout:
        """Make the layout of a model's adapters."""
        adapters = parameters.adapters
        assert adapters is not None, "a model without adapters"
        trained = parameters.trained
        modules = dict(_modules(parameters, adapters))
        sent: dict[str, Shape] = {}
        pieces: dict[str, Piece] = {}
        for owner in modules.values():
            for side in _SIDES:
                whole = owner.name_of(side)
                sent[whole] = owner.shape_of(side, adapters)
                for name, expert in owner.sources(side, trained):
                    is_scaled = owner.experts and side == "B"
                    factor = adapters.rank / adapters.expert_rank if is_scaled else 1.0
                    pieces[name] = Piece(whole, expert, side, factor)
        leaves = sorted({module.rpartition(".")[2] for module in modules})
        lone = any(
            module.endswith(".q_proj") and module.removesuffix("q_proj") + "k_proj" not in modules
            for module in modules
        )
        return AdapterLayout(adapters, trained, sent, pieces, tuple(leaves), lone)

    @property
    def has_experts(self) -> bool:
        return any(len(shape) == 3 for shape in self.sent.values())

    @property
    def shares_outer_experts(self) -> bool:
        """Whether the experts of a layer share the outer matrices."""
        return self.has_experts and self.adapters.experts == "shared-outer"

    def entries(self, dtype: torch.dtype) -> list[TensorEntry]:
        """Return the table of the sent tensors in one flat buffer."""
        names = list(self.sent)
        shapes = [list(shape) for shape in self.sent.values()]
        return entries_of(names, [dtype_name(dtype)] * len(names), shapes)

    def place(self, name: str, tensor: torch.Tensor, views: dict[str, torch.Tensor]) -> None:
        """Copy a trained tensor to its place among the sent ones, which start as zeros."""
        piece = self.pieces[name]
        rank = tensor.shape[0] if piece.side == "A" else tensor.shape[1]
        view = piece.view(views[piece.name], rank)
        if piece.factor == 1.0:
            view.copy_(tensor)
        else:
            view.copy_(tensor.float() * piece.factor)

    def largest(self, views: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the largest absolute value of each trained tensor, from the sent ones."""
        # one reduction for all experts of a layer: a model may have ten thousand of them
        tops = [view.abs().flatten(-2).amax(-1).float().view(-1) for view in views.values()]
        whole = torch.cat(tops).cpu().split([len(top) for top in tops])
        by_name = {name: top.tolist() for name, top in zip(views, whole, strict=True)}
        return {name: by_name[piece.name][piece.expert or 0] for name, piece in self.pieces.items()}

    def config_dict(self, base: str) -> dict[str, Any]:
        """Return the fields of PEFT's ``adapter_config.json`` for the sent tensors.

        Args:
            base: name or directory of the base model.
        """
        return plain_config(self.adapters.rank, self.adapters.alpha, self.targets, base)


_SIDES: tuple[Side, ...] = ("A", "B")


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

    def name_of(self, side: Side) -> str:
        return peft_name(self.path, side)

    def shape_of(self, side: Side, adapters: AdapterConfig) -> Shape:
        rows, columns = self.out_in
        shape = (adapters.rank, columns) if side == "A" else (rows, adapters.rank)
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
    for name, shape in parameters.stored.items():
        found = parameters.family.match_hf(name)
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
        outer: tuple[Side, ...] = ("B",) if leaf == "down_proj" else ("A",)
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
