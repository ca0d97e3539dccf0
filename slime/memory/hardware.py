"""Find out how much memory a rank has, without torch."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass

from slime import deadlines
from slime.config.config import Config
from slime.errors import UserError
from slime.processes.host import free_host_memory, host_memory, num_gpus

#: Maximum head dimension with which flash-attn-4 is used, by major compute capability (data-centre
#: Hopper and Blackwell).
FLASH4_WIDEST = {9: 256, 10: 128}
#: The same for a GPU that flash-attn-4 supports and of which nothing else is known.
FLASH4_WIDEST_ANYWHERE = min(FLASH4_WIDEST.values())
#: Minimum head dimension with which the backward pass of flash-attn-4 compiles.
FLASH4_NARROWEST = 32

_ASSUMED_GB = 80.0
_LARGEST_GB = 10_000.0
#: `DeviceMemory.source` of sizes from this host's driver.
DRIVER = "nvidia-smi"

_QUERY = (
    "nvidia-smi",
    "--query-gpu=memory.total,compute_cap,name",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device of a trainer or engine rank.

    Attributes:
        nbytes: bytes of the GPU, or of the host without GPUs.
        source: where the size comes from, for messages.
        flash4: maximum head dimension with which flash-attn-4 is used on the GPUs of this host, as
            far as known; 0: it does not support them.
        host: bytes of memory of the smallest host with such a GPU; infinite if unknown.
    """

    nbytes: float
    source: str
    on_gpu: bool
    flash4: int = FLASH4_WIDEST_ANYWHERE
    host: float = math.inf


def is_on_gpu(config: Config) -> bool:
    """Tell whether trainer and engines have GPUs: this host has some, or --gpu-memory-gb is
    given."""
    return num_gpus() > 0 or config.cluster.gpu_memory_gb is not None


def device_memory(
    config: Config, seen: float | None = None, *, on_gpu: bool = False, host: float = math.inf
) -> DeviceMemory:
    """Return the memory of one GPU (the smallest), or of this host if there is none.

    Args:
        seen: bytes of GPU memory that a cluster's nodes report; None: ask this host's driver.
        on_gpu: the cluster has GPUs, even if this host has none.
        host: bytes of host memory of the smallest node of a cluster.
    Raises:
        UserError: --gpu-memory-gb is out of range.
    """
    if not on_gpu and not is_on_gpu(config):
        return DeviceMemory(free_host_memory(), "free on this host", on_gpu=False)
    given = config.cluster.gpu_memory_gb
    if given is not None and not 0 < given < _LARGEST_GB:
        raise UserError(
            f"--gpu-memory-gb is {given:g}",
            fix="pass the memory of one GPU in 10⁹ bytes: 80, 141, …",
        )
    found = _driver_gpus()
    widest = FLASH4_WIDEST_ANYWHERE
    flash4 = min(
        (widest if major is None else FLASH4_WIDEST.get(major, 0) for _, major in found),
        default=widest,
    )
    if given is not None:
        return DeviceMemory(given * 1e9, "--gpu-memory-gb", on_gpu=True, flash4=flash4, host=host)
    if seen is not None:
        return DeviceMemory(seen, "as its nodes report", on_gpu=True, flash4=flash4, host=host)
    if found:
        smallest = min(size for size, _ in found)
        return DeviceMemory(smallest, DRIVER, on_gpu=True, flash4=flash4, host=host_memory())
    return DeviceMemory(_ASSUMED_GB * 1e9, "assumed; set it with --gpu-memory-gb", on_gpu=True)


def seen_gpu_memory() -> float | None:
    """Return the bytes of the smallest GPU of this host, as its driver reports; None without a
    driver."""
    return min((size for size, _ in _driver_gpus()), default=None)


def gpu_majors() -> set[int]:
    """Return the major compute capabilities of this host's GPUs, as far as its driver reports
    them."""
    return {major for _, major in _driver_gpus() if major is not None}


def gpu_name() -> str | None:
    """Return the name of this host's first GPU, as its driver reports; None if unknown."""
    return next((row[2] for row in _driver_rows() if len(row) > 2 and row[2]), None)


def _driver_gpus() -> list[tuple[float, int | None]]:
    """Return (bytes, major compute capability or None if unknown) of each GPU of this host."""
    rows = _driver_rows()
    majors = [row[1].split(".")[0] if len(row) > 1 else "" for row in rows]
    return [
        (int(row[0]) * float(1 << 20), int(major) if major.isdigit() else None)
        for row, major in zip(rows, majors, strict=True)
        if row[0].isdigit()
    ]


def _driver_rows() -> list[list[str]]:
    """Query the driver for each GPU's MiB, compute capability and name; [] if that fails."""
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=deadlines.HARDWARE_QUERY, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return rows if done.returncode == 0 else []
