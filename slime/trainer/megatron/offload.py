"""Trainer state in host memory: everything while the engines have the GPU (`Offloader`), weights of
models that only score (`WeightsCopy`), Adam's moments between steps with
``--offload-optimizer-states`` (`HostStates`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor, nn

from slime.checkpoints.megatron_names import stored_tensors
from slime.memory.trainer import MOMENTS_BUCKET_BYTES
from slime.processes.pinned_memory import BuffersAhead, host_buffer
from slime.trainer.megatron import device

# -- everything, while the engines have the GPU ----------------------------------------------------


@dataclass
class _Away:
    """A storage that is empty for now.

    Attributes:
        nbytes: its size when it is there.
        copy: its contents; None for gradients.
    """

    storage: torch.UntypedStorage
    nbytes: int
    copy: Tensor | None


class Offloader:
    """Gives the GPU's memory to the engines between updates and takes it back, in one step or two.

    It works on storages, not on tensors: a storage is emptied and refilled in place, so every view
    of it (parameters in DDP buffers, shards in the optimizer) stays valid. The pinned host copies
    are kept: pinning costs more than copying. Those for Adam's moments, which the first update
    makes, are pinned while the engines generate for it. Gradients are not copied: they are zeroed
    before they are used anyway. Frozen weights are copied once.

        sleep(keep_weights=True)   gradients and optimizer state go; the weights can still be pushed
        sleep()                    what is left goes
        wake()                     everything is back, bit for bit

    Args:
        pin: copies lie in page-locked memory; default: where there is a GPU.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, *, pin: bool | None = None
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.pin = device.has_gpu() if pin is None else pin
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        """Pinned memory by size, kept from sleep to sleep."""
        self._frozen: dict[int, Tensor] = {}
        """Copies of storages that never change, by their address in torch."""
        self._away: list[_Away] = []
        self._ahead: BuffersAhead | None = None
        """Buffers for moments that did not exist at the first whole sleep."""

    @torch.no_grad()
    def sleep(self, *, keep_weights: bool = False) -> int:
        """Empty gradients, optimizer state and (unless kept) weights; returns the bytes freed.
        Idempotent."""
        gradients = {s.data_ptr() for s in _storages(_gradients(self.chunks))}
        kept = {s.data_ptr() for s in _storages(_weights(self.chunks))} if keep_weights else set()
        everything = [
            *_gradients(self.chunks),
            *_weights(self.chunks),
            *_optimizer_tensors(self.optimizer),
        ]
        frozen = {s._cdata for s in _storages(_frozen_weights(self.chunks))}
        going = []
        for buffer in self._ahead.take() if self._ahead is not None else ():
            self._free[buffer.nbytes].append(buffer)
        for storage in _storages(everything):  # leaves out those that are empty already
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
            if part.copy is not None and part.storage._cdata not in self._frozen:
                self._free[part.nbytes].append(part.copy)
        self._away.clear()

    @contextmanager
    def read_on_host(self) -> Iterator[None]:
        """Within the block parameters and optimizer states that are away are their host copies."""
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


def _frozen_weights(chunks: Sequence[nn.Module]) -> list[Tensor]:
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return [parameter.data for parameter in parameters if not parameter.requires_grad]


def _gradients(chunks: Sequence[nn.Module]) -> list[Tensor]:
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    return [p.main_grad for p in trained]  # type: ignore[attr-defined]


def _optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    tensors = [tensor.data for tensor in _optimizer_holders(optimizer)]
    # step counts are not worth the trip, and the moments of `HostStates` are on the host already
    where = "cuda" if device.has_gpu() else "cpu"
    return [tensor for tensor in tensors if tensor.dim() > 0 and tensor.device.type == where]


