"""The accelerator of this process, under the reference system's names: CUDA if there is a GPU, else
the CPU.

On a CPU, waiting for the device returns at once, and device memory counts as 0 bytes.
"""

from __future__ import annotations

from typing import Any

import torch

Device = int | str | torch.device | None


def device_type() -> str:
    """Return the kind of device: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> int | str:
    """Return the number of this process's GPU, or "cpu"."""
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def device(index: Device = None) -> torch.device:
    """Return a device by its number or name; by default the current device."""
    if isinstance(index, (str, torch.device)):
        return torch.device(index)
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def device_name(index: Device = None) -> str:
    """Return the name of a device, such as "cuda:0"."""
    return str(device(index))


def device_count() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def set_device(index: Device) -> None:
    """Make a GPU the current device; does nothing on a CPU."""
    if torch.cuda.is_available() and index is not None:
        torch.cuda.set_device(index)


def synchronize(device_arg: Device = None) -> None:
    """Wait for all work of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize(device_arg)


def empty_cache() -> None:
    """Return unused cached blocks of GPU memory."""
    torch.cuda.empty_cache()


def mem_get_info(device_arg: Device = None) -> tuple[int, int]:
    """Return (free, total) bytes of the GPU's memory."""
    return torch.cuda.mem_get_info(device_arg) if torch.cuda.is_available() else (0, 0)


def memory_allocated(device_arg: Device = None) -> int:
    """Return the bytes of GPU memory in tensors."""
    return torch.cuda.memory_allocated(device_arg) if torch.cuda.is_available() else 0


def memory_reserved(device_arg: Device = None) -> int:
    """Return the bytes of GPU memory that torch's allocator has reserved."""
    return torch.cuda.memory_reserved(device_arg) if torch.cuda.is_available() else 0


def manual_seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


def autocast(*args: Any, **kwargs: Any) -> Any:
    """`torch.autocast` on this device."""
    return torch.autocast(device_type(), *args, **kwargs)


def process_group_backend(default: str = "nccl") -> str:
    """Return the backend of process groups: ``default`` on GPUs, gloo on a CPU."""
    return default if torch.cuda.is_available() else "gloo"
