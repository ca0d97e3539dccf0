"""Measure the rates of this host's GPU: matrix products, copies in memory, from the host and from
another GPU, and launches of small operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from slime.errors import UserError
from slime.forecast.rates import DEFAULTS, Rates, default_rates
from slime.memory.hardware import FLASH4_WIDEST

#: Fractions of plain copy rates that a run reaches, from an H200: 3.28 of about 4.1 TB/s in memory,
#: 45 of 55 GB/s from the host, and 290 of about 390 GB/s between GPUs. The copy rates in memory and
#: between GPUs are published figures.
_MEMORY_SHARE = 0.8
_HOST_SHARE = 0.82
_LINK_SHARE = 0.74
#: Number of small operations, forward and backward, whose launches take as long as those of a
#: layer. Assumed.
_OPERATIONS = 200


def calibrate(seconds: float) -> Rates:
    """Measure this host's GPU; the rate of the network is a default.

    Args:
        seconds: duration of each measurement.
    Raises:
        UserError: this host has no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "there is no GPU to calibrate",
            fix=f"calibrate on a GPU's host, or pass --device with one of {', '.join(DEFAULTS)}",
        )
    name = torch.cuda.get_device_name(0)
    try:
        base = default_rates(name)
    except UserError:
        base = next(iter(DEFAULTS.values()))
    link = base.link
    if torch.cuda.device_count() > 1:
        link = _LINK_SHARE * copy_rate(1 << 30, "cuda:1", "cuda:0", seconds)
    return replace(
        base,
        gpu=name,
        products=product_rate(8192, "cuda", seconds),
        memory=_MEMORY_SHARE * 2 * copy_rate(4 << 30, "cuda:0", "cuda:0", seconds),
        host_link=_HOST_SHARE * copy_rate(1 << 30, "cpu", "cuda:0", seconds),
        link=link,
        launch=_OPERATIONS * operation_seconds("cuda", seconds),
        gpu_gb=torch.cuda.get_device_properties(0).total_memory / 1e9,
        gpus_per_host=torch.cuda.device_count(),
        flash4=FLASH4_WIDEST.get(torch.cuda.get_device_capability(0)[0], 0),
        source=f"measured by `slime plan --calibrate`; the network as for {base.gpu}",
    )


def product_rate(size: int, device: str, seconds: float) -> float:
    """Measure the FLOP/s of a product of two square bfloat16 matrices."""
    import torch

    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2.0 * size**3 / _shortest(lambda: left @ left, device, seconds)


def copy_rate(nbytes: int, source: str, target: str, seconds: float) -> float:
    """Measure the bytes per second of a copy, from pinned host memory if there is a GPU."""
    import torch

    pinned = source == "cpu" and torch.cuda.is_available()
    read = torch.empty(nbytes, dtype=torch.uint8, device=source, pin_memory=pinned)
    written = torch.empty(nbytes, dtype=torch.uint8, device=target)
    return nbytes / _shortest(lambda: written.copy_(read, non_blocking=True), target, seconds)


def operation_seconds(device: str, seconds: float, count: int = 200) -> float:
    """Measure the seconds that the host takes for a small operation and its gradient."""
    import torch

    start = torch.ones(16, device=device, requires_grad=True)

    def many() -> None:
        value = start
        for _ in range(count):
            value = value * 1.0
        value.sum().backward()

    return _shortest(many, device, seconds) / count


def _shortest(work: Callable[[], object], device: str, seconds: float) -> float:
    """Return the shortest time of repeated calls, after one warm-up call."""
    import torch

    def synchronize() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    work()
    synchronize()
    end = time.perf_counter() + seconds
    best = float("inf")
    while time.perf_counter() < end or best == float("inf"):
        begun = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - begun)
    return best
