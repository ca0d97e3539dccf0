"""Normalisation of raw rewards, group by group, to one number per sample. No tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Baseline = Callable[[Sequence[float]], list[float]]
"""The rewards of a group's trajectories → what is subtracted from each of them."""

#: Added to the standard deviation, so that a group of equal rewards gets advantages of zero.
EPSILON = 1e-6


def group_mean(rewards: Sequence[float]) -> list[float]:
    """The mean of the group, for each of its trajectories; exactly the common value when all
    rewards are equal, so that such groups get advantages of exactly zero.

    Source: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2.

    Example:
        >>> group_mean([1.0, 0.0, 0.5])
        [0.5, 0.5, 0.5]
    """
    return [_mean(rewards)] * len(rewards)


def normalise_rewards(
    rewards: Sequence[float],
    groups: Sequence[int],
    trajectories: Sequence[int],
    *,
    baseline: Baseline | None = group_mean,
    scale: bool = True,
) -> list[float]:
    """(r − baseline) / (standard deviation of its group + 1e-6), as in GRPO (arXiv:2402.03300,
    section 4.1.2).

    Statistics go by group id, whatever the sizes of the groups, and count each trajectory once:
    samples that one trajectory fanned out into enter with their mean. The deviation is the unbiased
    one (n − 1); a group of a single trajectory, and one whose trajectories are all equal in the
    mean (two players whose rewards add up to 0), is only centred. Sums are exact (`math.fsum`), so
    the order of the samples does not matter.

    Args:
        rewards: one per sample.
        groups, trajectories: ids, one per sample; a trajectory belongs to one group.
        baseline: what is subtracted; None returns the rewards as they are, not scaled either.
        scale: divide by the deviation.
    Returns:
        One number per sample, in their order.

    Example (group 0 has two trajectories, one of which fanned out; group 1 has two):
        >>> normalise_rewards([1, 1, 0, 5, 5], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3], scale=False)
        [0.5, 0.5, -0.5, 0.0, 0.0]
    """
    if baseline is None:
        return [float(reward) for reward in rewards]
    by_group: dict[int, dict[int, list[float]]] = {}
    for reward, group, trajectory in zip(rewards, groups, trajectories):
        by_group.setdefault(group, {}).setdefault(trajectory, []).append(float(reward))
    subtracted: dict[tuple[int, int], float] = {}
    divisor: dict[int, float] = {}
    for group, members in by_group.items():
        means = [_mean(values) for values in members.values()]
        subtracted |= {
            (group, trajectory): b for trajectory, b in zip(members, baseline(means), strict=True)
        }
        deviation = _deviation(means) if scale and len(means) > 1 else 0.0
        divisor[group] = deviation + EPSILON if deviation else 1.0
    return [
        (float(reward) - subtracted[group, trajectory]) / divisor[group]
        for reward, group, trajectory in zip(rewards, groups, trajectories)
    ]


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
