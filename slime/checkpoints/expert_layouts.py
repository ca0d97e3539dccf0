"""Directories with another layout of stacked experts than published checkpoints.

    published     …experts.gate_up_proj: [experts, out, in] or [experts, in, out], by family
    transposed    the other order of axes, as transformers writes Qwen3-VL
    one by one    …experts.0.gate_proj.weight, ….up_proj.weight [out, in], as transformers writes
                  Qwen3.5

Readers get the published layout in all cases. Only slices that are read are converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.models import ModelFamily, ModelSpec
from slime.models.layouts import (
    ROW,
    STACKED_GATE_UP,
    ParamMapping,
    TensorSource,
    Transposed,
    stack_slices,
)

if TYPE_CHECKING:
    import torch

#: Last part of a stack's name → last parts of the names of an expert's weights, in row order.
_PIECES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class StackLayout:
    """How a directory holds a stack of experts.

    Attributes:
        pieces: for each expert, its stored tensors in row order; () if a stack is stored.
        is_transposed: rows and columns are swapped, compared with the published layout.
    """

    pieces: tuple[tuple[str, ...], ...]
    is_transposed: bool

    @property
    def names(self) -> list[str]:
        """Names of the stored pieces."""
        return [name for expert in self.pieces for name in expert]

    def open(self, name: str, stored: Callable[[str], TensorSource]) -> TensorSource:
        """Return the stack ``name`` in the published layout."""
        stack: TensorSource
        if self.pieces:
            stack = _StackedExperts([[stored(piece) for piece in expert] for expert in self.pieces])
        else:
            stack = stored(name)
        return _Swapped(stack) if self.is_transposed else stack


def stack_layouts(
    family: ModelFamily,
    spec: ModelSpec,
    stored: AbstractSet[str],
    shape_of: Callable[[str], Sequence[int]],
) -> dict[str, StackLayout]:
    """Return the stacks that are not in the published layout, by their published names.

    Args:
        stored: names of the stored tensors.
        shape_of: name of a stored tensor → its shape.
    """
    found: dict[str, StackLayout] = {}
    for shapes in _stacks_by_layer(family, spec):
        is_published_transposed = _is_transposed(family, next(iter(shapes)))
        pieces = {name: _pieces_of(name, spec.num_experts) for name in shapes}
        if not stored.isdisjoint(one for stack in pieces.values() for row in stack for one in row):
            unstacked = {name: stack for name, stack in pieces.items() if name not in stored}
            found |= {
                name: StackLayout(stack, is_published_transposed)
                for name, stack in unstacked.items()
            }
        elif stored >= shapes.keys() and _are_swapped(shapes, shape_of):
            found |= {name: StackLayout((), is_transposed=True) for name in shapes}
    return found


def _stacks_by_layer(family: ModelFamily, spec: ModelSpec) -> Iterator[dict[str, Sequence[int]]]:
    """Yield name → published shape for each layer whose stacks have gate rows before up rows."""
    layers: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in family.hf_tensors(spec):
        found = family.match_hf(name)
        if found is not None and found[0].is_stacked and _is_plain(found[0].layout):
            layers.setdefault(name.rpartition(".")[0], {})[name] = shape
    return (shapes for shapes in layers.values() if len(shapes) == len(_PIECES))


def _is_plain(layout: ParamMapping) -> bool:
    plain = layout.plain if isinstance(layout, Transposed) else layout
    return plain in (STACKED_GATE_UP, ROW)


def _is_transposed(family: ModelFamily, name: str) -> bool:
    found = family.match_hf(name)
    return found is not None and isinstance(found[0].layout, Transposed)


def _pieces_of(name: str, count: int) -> tuple[tuple[str, ...], ...]:
    prefix, _, leaf = name.rpartition(".")
    return tuple(
        tuple(f"{prefix}.{expert}.{piece}.weight" for piece in _PIECES[leaf])
        for expert in range(count)
    )


def _are_swapped(
    shapes: Mapping[str, Sequence[int]], shape_of: Callable[[str], Sequence[int]]
) -> bool:
    """Tell whether all stacks of a layer have swapped axes. The shape of a square one does not
    tell; at least one other must differ."""
    stored = {name: tuple(shape_of(name)) for name in shapes}
    swapped = {name: (shape[0], *reversed(shape[1:])) for name, shape in shapes.items()}
    return stored == swapped and any(stored[name] != tuple(shapes[name]) for name in shapes)


class _StackedExperts:
    """A stack [experts, out, in] of separately stored matrices, read by slices."""

    def __init__(self, experts: Sequence[Sequence[TensorSource]]) -> None:
        self._experts = experts
        self.shape: Sequence[int] = (len(experts), *_common(map(_shape, experts)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch

        experts, rows, columns = stack_slices(index)
        return torch.stack([_read_rows(expert, rows, columns) for expert in self._experts[experts]])


def _shape(pieces: Sequence[TensorSource]) -> tuple[int, ...]:
    rows, *columns = _common(tuple(piece.shape) for piece in pieces)
    return (len(pieces) * rows, *columns)


def _common(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common shape, or one that differs, which a later check of shapes refuses."""
    first, *others = shapes
    return next((shape for shape in others if shape != first), first)


def _read_rows(pieces: Sequence[TensorSource], rows: slice, columns: slice) -> torch.Tensor:
    """Read rows of the concatenation of matrices."""
    import torch

    start, stop, _ = rows.indices(_shape(pieces)[0])
    parts = []
    first = 0
    for piece in pieces:
        last = first + piece.shape[0]
        if start < last and first < stop:
            parts.append(piece[max(start, first) - first : min(stop, last) - first, columns])
        first = last
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class _Swapped:
    """A stack with rows and columns swapped, read by slices."""

    def __init__(self, stack: TensorSource) -> None:
        self._stack = stack
        experts, rows, columns = stack.shape
        self.shape: Sequence[int] = (experts, columns, rows)

    def __getitem__(self, index: Any) -> torch.Tensor:
        experts, rows, columns = stack_slices(index)
        return self._stack[experts, columns, rows].transpose(-1, -2)
