"""One piece of host memory that snapshots are copied into; pinned where tensors come from a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.errors import UserError

_ALIGNMENT = 64


class HostMemory:
    """Kept from one snapshot to the next: getting it, and above all pinning it, costs more than copying.

    torch's own allocator rounds pinned memory up to a power of two, which for a snapshot of 60 GB is 64 and for one of
    70 GB is 128; so ordinary memory of the exact size is taken and registered with the driver.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registered = False

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``tensors`` in this memory, valid until the next call. Waits until they are complete.

        Raises:
            UserError: the host has not enough memory.
        """
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if sum(sizes) > self.nbytes:
            self._grow(sum(sizes), pin=on_gpu)
        copies, offset = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copies.append(self._view(offset, tensor))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
            offset += size
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back to the system."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._registered = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _grow(self, nbytes: int, pin: bool) -> None:
        self.release()
        try:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise UserError(
                f"no {nbytes / 1e9:.1f} GB of host memory for the snapshot of an asynchronous save",
                why=str(error).splitlines()[0],
                fix="drop --async-save: then checkpoints are written straight from the trainer's memory",
            ) from error
        if pin:
            code = torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), nbytes, 0)
            self._registered = int(code) == 0  # not pinned is slower, not wrong

    def _view(self, offset: int, like: Tensor) -> Tensor:
        """A tensor whose storage is just its own bytes: torch.save writes whole storages."""
        if not like.numel():
            return torch.empty_like(like, device="cpu")
        window = self._buffer.numpy()[offset:]
        return torch.frombuffer(window, dtype=like.dtype, count=like.numel()).view(like.shape)
