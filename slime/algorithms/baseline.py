"""Normalisation of raw rewards, group by group, to one number per sample. No tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from slime.errors import UserError

Baseline = Callable[[Sequence[float]], list[float]]
"""The rewards of a group's trajectories → the baseline of each."""

Divisor = Callable[[Sequence[float]], float]
"""The rewards of a group's trajectories → the divisor of centred rewards; 0: no division."""

#: Added to a non-zero divisor.
EPSILON = 1e-6


def group_mean(rewards: Sequence[float]) -> list[float]:
    """Return the mean of the group for each of its trajectories. If all rewards are equal, it is
    exactly that value, so all advantages are exactly 0.

    Source: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2.

    Example:
        >>> group_mean([1.0, 0.0, 0.5])
        [0.5, 0.5, 0.5]
    """
    return [_mean(rewards)] * len(rewards)


def leave_one_out_mean(rewards: Sequence[float]) -> list[float]:
    """Return, for each trajectory, the mean of the others of its group. A single trajectory gets
    its own reward, so its advantage is 0.

    Source: Ahmadian et al., "Back to Basics" (arXiv:2402.14740), section 3.2 (RLOO).

    Example:
        >>> leave_one_out_mean([1.0, 0.0, 0.5])
        [0.25, 0.75, 0.5]
    """
    others = len(rewards) - 1
    if others == 0 or min(rewards) == max(rewards):
        return list(rewards)
    total = math.fsum(rewards)
    return [(total - reward) / others for reward in rewards]


def group_deviation(rewards: Sequence[float]) -> float:
    """Return the unbiased standard deviation of the group (n − 1); 0 for a single trajectory.

    Source: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2.

    Example:
        >>> group_deviation([1.0, 0.0, 0.5])
        0.5
    """
    if len(rewards) == 1:
        return 0.0
    mean = _mean(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def mean_reward(rewards: Sequence[float]) -> float:
    """Return the mean of the group. Dividing by this success rate gives more weight to groups that
    seldom succeed: the gradient is that of the log-likelihood of success, to the order of the group
    size.

    Source: "Maximum Likelihood Reinforcement Learning" (arXiv:2602.02710).

    Raises:
        UserError: a reward is below 0.

    Example:
        >>> mean_reward([1.0, 0.0, 0.0, 0.0])
        0.25
    """
    if min(rewards) < 0:
        raise UserError(
            f"--advantage-estimator maxrl met a reward of {min(rewards):g}",
            why="it divides by the mean reward of a group, which has to be a success rate",
            fix="return rewards of 0 and more (0 and 1 for wrong and right), or choose "
            "--advantage-estimator grpo",
        )
    return _mean(rewards)


def normalise_rewards(
    rewards: Sequence[float],
    groups: Sequence[int],
    trajectories: Sequence[int],
    *,
    baseline: Baseline | None = group_mean,
    divisor: Divisor | None = group_deviation,
) -> list[float]:
    """Return (r − baseline) / (divisor of its group + 1e-6) of each sample.

    Statistics are per group id, of any group size, and count each trajectory once: if a trajectory
    was split into several samples, their mean counts. A group with divisor 0 is only centred. For
    the deviation, that is a group of one trajectory, or one whose trajectories have equal means
    (two players whose rewards sum to 0). Sums are exact (`math.fsum`), so the order of the samples
    does not matter.

    Args:
        rewards: one per sample.
        groups, trajectories: ids, one per sample; a trajectory belongs to one group.
        baseline: subtracted from rewards; None returns the rewards unchanged, without division.
        divisor: divides the difference; None: no division.
    Returns:
        One number per sample, in the same order.

    Example (two groups of two trajectories; the first trajectory has two samples):
        >>> normalise_rewards([1, 1, 0, 5, 5], [0, 0, 0, 1, 1], [0, 0, 1, 2, 3], divisor=None)
        [0.5, 0.5, -0.5, 0.0, 0.0]
    """
    if baseline is None:
        return [float(reward) for reward in rewards]
    by_group: dict[int, dict[int, list[float]]] = {}
    for reward, group, trajectory in zip(rewards, groups, trajectories):
        by_group.setdefault(group, {}).setdefault(trajectory, []).append(float(reward))
    subtracted: dict[tuple[int, int], float] = {}
    divisors: dict[int, float] = {}
    for group, members in by_group.items():
        means = [_mean(values) for values in members.values()]
        subtracted |= {
            (group, trajectory): b for trajectory, b in zip(members, baseline(means), strict=True)
        }
        spread = divisor(means) if divisor is not None else 0.0
        divisors[group] = spread + EPSILON if spread else 1.0
    return [
        (float(reward) - subtracted[group, trajectory]) / divisors[group]
        for reward, group, trajectory in zip(rewards, groups, trajectories)
    ]


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
