"""Metrics as log functions of plugins compute and log them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.log import get_logger
from slime.rollout.finish import logged_metrics
from slime.rollout.metrics import distribution, pass_at_k_metrics, powers_of_two

logger = get_logger(__name__)


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Add metrics to those of the rollout or evaluation that calls this; they are logged with its
    step.

    Values that are not numbers are left out, and everything is where no rollout runs (in trainers,
    say). Both give a warning.

    Args:
        step_key: the one that holds the caller's own step, which is not needed.
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
        logger.warning("metrics that are no numbers are left out: %s", ", ".join(others))
    logged.update(numbers)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """The step that a rollout is logged with: its id, for all metrics share one axis."""
    return rollout_id


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """``mean``, ``median``, ``max`` and ``min``.

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
    """``pass@k`` for powers of two up to the group's size; nothing for groups of one.

    Args:
        flat_rewards: group by group, unless ``group_ids`` says which group each is of.

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
