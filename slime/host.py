"""What this host has, found without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slime.errors import UserError

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def num_gpus(environ: dict[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """GPUs of this host that the process may use.

    ``SLIME_NUM_GPUS`` overrides; else the NVIDIA device nodes, narrowed by ``CUDA_VISIBLE_DEVICES``.

    Example:
        >>> num_gpus({"SLIME_NUM_GPUS": "4"})
        4

    Raises:
        UserError: SLIME_NUM_GPUS is no number.
    """
    env = os.environ if environ is None else environ
    told = env.get("SLIME_NUM_GPUS", "")
    if told.isdigit():
        return int(told)
    if told:
        raise UserError(f"SLIME_NUM_GPUS is {told!r}", fix="set it to the number of GPUs of a host, or unset it")
    there = sum(1 for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or there == 0:
        return there
    names = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(there, len(names))


def num_cpus() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory() -> float:
    """Bytes of this host, or what its container may have."""
    limits = [_number(limit) for limit, _ in _CGROUPS]
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def free_host_memory() -> float:
    """Bytes that new processes can have."""
    free = [_meminfo("MemAvailable")]
    for limit, used in _CGROUPS:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            free.append(max(0.0, most - now))
    return min(free)


def _meminfo(key: str) -> float:
    if not _MEMINFO.exists():
        return float("inf")
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    return float("inf")


def _number(path: Path) -> float | None:
    """None for no such file, and for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdigit() and int(text) < 1 << 60 else None
