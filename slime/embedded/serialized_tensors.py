"""SGLang's ``serialized_named_tensors``: base64 of a pickle of named tensors, read without running
the pickle's code.

A pickle names functions and calls them. Here each name that the format needs maps to a function of
this module that only builds a tensor; other names are refused. Tensors may be in the pickle itself
(``pickle.dumps``) or in shared memory below /dev/shm (``ForkingPickler`` with torch's sharing
strategy "file_system"). Handles that only a child of the sender can open (strategy
"file_descriptor") and handles of GPU memory are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slime.embedded.weights import WeightError
from slime.engines.wire.buckets import dtype_name

Pairs = list[tuple[str, torch.Tensor]]

_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_named_tensors(
    payload: Any, load_format: str | None, field_name: str = "serialized_named_tensors"
) -> Pairs:
    """Read (name, tensor on CPU) of one payload.

    Args:
        payload: base64 text, as JSON carries it.
        load_format: None for a list of (name, tensor) or an object of them, "flattened_bucket" for
            one flat tensor and its table.
        field_name: the request's field of the payload, for messages.
    Raises:
        WeightError: the payload has another format, or contains anything but tensors.
    """
    if not isinstance(payload, str):
        raise WeightError(f"{field_name} must hold base64 text, got {type(payload).__name__}")
    try:
        content = _load(base64.b64decode(payload, validate=True))
        if load_format == "flattened_bucket":
            return _flat(content)
        return [_pair(item) for item in (content.items() if isinstance(content, dict) else content)]
    except binascii.Error as error:
        raise WeightError(f"{field_name} is not base64: {error}") from error
    except _BROKEN as error:
        raise WeightError(
            f"{field_name} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _pair(item: Any) -> tuple[str, torch.Tensor]:
    name, tensor = item
    if isinstance(tensor, _PerRank):  # a pickle for each rank; the embedded engine has one
        tensor = _load(tensor.values[0])
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise WeightError(
            f"serialized_named_tensors holds {type(tensor).__name__} where a tensor is due"
        )
    return name, tensor


def _flat(content: Any) -> Pairs:
    """Read SGLang's FlattenedTensorBucket: concatenated tensors of any dtypes, with offsets and
    sizes in bytes."""
    buffer = content["flattened_tensor"]
    table = content["metadata"]
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8:
        raise WeightError("flattened_tensor must be a tensor of bytes (uint8)")
    pairs = []
    for entry in table:
        # a copy is aligned for every dtype
        part = buffer[entry.start_idx : entry.end_idx].clone()
        shape = tuple(entry.shape)
        if part.numel() != torch.Size(shape).numel() * entry.dtype.itemsize:
            said = f"{part.numel()} bytes for {dtype_name(entry.dtype)} {list(shape)}"
            raise WeightError(f"{entry.name} has {said} in the flattened bucket")
        pairs.append((str(entry.name), part.view(entry.dtype).view(shape)))
    return pairs


# -- what a pickle may name ------------------------------------------------------------------------


@dataclass
class _Metadata:
    """Stands for sglang's FlattenedTensorMetadata."""

    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    start_idx: int = 0
    end_idx: int = 0
    numel: int = 0


@dataclass
class _PerRank:
    """Stands for sglang's LocalSerializedTensor."""

    values: list[bytes] = field(default_factory=list)


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise TypeError("a tensor without storage")
    untyped = storage._untyped_storage
    dtype = storage.dtype
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if 0 not in size and not 0 <= last * dtype.itemsize <= untyped.nbytes() - dtype.itemsize:
        raise ValueError("a tensor reaches beyond its storage")
    return torch.empty(0, dtype=dtype).set_(untyped, offset, tuple(size), tuple(stride))


def _typed(storage: Any, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _attach(
    _class: Any, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None
) -> Any:
    if dtype is not None:
        return _typed(_attach(_class, manager, handle, size * dtype.itemsize), dtype)
    return torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)._shared_decref()


_SHARED = "torch.multiprocessing.reductions."
_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.storage._load_from_bytes": lambda raw: torch.load(
        io.BytesIO(raw), weights_only=True, map_location="cpu"
    ),
    _SHARED + "rebuild_tensor": lambda _class, storage, place: _tensor(storage, *place),
    _SHARED + "rebuild_typed_storage": _typed,
    _SHARED + "rebuild_storage_filename": _attach,
    _SHARED + "rebuild_storage_empty": lambda _class: torch.UntypedStorage(0),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "collections.OrderedDict": OrderedDict,
}
#: Classes that the functions above get as arguments but do not use.
_CLASSES = (
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
)
_RECORDS = {"FlattenedTensorMetadata": _Metadata, "LocalSerializedTensor": _PerRank}
_OPENED_BY_CHILDREN = ("multiprocessing.resource_sharer.DupFd", _SHARED + "rebuild_storage_fd")


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if full in _CALLS:
            call = _CALLS[full]
            # a new object each time, because a pickle may set attributes on what it names
            return lambda *args: call(*args)
        if module.startswith("sglang.") and name in _RECORDS:
            return type(name, (_RECORDS[name],), {})  # likewise
        if full in _CLASSES:
            return full
        if full in _OPENED_BY_CHILDREN:
            raise WeightError(
                "the tensors are shared by file descriptor, which only a child of the sender can "
                "open; call torch.multiprocessing.set_sharing_strategy('file_system') before they "
                "are serialized"
            )
        raise WeightError(
            f"serialized_named_tensors names {full}, which is no part of a tensor in CPU memory"
        )


def _load(raw: bytes) -> Any:
    return _TensorUnpickler(io.BytesIO(raw)).load()
