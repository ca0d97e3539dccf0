"""Detect which tensors of a push an SGLang process has loaded; runs inside it, for the weight
probe.

SGLang's loaders do not report what they loaded. They skip unknown names, and drop half of a fused
pair if the other half comes in another call. So before a transfer, a mark overwrites the first
numbers of each tensor that will be sent, where the engine holds it. A mark that remains after the
transfer belongs to a tensor that was not loaded, by whichever transport. An engine with an
interrupted push stays paused, with its marks, until another push has completed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

#: Marks of floats are NaNs that arithmetic does not produce and weights do not contain.
_FLOATS = {
    torch.float64: 0x7FF8_5A5A_C3C3_0F1E,
    torch.float32: 0x7FC5_A3C7,
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FD3,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
}
#: Packed weights may be any integer: eight bytes of this pattern are no coincidence.
_PATTERN = 0x1E37_79B9_7F4A_7C15
_MARK_BYTES = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LoadMarks:
    """Places for marks in the memory of tensors.

    Args:
        held: the process's tensors that will be sent, by name. Empty tensors are skipped.
    """

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self._places: dict[tuple[torch.dtype, int], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in held.items():
            if tensor.numel():
                place = _first_numbers(tensor)
                self._places[tensor.dtype, len(place)][name] = place

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def set(self) -> None:
        """Overwrite every place."""
        for (dtype, length), places in self._places.items():
            words = list(places.values())
            mark = torch.full((length,), _mark(dtype), dtype=words[0].dtype, device=words[0].device)
            torch._foreach_copy_(words, [mark] * len(words))

    def untouched(self) -> list[str]:
        """Return the names of the tensors that still have their mark."""
        found = []
        for (dtype, _), places in self._places.items():
            is_marked = (torch.stack(list(places.values())).cpu() == _mark(dtype)).all(dim=1)
            found += [
                name for name, marked in zip(places, is_marked.tolist(), strict=True) if marked
            ]
        return found


#: Model → its marks, from the start of a transfer to its check.
_set: weakref.WeakKeyDictionary[nn.Module, LoadMarks] = weakref.WeakKeyDictionary()
#: Model → addresses of its parameters when places were found, and the places. Finding ten thousand
#: of them takes seconds.
_found: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], LoadMarks]] = (
    weakref.WeakKeyDictionary()
)


def mark(model: nn.Module, find: Callable[[], Mapping[str, torch.Tensor]], *, keep: bool) -> int:
    """Mark the tensors that will be sent; return their number.

    Args:
        find: returns the process's tensors; called if the model's parameters have moved.
        keep: remember the places for the next push; false for layers that are only opened for one
            push.
    """
    where = [parameter.data_ptr() for parameter in model.parameters()]
    known = _found.get(model)
    marks = known[1] if known is not None and known[0] == where else LoadMarks(find())
    if keep:
        _found[model] = where, marks
    _set[model] = marks
    marks.set()
    return len(marks)


def forget(model: nn.Module) -> None:
    """Forget the places, because other tensors will be sent from now on."""
    _found.pop(model, None)


def untouched(model: nn.Module) -> list[str]:
    """Return the marked names that were not loaded; [] if nothing is marked. Marks are read once,
    because they would keep the memory of layers that were only opened for the transfer."""
    marks = _set.pop(model, None)
    return [] if marks is None else marks.untouched()


def _first_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first numbers of a tensor's first row, as a view of integers: eight bytes, or the
    whole row if it is shorter."""
    flat = tensor.detach()
    row = flat[(0,) * (flat.dim() - 1)] if flat.dim() else flat.reshape(1)
    return row[: max(1, _MARK_BYTES // flat.dtype.itemsize)].view(_WORDS[flat.dtype.itemsize])


def _mark(dtype: torch.dtype) -> int:
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    bits = 8 * dtype.itemsize - (dtype.itemsize > 1)  # integers above one byte are signed
    return _PATTERN & ((1 << bits) - 1)
