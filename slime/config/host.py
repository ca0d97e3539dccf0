"""What this host has, found without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slime.errors import UserError


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
