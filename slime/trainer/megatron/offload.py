"""Trainer state in host memory: all of it while the engines use the GPU (`Offloader`), and weights
of frozen models (`WeightsCopy`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor, nn

from slime.checkpoints.megatron_names import stored_tensors
from slime.processes.pinned_memory import BuffersAhead, host_buffer
from slime.trainer.megatron import device
from slime.trainer.megatron.streamed import states_of

# -- everything, while the engines have the GPU ----------------------------------------------------


@dataclass
class _Away:
    """A storage that is emptied until `Offloader.wake`.

    Attributes:
        nbytes: original size of the storage.
        copy: its contents; None for gradients.
    """

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None


class Offloader:
    """Frees the GPU's memory for the engines between updates, in one step or two, and restores it.

    It empties and refills storages in place, so all their views (parameters in DDP buffers, shards
    in the optimizer) stay valid. Pinned host buffers are reused, because pinning costs more than
    copying. Buffers for Adam's moments, which the first update creates, are pinned while the
    engines generate for that update. Gradients are not copied, because they are zeroed before use.
    Frozen weights are copied once.

        sleep(keep_weights=True)   free gradients and optimizer state; weights can still be pushed
        sleep()                    free the rest
        wake()                     restore everything, bit for bit

    Args:
        pin: use page-locked memory for the copies; default: if there is a GPU.
        borrowed: weights of these chunks that another model owns; they are left alone.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        *,
        pin: bool | None = None,
        borrowed: Sequence[Tensor] = (),
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.pin = device.has_gpu() if pin is None else pin
        self._borrowed = borrowed
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        """Pinned buffers by size in bytes, reused by later sleeps."""
        self._frozen: dict[int, Tensor] = {}
        """Copies of storages that never change, by the storage's address in torch."""
        self._away: list[_Away] = []
        self._ahead: BuffersAhead | None = None
        """Buffers for moments that did not exist at the first full sleep."""

    @torch.no_grad()
    def sleep(self, *, keep_weights: bool = False, keep: Sequence[Tensor] = ()) -> int:
        """Free gradients, optimizer state and, unless ``keep_weights``, weights except those in
        ``keep``; return the number of freed bytes. Idempotent."""
        gradients = {s.data_ptr() for s in _storages(_gradients(self.chunks))}
        left = [*self._borrowed, *keep, *(_weights(self.chunks) if keep_weights else ())]
        kept = {s.data_ptr() for s in _storages(left)}
        everything = [
            *_gradients(self.chunks),
            *_weights(self.chunks),
            *_optimizer_tensors(self.optimizer),
        ]
        frozen = {s._cdata for s in _storages(_frozen_weights(self.chunks))}
        going = []
        for buffer in self._ahead.take() if self._ahead is not None else ():
            self._free[buffer.nbytes].append(buffer)
        for storage in _storages(everything):  # only storages that are not empty yet
            if storage.data_ptr() not in kept:
                copy = None
                if storage.data_ptr() not in gradients:
                    copy = self._copy_of(storage, is_frozen=storage._cdata in frozen)
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
            self._ahead = BuffersAhead(
                _moments_to_come(self.optimizer), torch.cuda.current_device()
            )
        return sum(part.nbytes for part in going)

    @torch.no_grad()
    def wake(self) -> None:
        """Restore everything, bit for bit; gradients become 0. Idempotent."""
        for part in self._away:
            part.storage.resize_(part.nbytes)
            view = torch.empty(0, dtype=torch.uint8, device=part.storage.device).set_(part.storage)
            if part.copy is None:
                view.zero_()
            else:
                view.copy_(part.copy, non_blocking=True)
        device.synchronize()
        for part in self._away:
            if part.copy is not None and part.storage._cdata not in self._frozen:
                self._free[part.nbytes].append(part.copy)
        self._away.clear()

    @contextmanager
    def read_on_host(self) -> Iterator[None]:
        """Let offloaded parameters and optimizer states be their host copies inside the block."""
        copies = {part.storage._cdata: part.copy for part in self._away}
        held: list[Tensor] = [p for chunk in self.chunks for p in chunk.parameters()]
        held += _optimizer_holders(self.optimizer)
        before = []
        try:
            for tensor in held:
                copy = copies.get(tensor.untyped_storage()._cdata)
                if copy is not None:
                    before.append((tensor, tensor.data))
                    flat = copy.view(tensor.dtype)
                    start = flat.storage_offset() + tensor.storage_offset()
                    tensor.data = flat.as_strided(tensor.size(), tensor.stride(), start)
            yield
        finally:
            for tensor, data in before:
                tensor.data = data

    def _copy_of(self, storage: torch.UntypedStorage, *, is_frozen: bool) -> Tensor:
        if is_frozen and storage._cdata in self._frozen:
            return self._frozen[storage._cdata]
        free = self._free[storage.nbytes()]
        copy = free.pop() if free else host_buffer(storage.nbytes(), pin=self.pin)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if is_frozen:
            self._frozen[storage._cdata] = copy
        return copy.copy_(source, non_blocking=True)


