"""Collectives for Python values, sent between trainer ranks as JSON in tensors of bytes.

torch's own object collectives send pickles, with which any member of a process group could run code
in the others. Every rank of the group must call these functions. Values are what `orjson` accepts;
tuples come back as lists.
"""

from __future__ import annotations

import io
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order."""
    return [orjson.loads(one) for one in _all_gather(orjson.dumps(value), group)]


def all_gather_tensors(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, as `gather_tensors` does on one."""
    return [_read(one) for one in _all_gather(_saved(value), group)]


def _all_gather(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    padded, sizes = _padded(content, group)
    everything = padded.new_empty((len(sizes), len(padded)))
    dist.all_gather(list(everything.unbind()), padded, group=group)
    return [_bytes(row[:size]) for row, size in zip(everything, sizes)]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return the values of all ranks on the group's first rank, None on others."""
    found = _gather(orjson.dumps(value), group)
    return None if found is None else [orjson.loads(one) for one in found]


def _gather(content: bytes, group: dist.ProcessGroup | None) -> list[bytes] | None:
    padded, sizes = _padded(content, group)
    if dist.get_rank(group) != 0:
        dist.gather(padded, group=group, group_dst=0)
        return None
    everything = padded.new_empty((len(sizes), len(padded)))
    dist.gather(padded, list(everything.unbind()), group=group, group_dst=0)
    return [_bytes(row[:size]) for row, size in zip(everything, sizes)]


def gather_tensors(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Gather plain containers that hold tensors, as `gather` does. They are read with
    ``torch.load(weights_only=True)``, which runs no code."""
    found = _gather(_saved(value), group)
    return None if found is None else [_read(one) for one in found]


def _saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the group's first rank; the values of others are ignored."""
    own = _to_tensor(orjson.dumps(value if dist.get_rank(group) == 0 else None), group)
    size = torch.tensor([len(own)], dtype=torch.int64, device=own.device)
    dist.broadcast(size, group=group, group_src=0)
    content = own if dist.get_rank(group) == 0 else own.new_empty(int(size.item()))
    dist.broadcast(content, group=group, group_src=0)
    return orjson.loads(_bytes(content))


def _to_tensor(content: bytes, group: dist.ProcessGroup | None) -> Tensor:
    device = _get_object_coll_device(group)  # a GPU if NCCL is the group's only backend
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _padded(content: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return this rank's bytes, zero-padded to the length of the longest rank's, and the lengths of
    all ranks."""
    own = _to_tensor(content, group)
    size = torch.tensor([len(own)], dtype=torch.int64, device=own.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one.item()) for one in sizes]
    return torch.nn.functional.pad(own, (0, max(lengths) - len(own))), lengths


def _bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
