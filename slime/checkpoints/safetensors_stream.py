"""Writes safetensors files tensor by tensor, with one tensor in memory at a time. The caller must
know all names, dtypes and shapes in advance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from slime.engines.wire.buckets import dtype_name, dtype_of
from slime.files import replacing

#: Name → (torch's name of the dtype, shape).
Table = dict[str, tuple[str, tuple[int, ...]]]

#: dtype code of the format → torch's name, as `slime.engines.wire.buckets.dtype_name` returns it.
DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in DTYPE_NAMES.items()}


def read_table(path: Path) -> Table:
    """Read the table of a file from its header.

    Raises:
        SafetensorError, OSError: the file is damaged or truncated.
    """
    with safe_open(path, framework="pt") as content:
        names = content.keys()  # ``content`` is not a dict
        pieces = {name: content.get_slice(name) for name in names}
        return {
            name: (DTYPE_NAMES[piece.get_dtype()], tuple(piece.get_shape()))
            for name, piece in pieces.items()
        }


def table_of(tensors: Mapping[str, torch.Tensor]) -> Table:
    """Return the table of a file with these tensors."""
    return {
        name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()
    }


def write_stream(
    path: Path,
    table: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write a file atomically; it is on the disk when this returns.

    Args:
        table: all tensors of the file.
        tensors: the same tensors in any order; each is written at once and can be freed then.
    """
    # the library's order: large dtypes first, which aligns every tensor
    order = sorted(table, key=lambda name: (-dtype_of(table[name][0]).itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets = dict[str, int]()
    end = 0
    for name in order:
        dtype, shape = table[name]
        offsets[name] = end
        end += math.prod(shape) * dtype_of(dtype).itemsize
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offsets[name], end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    missing = set(order)
    with replacing(path, durable=True) as unfinished, unfinished.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        start = file.tell()
        file.truncate(start + end)
        for name, tensor in tensors:
            missing.remove(name)
            assert (dtype_name(tensor.dtype), tuple(tensor.shape)) == table[name], name
            file.seek(start + offsets[name])
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert not missing, missing
