"""Other weights for the same model (the reference), kept in host memory and swapped in for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slime.checkpoints.megatron_names import stored_tensors
from slime.host_memory import host_buffer
from slime.train.megatron import device


class WeightsCopy:
    """A copy of a model's weights: parameters and persistent buffers (`stored_tensors`).

    On a GPU it lies in pinned host memory. Swapping in does not move the policy's own weights: each parameter points
    elsewhere for a while, and back afterwards.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self.take(chunks)

    @torch.no_grad()
    def take(self, chunks: Sequence[nn.Module]) -> None:
        """Copy the weights as they are now."""
        parameters = stored_tensors(chunks)
        if not self.tensors:
            pin = device.has_gpu()
            flat = [host_buffer(p.numel() * p.element_size(), pin=pin) for p in parameters]
            self.tensors = [memory.view(p.dtype).view(p.shape) for memory, p in zip(flat, parameters)]
        for copy, parameter in zip(self.tensors, parameters):
            copy.copy_(parameter.detach(), non_blocking=True)
        device.synchronize()

    @contextmanager
    def swapped_in(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Within the block the model computes with these weights."""
        parameters = stored_tensors(chunks)
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
        """Are the model's weights the same bits as the copy?"""
        parameters = stored_tensors(chunks)
        return all(torch.equal(copy, p.detach().cpu()) for copy, p in zip(self.tensors, parameters))
