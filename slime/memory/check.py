"""The memory plan at launch: shown in a few lines, and refused when it cannot fit."""

from __future__ import annotations

from slime.config import Config
from slime.log import get_logger
from slime.memory.hardware import DeviceMemory, device_memory
from slime.memory.plan import MemoryPlan
from slime.memory.remedies import refuse
from slime.memory.table import gb, summary

logger = get_logger(__name__)


def check_memory(config: Config, device: DeviceMemory | None = None) -> MemoryPlan:
    """Log the plan.

    Args:
        device: what the ranks run on, where the Ray cluster told; default: as the flags and this host say.
    Raises:
        UserError: on GPUs, the plan does not fit and ``--memory-plan`` is not ``warn``.
    """
    plan = MemoryPlan.of(config, device)
    for line in summary(plan):
        logger.info("%s", line)
    judge(config, plan)
    return plan


def check_memory_of_cluster(config: Config, gpu_memory: float | None, *, on_gpu: bool) -> None:
    """`check_memory` with what the nodes of a Ray cluster tell; nothing where they have no GPUs, as several hosts share
    the work then and this one's memory says nothing.

    Args:
        gpu_memory: bytes of the smallest GPU of the run; None: no driver told.
    """
    if not on_gpu:
        return
    device = device_memory(config, seen=gpu_memory, on_gpu=True)
    check_memory(config, device)


def judge(config: Config, plan: MemoryPlan) -> None:
    """Refuse a plan that does not fit, or warn; without GPUs, where the host can swap and much is a guess, only warn.

    Raises:
        UserError: as `check_memory`.
    """
    if plan.host > plan.host_limit:
        logger.warning(
            "the trainer ranks of a node want %s GB of host memory, this host has %s GB: leave out "
            "--offload-optimizer-states or --optimizer-cpu-offload, or use fewer GPUs per node",
            gb(plan.host), gb(plan.host_limit),
        )  # fmt: skip
    if plan.fits:
        return
    if not plan.device.on_gpu:
        logger.warning(
            "this run may need %s GB, of which %s GB are free on this host; the largest parts: %s",
            gb(plan.peak.total), gb(plan.device.nbytes),
            ", ".join(f"{use.owner} {use.what} {gb(use.nbytes)} GB" for use in plan.peak.largest[:3]),
        )  # fmt: skip
        return
    error = refuse(plan)
    if config.cluster.memory_plan == "refuse":
        raise error
    logger.warning("%s", error)
