"""Page-locked host memory of exact size, into which GPU tensors are copied; it is reused between
copies."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from slime import deadlines
from slime.errors import UserError
from slime.log import get_logger
from slime.processes.host import free_host_memory

logger = get_logger(__name__)

_ALIGNMENT = 64
_SPARE_BYTES = 4e9  # free host memory that `BuffersAhead` leaves unlocked


def host_buffer(nbytes: int, *, pin: bool) -> Tensor:
    """Return a uint8 tensor [nbytes] of host memory. With ``pin`` it is page-locked, so that a GPU
    copies at full speed and in parallel with other work.

    torch's allocator rounds pinned memory up to a power of two: 64 GB for a snapshot of 60 GB, 128
    for one of 70. So this maps its own pages and registers them with the driver until the tensor is
    freed.

    Raises:
        MemoryError: the host has too little memory, or the process may not lock so much.
    """
    if not (pin and nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes / 1e9:.1f} GB of host memory: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    # lives as long as the storage, of which there may be views
    owner = (ctypes.c_char * nbytes).from_buffer(pages)
    buffer = torch.frombuffer(owner, dtype=torch.uint8)
    lock_pages(buffer, owner)
    return buffer


def lock_pages(buffer: Tensor, owner: object) -> None:
    """Page-lock the memory of a uint8 tensor until ``owner`` is freed, which must be before the
    memory is.

    Raises:
        MemoryError: the process may not lock so much.
    """
    runtime = torch.cuda.cudart()
    address = buffer.data_ptr()
    nbytes = buffer.numel()
    status = int(runtime.cudaHostRegister(address, nbytes, 0))
    if status:
        raise MemoryError(
            f"{nbytes / 1e9:.1f} GB of host memory cannot be page-locked (CUDA error {status}); "
            "ulimit -l may be too low"
        )
    finalizer = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    finalizer.atexit = False  # the driver does it at exit


class BuffersAhead:
    """Page-locked `host_buffer`s that a thread allocates before they are needed, since locking 8
    GiB takes 3 s. The thread does not hold Python's lock while it waits for the driver.

    A failure is only logged: the code that needs the memory allocates it again and gets the error.

    Args:
        sizes: bytes of each buffer.
        gpu: the GPU whose driver locks the memory; None for the default of new threads.
    """

    def __init__(self, sizes: Sequence[int], gpu: torch.device | int | None = None) -> None:
        self._made: list[Tensor] = []
        self._enough = threading.Event()
        arguments = (list(sizes), gpu, self._made)
        self._thread = threading.Thread(
            target=self._make, args=arguments, name="host-buffers", daemon=True
        )
        self._thread.start()

    def take(self) -> list[Tensor]:
        """Return the buffers that are ready, after waiting for the one being allocated, and
        allocate no more."""
        self._enough.set()
        self._thread.join(deadlines.PINNED_MEMORY_LOCK)
        if self._thread.is_alive():
            logger.warning(
                "host memory has been locked for %d s now, and is not waited for",
                deadlines.PINNED_MEMORY_LOCK,
            )
            return []
        made = self._made
        self._made = []
        return made

    def _make(self, sizes: list[int], gpu: torch.device | int | None, made: list[Tensor]) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a new thread starts with the first GPU
        for done, size in enumerate(sizes):
            if self._enough.is_set():
                return
            free = free_host_memory()
            if size + _SPARE_BYTES > free:
                _tell_rest(
                    sizes[done:], f"{free / 1e9:.1f} GB are free, which may fill up meanwhile"
                )
                return
            try:
                made.append(host_buffer(size, pin=True))
            except (RuntimeError, MemoryError, OSError) as error:
                _tell_rest(sizes[done:], str(error).splitlines()[0])
                return


def _tell_rest(sizes: Sequence[int], why: str) -> None:
    logger.warning(
        "%.1f GB of host memory are not locked ahead of time, but when they are needed: %s",
        sum(sizes) / 1e9,
        why,
    )


class HostMemory:
    """Host memory for snapshots of tensors. It is kept from one snapshot to the next, since
    allocating and pinning it takes longer than copying."""

    def __init__(self) -> None:
        self._buffer = host_buffer(0, pin=False)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy ``tensors`` into this memory, wait, and return the copies, which are valid until the
        next call.

        Raises:
            UserError: the host has too little memory.
        """
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if sum(sizes) > self.nbytes:
            self._grow(sum(sizes), pin=on_gpu)
        copies = []
        offset = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copies.append(self._view(offset, tensor))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
            offset += size
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Return the memory to the system."""
        self._buffer = host_buffer(0, pin=False)

    def _grow(self, nbytes: int, pin: bool) -> None:
        self.release()
        try:
            self._buffer = host_buffer(nbytes, pin=pin)
        except (RuntimeError, MemoryError, OSError) as error:
            raise UserError(
                f"no {nbytes / 1e9:.1f} GB of host memory for the snapshot of an asynchronous save",
                why=str(error).splitlines()[0],
                fix="drop --async-save: then checkpoints are written straight from the trainer's "
                "memory",
            ) from error

    def _view(self, offset: int, like: Tensor) -> Tensor:
        """Return a tensor whose storage holds only its own bytes, since torch.save writes whole
        storages."""
        if not like.numel():
            return torch.empty_like(like, device="cpu")
        window = self._buffer.numpy()[offset:]
        return torch.frombuffer(window, dtype=like.dtype, count=like.numel()).view(like.shape)
