"""Compare measured memory with the plan, once, and again whenever it grows.

    perf/forward_backward_peak_memory_gb  ◄─►  phase train: the trainer, less its CUDA context
    perf/ref_log_probs_peak_memory_gb     ◄─►  phase log-probs
    perf/trainer_asleep_gb                ◄─►  what a sleeping trainer may keep in tensors

Adam makes its moments in the first update, after the passes that were measured. Unless a checkpoint
brought them, they are in the peaks from the second update on, so the first update is only checked
for being above the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.log import get_logger
from slime.memory.plan import MemoryPlan, gb
from slime.memory.trainer import ASLEEP_TENSORS, CONTEXT

logger = get_logger(__name__)

#: Phase of an update, as the trainer names it → phase of the plan.
_TRAINER_PHASES = {
    "forward_backward": "train",
    "ref_log_probs": "log-probs",
    "critic_forward_backward": "critic",
}
#: Owners whose memory is in the trainer's processes.
_OF_TRAINER = ("trainer", "critic")
_PHASES = {f"perf/{name}_peak_memory_gb": phase for name, phase in _TRAINER_PHASES.items()}
_ASLEEP = "perf/trainer_asleep_gb"
_TOLERANCE = 1.05  # of the plan, and of what was measured before


class Measured:
    """Compares the metrics of each step with the plan of a run on GPUs.

    Example:
        >>> measured = Measured(plan)  # doctest: +SKIP
        >>> measured.compare({"perf/forward_backward_peak_memory_gb": 70.2})  # doctest: +SKIP
        ['memory of train: 70.2 GB measured, 66.0 GB planned']
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.planned = {metric: _trainer_part(plan, phase) for metric, phase in _PHASES.items()}
        self.planned[_ASLEEP] = ASLEEP_TENSORS
        self._most: dict[str, float] = {}
        self._without_moments = set(_PHASES) if _has_moments(plan) else set[str]()
        """Metrics that the first update, whose moments may not exist, has yet to bring."""

    def compare(self, metrics: Mapping[str, float]) -> list[str]:
        """Return lines to log as warnings: for what is 5 per cent above the plan, and again when it
        has grown by as much. What is within the plan is logged once, as information, when
        everything planned exists."""
        warnings = []
        for metric, planned in self.planned.items():
            if metric not in metrics or not planned:
                continue
            measured = metrics[metric] * 1e9
            before = self._most.get(metric)
            if metric in self._without_moments:
                self._without_moments.remove(metric)
                if measured <= planned * _TOLERANCE:
                    continue
            if before is not None and measured <= before * _TOLERANCE:
                continue
            self._most[metric] = measured
            line = (
                f"memory of {_name(metric)}: {gb(measured)} GB measured, {gb(planned)} GB planned"
            )
            if measured > planned * _TOLERANCE:
                warnings.append(
                    line + (f", {gb(before)} GB in the steps before" if before is not None else "")
                )
            elif before is None:
                logger.info("%s", line)
        return warnings


def _has_moments(plan: MemoryPlan) -> bool:
    """Tell whether the plan has moments that stay on the GPU."""
    trainer = plan.facts.trainer
    return trainer is not None and trainer.moments > 0 and trainer.moments_on_host < 1


def _trainer_part(plan: MemoryPlan, name: str) -> float:
    """Bytes of tensors, on the pipeline stage that has most."""
    phases = [phase for phase in plan.phases if phase.name == name]
    parts = [
        sum(u.nbytes for u in phase.uses if u.owner in _OF_TRAINER and u.what != CONTEXT)
        for phase in phases
    ]
    return max(parts, default=0.0)


def _name(metric: str) -> str:
    return _PHASES.get(metric, "the sleeping trainer")
