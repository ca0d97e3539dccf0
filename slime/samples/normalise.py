"""From raw rewards to the scalar advantage of each sample, group by group."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Estimators whose rewards lose the mean of their group, and those that are divided by its deviation as well.
CENTRED = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
SCALED = frozenset({"grpo", "gspo", "cispo"})

#: Added to the standard deviation, so that a group of equal rewards gets advantages of zero.
EPSILON = 1e-6


def normalise_rewards(
    rewards: Sequence[float],
    groups: Sequence[int],
    executions: Sequence[int],
    *,
    centre: bool = True,
    scale: bool = True,
) -> list[float]:
    """(r − mean of its group) / (standard deviation of its group + 1e-6), as in GRPO (arXiv:2402.03300, eq. 4.1.2).

    Statistics go by group id, whatever the sizes of the groups, and count each execution once: samples that one
    execution fanned out into enter with their mean. The deviation is the unbiased one (n − 1); a group of a
    single execution is only centred. Sums are exact (`math.fsum`), so the order of the samples does not matter.

    Args:
        rewards: one per sample.
        groups, executions: ids, one per sample; an execution belongs to one group.
        centre: subtract the mean (False: rewards are returned as they are).
        scale: divide by the deviation.

    Example (group 0 has two executions, one of which fanned out; group 1 has two):
        >>> normalise_rewards([1, 1, 0, 5, 5], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3], scale=False)
        [0.5, 0.5, -0.5, 0.0, 0.0]
    """
    if not centre:
        return [float(reward) for reward in rewards]
    by_execution: dict[tuple[int, int], list[float]] = {}
    for reward, group, execution in zip(rewards, groups, executions):
        by_execution.setdefault((group, execution), []).append(float(reward))
    by_group: dict[int, list[float]] = {}
    for (group, _), values in by_execution.items():
        by_group.setdefault(group, []).append(_mean(values))
    mean = {group: _mean(values) for group, values in by_group.items()}
    divisor = {group: _deviation(values, mean[group]) + EPSILON for group, values in by_group.items()}
    if not scale:
        return [float(reward) - mean[group] for reward, group in zip(rewards, groups)]
    return [
        (float(reward) - mean[group]) / (divisor[group] if len(by_group[group]) > 1 else 1.0)
        for reward, group in zip(rewards, groups)
    ]


def _mean(values: list[float]) -> float:
    """Exactly the common value when all are equal, so that such groups get advantages of exactly zero."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: list[float], mean: float) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
