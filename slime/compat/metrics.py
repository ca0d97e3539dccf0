"""Functions that plugins' log functions use to compute and log metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.log import get_logger
from slime.rollout.finish import logged_metrics
from slime.rollout.metrics import distribution, pass_at_k_metrics, powers_of_two

logger = get_logger(__name__)


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Add metrics to those of the current rollout or evaluation; they are logged with its step.

    Values that are not numbers are dropped with a warning. So are all metrics if no rollout is
    running in this process, for example in trainers.

    Args:
        step_key: the key of the caller's own step, which is ignored.
    """
    numbers = {}
    others = []
    for name, value in metrics.items():
        if name == step_key:
            continue
        try:
            numbers[str(name)] = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError):
            others.append(str(name))
    logged = logged_metrics()
    if logged is None:
        logger.warning(
            "metrics that were logged outside of a rollout are lost: %s",
            ", ".join(map(str, metrics)),
        )
        return
    if others:
        logger.warning("metrics that are not numbers are left out: %s", ", ".join(others))
    logged.update(numbers)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return the step of a rollout's metrics: its id, because all metrics share one axis."""
    return rollout_id


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """Return ``mean``, ``median``, ``max`` and ``min``.

    >>> compute_statistics([1, 2, 6])
    {'mean': 3.0, 'median': 2, 'max': 6, 'min': 1}
    """
    return {name.removeprefix("/"): value for name, value in distribution("", values).items()}


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """
    >>> dict_add_prefix({"mean": 1}, "eval/")
    {'eval/mean': 1}
    """
    return {prefix + name: value for name, value in d.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float],
    group_size: int,
    num_groups: int | None = None,
    group_ids: Sequence[Any] | None = None,
) -> dict[str, float]:
    """Return ``pass@k`` for powers of two up to the group's size; {} for groups of one.

    Args:
        flat_rewards: group after group, unless ``group_ids`` gives the group of each reward.

    >>> compute_pass_rate([1, 0, 0, 0], 2)
    {'pass@1': 0.25, 'pass@2': 0.5}
    """
    if group_size == 1:
        return {}
    groups: defaultdict[Any, list[float]] = defaultdict(list)
    for number, reward in enumerate(flat_rewards):
        groups[number // group_size if group_ids is None else group_ids[number]].append(reward)
    assert group_ids is not None or len(flat_rewards) == (num_groups or len(groups)) * group_size, (
        "a group is short"
    )
    return pass_at_k_metrics(groups.values(), powers_of_two(group_size))