@contextmanager
def lent_memory(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Free the memory of frozen weights inside the block; their values are lost."""
    sizes = [(storage, storage.nbytes()) for storage in _storages(_frozen_weights(chunks))]
    for storage, _ in sizes:
        storage.resize_(0)
    yield
    for storage, nbytes in sizes:
        storage.resize_(nbytes)


def _moments_to_come(optimizer: MegatronOptimizer) -> list[int]:
    """Return the bytes of each storage that Adam's first step will allocate: two per parameter."""
    return [
        parameter.nbytes
        for inner in torch_optimizers(optimizer)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        for group in inner.param_groups
        for parameter in group["params"]
        if parameter.numel() and not inner.state.get(parameter)
        for _ in range(2)
    ]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Iterate over the distinct non-empty storages, in order."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _weights(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [parameter.data for chunk in chunks for parameter in chunk.parameters()]


def _frozen_weights(chunks: Sequence[nn.Module]) -> list[Tensor]:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return [parameter.data for parameter in parameters if not parameter.requires_grad]


def _gradients(chunks: Sequence[nn.Module]) -> list[Tensor]:
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    return [p.main_grad for p in trained]  # type: ignore[attr-defined]


def _optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the states on the device, except step counts, which are too small to offload."""
    streamed = [states_of(inner) for inner in torch_optimizers(optimizer)]
    tensors = [tensor.data for tensor in _optimizer_holders(optimizer) if tensor.dim() > 0]
    return [
        tensor
        for tensor in tensors
        if not any(states and states.holds(tensor.untyped_storage()) for states in streamed)
    ]


def _optimizer_holders(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the parameters and state tensors of the optimizer."""
    tensors: list[Tensor] = []
    for inner in torch_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        values = [value for state in inner.state.values() for value in state.values()]
        tensors += [value for value in values if isinstance(value, Tensor)]
    return tensors


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a Megatron optimizer."""
    return [part.optimizer for part in megatron_optimizers(optimizer) if part.optimizer is not None]


def megatron_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the chained optimizers; Megatron has one for dense and one for expert parameters."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]


# -- other weights for the same model --------------------------------------------------------------


class WeightsCopy:
    """Weights of a frozen model: parameters and persistent buffers (`stored_tensors`), or some of
    these.

    With a GPU the copy is in pinned host memory. Swapping in does not move the policy's weights:
    each parameter temporarily points to other memory.

    Args:
        tensors_of: returns the model's tensors to copy.
    Attributes:
        iteration: the rollout after which these were the policy's weights; None for weights with
            which the run started.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        iteration: int | None = None,
        *,
        tensors_of: Callable[[Sequence[nn.Module]], list[Tensor]] = stored_tensors,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._tensors_of = tensors_of
        self.take(chunks, iteration)

    @torch.no_grad()
    def take(self, chunks: Sequence[nn.Module], iteration: int | None = None) -> None:
        """Copy the model's current weights."""
        self.iteration = iteration
        parameters = self._tensors_of(chunks)
        if not self.tensors:
            pin = device.has_gpu()
            flat = [host_buffer(p.nbytes, pin=pin) for p in parameters]
            self.tensors = [
                memory.view(p.dtype).view(p.shape) for memory, p in zip(flat, parameters)
            ]
        for copy, parameter in zip(self.tensors, parameters):
            copy.copy_(parameter.detach(), non_blocking=True)
        device.synchronize()

    @contextmanager
    def swapped_in(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Let the model compute with these weights inside the block."""
        parameters = self._tensors_of(chunks)
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, copy in zip(parameters, self.tensors):
                parameter.data = copy.to(parameter.device, non_blocking=True)
            yield
        finally:
            for parameter, data in zip(parameters, own):
                parameter.data = data

    @torch.no_grad()
    def equals(self, chunks: Sequence[nn.Module]) -> bool:
        """Tell whether the model's weights equal the copy exactly."""
        parameters = self._tensors_of(chunks)
        return all(torch.equal(copy, p.detach().cpu()) for copy, p in zip(self.tensors, parameters))
