"""Detect which tensors of a push an SGLang process has loaded; runs inside it, for the weight
probe.

SGLang's loaders do not say what they took. They skip names that they do not know, and drop half of
a pair that they fuse when the other half comes in another call. So before a transfer the first
numbers of each tensor that will be sent are overwritten, at the place where the engine holds it. A
mark that is still there after the transfer belongs to a tensor that was not loaded, whichever way
the weights came. An engine whose push broke off stays paused, marks and all, until another push has
brought everything.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

#: Marks of floats are NaNs that arithmetic does not make; weights hold none.
_FLOATS = {
    torch.float64: 0x7FF8_5A5A_C3C3_0F1E,
    torch.float32: 0x7FC5_A3C7,
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FD3,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7E,
}
#: Packed weights may be any whole number: eight bytes of this pattern do not come by chance.
_PATTERN = 0x1E37_79B9_7F4A_7C15
_MARK_BYTES = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LoadMarks:
    """Places for marks in the memory of tensors.

    Args:
        held: by name, what a process holds of the tensors that will be sent. Tensors without a
            number are left out.
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


#: By model, from the start of a transfer to its check.
_set: weakref.WeakKeyDictionary[nn.Module, LoadMarks] = weakref.WeakKeyDictionary()
#: By model, where its parameters were when the places were found. To find ten thousand of them
#: takes seconds.
_found: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], LoadMarks]] = (
    weakref.WeakKeyDictionary()
)


def mark(model: nn.Module, find: Callable[[], Mapping[str, torch.Tensor]], *, keep: bool) -> int:
    """Mark what will be sent; returns how many tensors that are.

    Args:
        find: what the process holds of it; called if the model's parameters are not where they
            were.
        keep: remember the places for the next push; not those in layers that are only opened for
            one.
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
    """Other tensors will be sent from now on."""
    _found.pop(model, None)


def untouched(model: nn.Module) -> list[str]:
    """Return the names that were marked and have not been loaded since; [] where nothing is marked.
    Marks are read once: they would keep the memory of layers that were only opened for the
    transfer."""
    marks = _set.pop(model, None)
    return [] if marks is None else marks.untouched()


def _first_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Words of the first numbers of a tensor's first row, as a view: eight bytes, or as many as the
    row has."""
    flat = tensor.detach()
    row = flat[(0,) * (flat.dim() - 1)] if flat.dim() else flat.reshape(1)
    return row[: max(1, _MARK_BYTES // flat.dtype.itemsize)].view(_WORDS[flat.dtype.itemsize])


def _mark(dtype: torch.dtype) -> int:
    if dtype in _FLOATS:
        return _FLOATS[dtype]
    bits = 8 * dtype.itemsize - (dtype.itemsize > 1)  # words above one byte have a sign
    return _PATTERN & ((1 << bits) - 1)
