"""Gather parameters from the ranks that hold them, in batches.

A model with experts has ten thousand parameters or more, and each collective has a fixed cost of a
few dozen microseconds. So parameters with the same source and group share a flat buffer:

    pipeline   one broadcast per stage that holds some of the batch
    experts    one broadcast per expert-parallel rank that holds some of the batch
    tensor     one all-gather of all sharded parameters of experts, and one of all others

Values are moved bit for bit. Every rank of the groups must call it with the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slime.checkpoints.megatron_names import Placement
from slime.engines.wire.buckets import dtype_of

#: Bytes of full tensors per batch.
BATCH_BYTES = 128 << 20
_ALIGNMENT = 16


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter that a rank of this pipeline (and expert) group holds, as known to all its ranks.

    Attributes:
        shape, dtype: of the holder's piece.
        is_expert: it belongs to an expert, which only some expert-parallel ranks hold.
        is_cut: it is sharded over tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pp_rank: int
    ep_rank: int
    is_expert: bool
    is_cut: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def whole_bytes(one: PlacedParameter, placement: Placement) -> int:
    """Return the bytes of the parameter with the pieces of all tensor-parallel ranks."""
    pieces = (placement.etp_size if one.is_expert else placement.tp_size) if one.is_cut else 1
    return pieces * one.nbytes


def batches(
    held: Sequence[PlacedParameter], placement: Placement, limit: int = BATCH_BYTES
) -> Iterator[list[PlacedParameter]]:
    """Yield batches of consecutive parameters with at most ``limit`` bytes of full tensors; a
    larger parameter is a batch of its own."""
    batch: list[PlacedParameter] = []
    size = 0
    for one in held:
        nbytes = whole_bytes(one, placement)
        if batch and size + nbytes > limit:
            yield batch
            batch = []
            size = 0
        batch.append(one)
        size += nbytes
    if batch:
        yield batch


def gather(
    batch: Sequence[PlacedParameter],
    local: Mapping[str, torch.Tensor],
    place: Placement,
    device: torch.device,
) -> dict[str, list[torch.Tensor]]:
    """Return the tensor-parallel pieces of each parameter, in rank order; views of shared buffers.

    Args:
        local: this rank's own parameters.
    """
    here = {one.name: local[one.name].detach() for one in batch if one.name in local}
    if place.pp_group is not None:
        own = [one for one in batch if not one.is_expert or one.ep_rank == place.ep_rank]
        _broadcast(own, {one.name: one.pp_rank for one in own}, here, place.pp_group, device)
    if place.ep_group is not None:
        experts = [one for one in batch if one.is_expert]
        ranks = {one.name: one.ep_rank for one in experts}
        _broadcast(experts, ranks, here, place.ep_group, device)
    pieces = {one.name: [here[one.name]] for one in batch}
    for group, is_expert in ((place.tp_group, False), (place.etp_group, True)):
        cut = [one for one in batch if one.is_cut and one.is_expert == is_expert]
        if group is not None and cut:
            pieces |= _all_gather(cut, here, group, device)
    return pieces


def _broadcast(
    held: Sequence[PlacedParameter],
    sources: Mapping[str, int],
    here: dict[str, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Broadcast each parameter from its source in the group, into ``here``."""
    for source in sorted(set(sources.values())):
        own = [one for one in held if sources[one.name] == source]
        flat = _flat(own, here, device) if group.rank() == source else _empty(own, device)
        dist.broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            here.update(_unpacked(own, flat))


def _all_gather(
    held: Sequence[PlacedParameter],
    here: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, list[torch.Tensor]]:
    flat = _flat(held, here, device)
    parts = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(parts, flat, group=group)
    by_rank = [dict(_unpacked(held, part)) for part in parts]
    return {one.name: [found[one.name] for found in by_rank] for one in held}


def _offsets(held: Iterable[PlacedParameter]) -> tuple[list[int], int]:
    """Return offsets of the parameters in a flat buffer, aligned for any dtype, and its size."""
    offsets = []
    end = 0
    for one in held:
        offsets.append(end)
        end += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _empty(held: Sequence[PlacedParameter], device: torch.device) -> torch.Tensor:
    return torch.empty(_offsets(held)[1], dtype=torch.uint8, device=device)


def _flat(
    held: Sequence[PlacedParameter], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    flat = _empty(held, device)
    for name, view in _unpacked(held, flat):
        view.copy_(tensors[name])
    return flat


def _unpacked(
    held: Sequence[PlacedParameter], flat: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    for one, offset in zip(held, _offsets(held)[0]):
        yield one.name, flat[offset : offset + one.nbytes].view(dtype_of(one.dtype)).view(one.shape)
