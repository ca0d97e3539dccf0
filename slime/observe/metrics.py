"""Metrics that know how they reduce, so that sums over micro-batches, ranks and samples come out right.

A plain ``dict[str, float]`` cannot be merged: the mean of two means is wrong when the parts have different sizes.
Here each entry carries what it needs, merging is associative and commutative, and only the end turns it into floats.

Example (two micro-batches of 10 and 30 tokens):
    >>> first = {"train/loss": mean(2.0, weight=10), "train/max_log_prob_diff": maximum(0.5)}
    >>> second = {"train/loss": mean(4.0, weight=30), "train/max_log_prob_diff": maximum(0.2)}
    >>> reduce(merge(first, second))
    {'train/loss': 3.5, 'train/max_log_prob_diff': 0.5}
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric on its way to a number. Build it with `mean`, `total`, `maximum`, `minimum` or `last`.

    Attributes:
        reduction: how two of them become one.
        value: weighted sum for "mean", else the value so far.
        weight: total weight for "mean", sequence number for "last", else unused.
    """

    reduction: Reduction
    value: float
    weight: float = 1.0

    def merge(self, other: Metric) -> Metric:
        """Both as one. Asserts that they reduce alike: one name means one thing."""
        assert self.reduction == other.reduction, f"cannot merge a {self.reduction} metric with a {other.reduction} one"
        match self.reduction:
            case "mean":
                return Metric("mean", self.value + other.value, self.weight + other.weight)
            case "sum":
                return Metric("sum", self.value + other.value)
            case "max":
                return Metric("max", max(self.value, other.value))
            case "min":
                return Metric("min", min(self.value, other.value))
            case "last":
                return other if other.weight >= self.weight else self

    @property
    def result(self) -> float:
        """The number. The mean of nothing (weight 0) is 0."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.weight if self.weight else 0.0


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` things (tokens, samples) whose mean is `value`."""
    return Metric("mean", value * weight, weight)


def total(value: float) -> Metric:
    """A sum: counts, tokens, seconds."""
    return Metric("sum", value)


def maximum(value: float) -> Metric:
    return Metric("max", value)


def minimum(value: float) -> Metric:
    return Metric("min", value)


def last(value: float, at: float = 0.0) -> Metric:
    """The value with the largest `at` (a step number, say) wins: learning rate, weight version."""
    return Metric("last", value, at)


def merge(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """Merge metrics of micro-batches or ranks; a name may be missing in some of them."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def reduce(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers, ready for the sinks."""
    return {name: metric.result for name, metric in metrics.items()}


class MetricAccumulator:
    """Collects metrics while a step runs.

    Example:
        >>> metrics = MetricAccumulator()
        >>> metrics.add("rollout/truncated_ratio", mean(1.0))
        >>> metrics.add("rollout/truncated_ratio", mean(0.0))
        >>> metrics.pop()
        {'rollout/truncated_ratio': 0.5}
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, metric: Metric) -> None:
        self._metrics[name] = self._metrics[name].merge(metric) if name in self._metrics else metric

    def update(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = merge(self._metrics, metrics)

    def pop(self) -> dict[str, float]:
        """The numbers so far; starts anew."""
        result, self._metrics = reduce(self._metrics), {}
        return result


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """``{name}/mean``, ``/median``, ``/max`` and ``/min`` of some numbers; nothing for no numbers.

    Example:
        >>> distribution("rollout/len", [1, 2, 6])
        {'rollout/len/mean': 3.0, 'rollout/len/median': 2, 'rollout/len/max': 6, 'rollout/len/min': 1}
    """
    numbers = list(values)
    if not numbers:
        return {}
    return {
        f"{name}/mean": statistics.fmean(numbers),
        f"{name}/median": statistics.median(numbers),
        f"{name}/max": max(numbers),
        f"{name}/min": min(numbers),
    }
