"""``--offload-optimizer-states``: Adam's moments live in host memory, and visit the device a bucket at a time.

    host (pinned)  [m v | m v | m v | m v]         per bucket of parameters: moments in, fused step, moments out
    device              [m v]

Of the 16 bytes per parameter that training in bfloat16 with float32 master weights keeps (beside the weights
themselves), 8 leave the device; the step costs the trip of these 8 bytes in both directions. Everything runs on one
stream, so that no bucket is overwritten before it is used. The moments are in host memory between steps: also while
colocated engines hold the device.

Written for GPUs, tested on CPUs (where host and device are one, and with copies that stand in for the trip).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime.host_memory import host_buffer
from slime.memory.trainer import MOMENTS_BUCKET_BYTES
from slime.train.megatron import device

Member = tuple[int, torch.nn.Parameter]


class HostStates:
    """Stands between a torch Adam and whoever calls its ``step``.

    Args:
        inner: the optimizer; its ``step`` is replaced.
        bucket_bytes: of moments that are on the device at a time.
    """

    def __init__(self, inner: torch.optim.Optimizer, bucket_bytes: int = MOMENTS_BUCKET_BYTES) -> None:
        self.inner, self.bucket_bytes = inner, bucket_bytes
        self._step = inner.step
        self._buffers: dict[tuple[int, str], Tensor] = {}
        """Host copies by parameter and name; kept, because pinning memory anew costs more than the copy."""

    @staticmethod
    def install(inner: torch.optim.Optimizer, bucket_bytes: int = MOMENTS_BUCKET_BYTES) -> HostStates:
        """From now on ``inner.step()`` works bucket by bucket."""
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
                self._bring(bucket)
                self._step()
                self._store(bucket)
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
            self._store(bucket)
        device.synchronize()

    def _buckets(self, groups: list[list[torch.nn.Parameter]]) -> Iterator[list[Member]]:
        bucket: list[Member] = []
        size = 0
        for index, parameters in enumerate(groups):
            for parameter in parameters:
                moments = 2 * parameter.numel() * 4
                if bucket and size + moments > self.bucket_bytes:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((index, parameter))
                size += moments
        if bucket:
            yield bucket

    def _bring(self, bucket: list[Member]) -> None:
        for _, parameter in bucket:
            state = self.inner.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # step counts stay where they are
                    state[name] = self._to_device(value, parameter.device)

    def _store(self, bucket: list[Member]) -> None:
        for _, parameter in bucket:
            state = self.inner.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[name] = self._to_host(value, (id(parameter), name))

    def _to_device(self, value: Tensor, where: torch.device) -> Tensor:
        return value.to(where, non_blocking=True)

    def _to_host(self, value: Tensor, key: tuple[int, str]) -> Tensor:
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
    """The `HostStates` that were installed on an optimizer."""
    owner = getattr(inner.step, "__self__", None)
    return owner if isinstance(owner, HostStates) else None
