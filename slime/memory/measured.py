"""Compare measured memory with the plan, once, and again whenever it grows.

    perf/forward_backward_peak_memory_gb  ◄─►  phase train: the trainer without its CUDA context
    perf/ref_log_probs_peak_memory_gb     ◄─►  phase log-probs
    perf/trainer_asleep_gb                ◄─►  what a sleeping trainer may keep in tensors

Adam allocates its moments in the first update, after the measured passes, unless a checkpoint had
them. Measured peaks may therefore lack the moments until the second update, and the first one is
reported only if it exceeds the plan.
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
_TRAINER = ("trainer", "critic")
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
        self.planned = {metric: _trainer_bytes(plan, phase) for metric, phase in _PHASES.items()}
        self.planned[_ASLEEP] = ASLEEP_TENSORS
        self._reported: dict[str, float] = {}
        # metrics not yet seen, whose first value may lack the moments
        self._without_moments = set(_PHASES) if _has_moments(plan) else set[str]()

    def compare(self, metrics: Mapping[str, float]) -> list[str]:
        """Return warnings for metrics more than 5 % above the plan, and again after each further
        growth of 5 %. Metrics within the plan are logged once, at level INFO, when the moments
        exist."""
        warnings = []
        for metric, planned in self.planned.items():
            if metric not in metrics or not planned:
                continue
            measured = metrics[metric] * 1e9
            before = self._reported.get(metric)
            if metric in self._without_moments:
                self._without_moments.remove(metric)
                if measured <= planned * _TOLERANCE:
                    continue
            if before is not None and measured <= before * _TOLERANCE:
                continue
            self._reported[metric] = measured
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


def _trainer_bytes(plan: MemoryPlan, name: str) -> float:
    """Return the bytes of the trainer's tensors in a phase, on the pipeline stage that holds
    most."""
    stages = [
        sum(use.nbytes for use in phase.uses if use.owner in _TRAINER and use.what != CONTEXT)
        for phase in plan.phases
        if phase.name == name
    ]
    return max(stages, default=0.0)


def _name(metric: str) -> str:
    return _PHASES.get(metric, "the sleeping trainer")
