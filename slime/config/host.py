"""What this host has, found without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def num_gpus(environ: dict[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """GPUs of this host that the process may use.

    ``SLIME_NUM_GPUS`` overrides; else the NVIDIA device nodes, narrowed by ``CUDA_VISIBLE_DEVICES``.

    Example:
        >>> num_gpus({"SLIME_NUM_GPUS": "4"})
        4
    """
    env = os.environ if environ is None else environ
    if env.get("SLIME_NUM_GPUS", "").isdigit():
        return int(env["SLIME_NUM_GPUS"])
    there = sum(1 for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or there == 0:
        return there
    names = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(there, len(names))


def num_cpus() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
