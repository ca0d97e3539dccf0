"""Giving the GPU's memory to the engines between updates, and taking it back.

Works on storages, not on tensors: a storage is emptied and refilled in place, so every view of it (parameters in DDP
buffers, shards in the optimizer) stays valid. The pinned host copies are kept: pinning costs more than copying. Those
for Adam's moments, which the first update makes, are pinned while the engines generate for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from slime.host_memory import BuffersAhead, host_buffer
from slime.train.megatron import device
from slime.train.megatron.host_states import host_states_of
from slime.train.megatron.optimizer import megatron_optimizers, torch_optimizers


@dataclass
class _Away:
    """A storage that is empty at present.

    Attributes:
        nbytes: its size when it is there.
        copy: its contents; None for gradients.
    """

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None


class Offloader:
    """Moves a trainer's memory out and back, in one step or in two.

    Gradients are not copied: they are zeroed before they are used anyway.

        sleep(keep_weights=True)   gradients and optimizer state go; the weights can still be pushed
        sleep()                    what is left goes
        wake()                     everything is back, bit for bit

    Args:
        pin: copies lie in page-locked memory; default: where there is a GPU.
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, *, pin: bool | None = None) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.pin = device.has_gpu() if pin is None else pin
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        """Pinned memory by size, kept from sleep to sleep."""
        self._away: list[_Away] = []
        self._ahead: BuffersAhead | None = None
        """For moments that were not there at the first whole sleep."""

    @torch.no_grad()
    def sleep(self, *, keep_weights: bool = False) -> int:
        """Empty gradients, optimizer state and (unless kept) weights; returns the bytes freed. Idempotent."""
        gradients = {s.data_ptr() for s in _storages(_gradients(self.chunks))}
        kept = {s.data_ptr() for s in _storages(_weights(self.chunks))} if keep_weights else set()
        everything = [*_gradients(self.chunks), *_weights(self.chunks), *_optimizer_tensors(self.optimizer)]
        going = []
        for buffer in self._ahead.take() if self._ahead is not None else ():
            self._free[buffer.nbytes].append(buffer)
        for storage in _storages(everything):  # those that went before are empty, and not among them
            if storage.data_ptr() not in kept:
                copy = None if storage.data_ptr() in gradients else self._copy_of(storage)
                going.append(_Away(storage, storage.nbytes(), copy))
        if not going:
            return 0
        device.synchronize()
        for part in going:
            part.storage.resize_(0)
        self._away += going
        if device.has_gpu():
            torch.cuda.empty_cache()
        if not keep_weights and self.pin and self._ahead is None:
            self._ahead = BuffersAhead(_moments_to_come(self.optimizer), torch.cuda.current_device())
        return sum(part.nbytes for part in going)

    @torch.no_grad()
    def wake(self) -> None:
        """Everything back, bit for bit; gradients are 0. Idempotent."""
        for part in self._away:
            part.storage.resize_(part.nbytes)
            view = torch.empty(0, dtype=torch.uint8, device=part.storage.device).set_(part.storage)
            if part.copy is None:
                view.zero_()
            else:
                view.copy_(part.copy, non_blocking=True)
        device.synchronize()
        for part in self._away:
            if part.copy is not None:
                self._free[part.nbytes].append(part.copy)
        self._away.clear()

    def _copy_of(self, storage: torch.UntypedStorage) -> Tensor:
        free = self._free[storage.nbytes()]
        copy = free.pop() if free else host_buffer(storage.nbytes(), pin=self.pin)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return copy.copy_(source, non_blocking=True)


def _moments_to_come(optimizer: MegatronOptimizer) -> list[int]:
    """Bytes of each storage that Adam's first step will make on the device: two per parameter."""
    return [
        parameter.numel() * parameter.element_size()
        for inner in torch_optimizers(optimizer)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and host_states_of(inner) is None
        for group in inner.param_groups
        for parameter in group["params"]
        if parameter.numel() and not inner.state.get(parameter)
        for _ in range(2)
    ]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Distinct non-empty storages, in order."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _weights(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.data for chunk in chunks for parameter in chunk.parameters()]


def _gradients(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [p.main_grad for chunk in chunks for p in chunk.parameters() if p.requires_grad]  # type: ignore[attr-defined]


def _optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for part in megatron_optimizers(optimizer):
        if part.optimizer is None:
            continue
        tensors += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [v for state in part.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    # step counts are not worth the trip, and moments that live on the host (`host_states`) are there already
    where = "cuda" if device.has_gpu() else "cpu"
    return [tensor for tensor in tensors if tensor.dim() > 0 and tensor.device.type == where]
