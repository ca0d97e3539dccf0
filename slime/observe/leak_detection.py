"""Detect memory that grows without end.

The memory of a process grows at first while caches fill, jumps when something is done for the first
time, fluctuates, and starts over when the process is restarted; none of this is a leak.

    windows of 5, 10, 20, … values     ▁▂▃▄▅▆▇█   the minimum of each of the last 6 rises: a leak
                                       ▁▄▆▇████   caches fill up: the last windows hardly rise
                                       ▁▁▁████    a jump: the others do not rise
                                       ▁▅▂▆▁▅▂▆   the minima stay

Windows begin at fixed places of the series, so that a verdict changes once per window and not at
every step. After a pause, six new windows must rise before it counts as growth again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

_SMALLEST = 5
_WINDOWS = 6
#: First windows of a process, in which its caches fill; they are not compared.
_WARM_UP = 2
#: A value below this share of the one before means that the process was restarted.
_RESTARTED = 0.7
#: Each value must rise by at least this share of the mean rise.
_STEADY = 1 / 3
#: Fast growth may use up the memory before there are enough windows: number of first values to
#: skip, and of newest values to compare.
_SKIPPED = 5
_NEWEST = 10


class Growth(NamedTuple):
    """Growth from one value to another within a number of steps."""

    before: float
    now: float
    steps: int

    @property
    def per_step(self) -> float:
        return (self.now - self.before) / self.steps


def steady_growth(values: Sequence[float], at_least: float, share: float) -> Growth | None:
    """Return the growth seen in the shortest windows that show any.

    Args:
        values: memory at each step.
        at_least: smaller growth does not count; in the unit of the values.
        share: the same bound, as a share of the first value that is compared.
    """
    values = _since_restart(values)
    size = _SMALLEST
    while len(values) // size >= _WARM_UP + _WINDOWS:
        count = len(values) // size
        least = [min(values[i * size : (i + 1) * size]) for i in range(count - _WINDOWS, count)]
        if _is_growth(least, at_least, share):
            return Growth(least[0], least[-1], (_WINDOWS - 1) * size)
        size *= 2
    return None


def sudden_growth(values: Sequence[float], at_least: float, share: float) -> Growth | None:
    """Return the growth of the newest values if each step rises. That is enough for an alarm only
    if it would soon use up the memory that is left."""
    values = _since_restart(values)[_SKIPPED:]
    newest = values[-_NEWEST:]
    if len(newest) < _NEWEST or not _is_growth(newest, at_least, share):
        return None
    return Growth(newest[0], newest[-1], _NEWEST - 1)


def _is_growth(values: Sequence[float], at_least: float, share: float) -> bool:
    total = values[-1] - values[0]
    if total < max(at_least, share * values[0]):
        return False
    least_rise = _STEADY * total / (len(values) - 1)
    return all(after - before >= least_rise for before, after in itertools.pairwise(values))


def _since_restart(values: Sequence[float]) -> Sequence[float]:
    for i in range(len(values) - 1, 0, -1):
        if values[i] < _RESTARTED * values[i - 1]:
            return values[i:]
    return values
