"""Statistical tests that tell a change in a series of metrics from noise.

Every alarm about a curve uses one of them. Thresholds are strict because alarms are checked after
every step of a run: on stationary series of 1,000 steps, independent or autocorrelated, Gaussian,
binary or heavy-tailed, fewer than one run in a hundred raises an alarm
(``tests/unit/test_alarms_noise.py`` measures it).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

#: A difference of two means by this many standard errors is not noise. Normal noise reaches 6 once
#: in 10⁹ comparisons; the margin covers the choice of the best among many windows, and variances
#: that are estimated from few steps.
STRICT = 6.0
#: The same for a change that speaks against an alarm.
LIKELY = 3.0
#: Standard deviation of normal noise divided by its median absolute deviation.
_NORMAL = 1.4826
_MAX_CORRELATION = 0.9


def change(windows: Sequence[Sequence[float]], before: int, after: int) -> float:
    """Return by how many standard errors the mean of window ``after`` exceeds that of ``before``.

    The variance is taken around a straight line through each window, and averaged over all windows.
    Neighbouring steps are correlated and so count as fewer independent ones: the variance of a mean
    grows by (1 + r) / (1 - r), where r is the correlation of a step with the next one (Box,
    Jenkins, Reinsel, Time Series Analysis, 2.1).

    Args:
        windows: consecutive parts of a series, of at least three values each.
        before, after: indices of the two windows to compare.

    Example:
        >>> change([[0.2, 0.3, 0.2, 0.3], [0.2, 0.3, 0.3, 0.2]], 0, 1)
        0.0
    """
    difference = statistics.fmean(windows[after]) - statistics.fmean(windows[before])
    residuals = [_residuals(window) for window in windows]
    variance = statistics.fmean(
        sum(one * one for one in part) / (len(part) - 2) for part in residuals
    )
    correlation = _correlation(residuals)
    inflation = (1 + correlation) / (1 - correlation)
    error = math.sqrt(inflation * variance * (1 / len(windows[before]) + 1 / len(windows[after])))
    if error == 0:
        return 0.0 if difference == 0 else math.copysign(math.inf, difference)
    return difference / error


def _residuals(window: Sequence[float]) -> list[float]:
    """Return the residuals of a least-squares straight line through the values."""
    middle = (len(window) - 1) / 2
    mean = statistics.fmean(window)
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(window))
    slope /= sum((i - middle) ** 2 for i in range(len(window)))
    return [value - mean - slope * (i - middle) for i, value in enumerate(window)]


def _correlation(residuals: Sequence[Sequence[float]]) -> float:
    """Return the lag-1 autocorrelation, corrected for the bias of short series."""
    products = sum(a * b for part in residuals for a, b in itertools.pairwise(part))
    squares = sum(value * value for part in residuals for value in part)
    if squares == 0:
        return 0.0
    found = products / squares
    found += (1 + 4 * max(0.0, found)) / statistics.fmean(map(len, residuals))
    return min(max(found, 0.0), _MAX_CORRELATION)


def outlier(value: float, others: Sequence[float]) -> float:
    """Return the robust z-score of a positive value: the distance of its logarithm from the median
    of the others', in median absolute deviations scaled as for normal noise (Iglewicz, Hoaglin,
    How to Detect and Handle Outliers)."""
    logs = [math.log(other) for other in others if other > 0]
    if not logs or value <= 0:
        return 0.0
    median = statistics.median(logs)
    spread = max(_NORMAL * statistics.median(abs(log - median) for log in logs), 0.1)
    return (math.log(value) - median) / spread


def surely_above(values: Sequence[float], threshold: float) -> bool:
    """Tell whether the mean of ``values`` is above ``threshold`` by `LIKELY` standard errors."""
    if len(values) < 2:
        return False
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - LIKELY * error > threshold


def chance_of_at_least(hits: float, tries: float, probability: float) -> float:
    """Return the binomial probability of at least ``hits`` hits in ``tries`` independent tries."""
    count = math.ceil(hits)
    total = math.ceil(tries)
    if count <= 0:
        return 1.0
    terms = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(probability)
        + (total - k) * math.log1p(-probability)
        for k in range(count, total + 1)
    )
    return math.fsum(math.exp(term) for term in terms)