def _optimizer_holders(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Parameters and states as the optimizer holds them."""
    tensors: list[Tensor] = []
    for inner in torch_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        values = [value for state in inner.state.values() for value in state.values()]
        tensors += [value for value in values if isinstance(value, Tensor)]
    return tensors


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's."""
    return [part.optimizer for part in megatron_optimizers(optimizer) if part.optimizer is not None]


def megatron_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron keeps one optimizer for dense and one for expert parameters, chained."""
    return (
        list(optimizer.chained_optimizers)
        if isinstance(optimizer, ChainedOptimizer)
        else [optimizer]
    )


# -- other weights for the same model --------------------------------------------------------------


class WeightsCopy:
    """Weights of a model that does not learn: parameters and persistent buffers (`stored_tensors`),
    or some of these.

    On a GPU the copy lies in pinned host memory. Swapping in does not move the policy's own
    weights: each parameter points elsewhere for a while, and back afterwards.

    Args:
        tensors_of: those of the model that are copied.
    Attributes:
        iteration: the rollout after which these were the policy's weights; None if the run was
            started with them.
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
        """Copy the weights as they are now."""
        self.iteration = iteration
        parameters = self._tensors_of(chunks)
        if not self.tensors:
            pin = device.has_gpu()
            flat = [host_buffer(p.numel() * p.element_size(), pin=pin) for p in parameters]
            self.tensors = [
                memory.view(p.dtype).view(p.shape) for memory, p in zip(flat, parameters)
            ]
        for copy, parameter in zip(self.tensors, parameters):
            copy.copy_(parameter.detach(), non_blocking=True)
        device.synchronize()

    @contextmanager
    def swapped_in(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Within the block the model computes with these weights."""
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
        """Tell whether the model's weights are the same bits as the copy."""
        parameters = self._tensors_of(chunks)
        return all(torch.equal(copy, p.detach().cpu()) for copy, p in zip(self.tensors, parameters))


# -- Adam's moments between steps ------------------------------------------------------------------

Member = tuple[int, torch.nn.Parameter]
"""The number of a parameter group, and a parameter of it."""


class HostStates:
    """Keeps the moments of a torch Adam in host memory, and brings them to the device for a step
    one bucket of parameters at a time.

        host (pinned)  [m v | m v | m v | m v]      per bucket: moments in, fused step, moments out
        device              [m v]

    Of the 16 bytes per parameter that training in bfloat16 with float32 master weights keeps
    (beside the weights themselves), 8 leave the device; the step costs the trip of these 8 bytes in
    both directions. Everything runs on one stream, so that no bucket is overwritten before it is
    used. Between steps the moments are on the host, also while colocated engines hold the device.

    Args:
        inner: the optimizer; its ``step`` is replaced by `install`.
        bucket_bytes: of moments that are on the device at a time.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, bucket_bytes: int = MOMENTS_BUCKET_BYTES
    ) -> None:
        self.inner = inner
        self.bucket_bytes = bucket_bytes
        self._step = inner.step
        self._buffers: dict[tuple[int, str], Tensor] = {}
        """Host copies by parameter and name; kept, as pinning memory costs more than the copy."""

    @staticmethod
    def install(
        inner: torch.optim.Optimizer, bucket_bytes: int = MOMENTS_BUCKET_BYTES
    ) -> HostStates:
        """Make ``inner.step()`` work bucket by bucket from now on."""
        states = HostStates(inner, bucket_bytes)
        inner.step = states.step  # type: ignore[method-assign, assignment]
        return states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One optimizer step over all parameters; the same numbers as without buckets."""
        assert closure is None
        groups = self.inner.param_groups
        everything = [list(group["params"]) for group in groups]
        try:
            for bucket in self._buckets(everything):
                for index, group in enumerate(groups):
                    group["params"] = [parameter for owner, parameter in bucket if owner == index]
                self.inner.param_groups = [group for group in groups if group["params"]]
                self._move(bucket, self._to_device)
                self._step()
                self._move(bucket, self._to_host)
        finally:
            self.inner.param_groups = groups
            for group, parameters in zip(groups, everything):
                group["params"] = parameters
        device.synchronize()

    @torch.no_grad()
    def rehost(self) -> None:
        """Move what a checkpoint left on the device to the host."""
        everything = [list(group["params"]) for group in self.inner.param_groups]
        for bucket in self._buckets(everything):
            self._move(bucket, self._to_host)
        device.synchronize()

    def _buckets(self, groups: list[list[torch.nn.Parameter]]) -> Iterator[list[Member]]:
        bucket: list[Member] = []
        size = 0
        for index, parameters in enumerate(groups):
            for parameter in parameters:
                moments = 2 * parameter.numel() * 4
                if bucket and size + moments > self.bucket_bytes:
                    yield bucket
                    bucket = []
                    size = 0
                bucket.append((index, parameter))
                size += moments
        if bucket:
            yield bucket

    def _move(self, bucket: list[Member], to: Callable[[Tensor, Tensor, str], Tensor]) -> None:
        for _, parameter in bucket:
            state = self.inner.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # step counts stay where they are
                    state[name] = to(value, parameter, name)

    def _to_device(self, value: Tensor, parameter: Tensor, name: str) -> Tensor:
        return value.to(parameter.device, non_blocking=True)

    def _to_host(self, value: Tensor, parameter: Tensor, name: str) -> Tensor:
        key = (id(parameter), name)
        buffer = self._buffers.get(key)
        if buffer is None:
            if value.device.type == "cpu" and not device.has_gpu():
                buffer = value  # it is there already
            else:
                flat = host_buffer(value.numel() * value.element_size(), pin=device.has_gpu())
                buffer = flat.view(value.dtype).view(value.shape)
            self._buffers[key] = buffer
        return buffer if buffer is value else buffer.copy_(value, non_blocking=True)


def host_states_of(inner: torch.optim.Optimizer) -> HostStates | None:
    """Return the `HostStates` that were installed on an optimizer."""
    owner = getattr(inner.step, "__self__", None)
    return owner if isinstance(owner, HostStates) else None
