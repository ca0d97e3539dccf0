"""Detect memory leaks.

The memory of a process also grows while caches fill, jumps when code runs for the first time,
fluctuates, and starts over when the process is restarted. None of this is a leak.

    windows of 5, 10, 20, … values     ▁▂▃▄▅▆▇█   the minimum of each of the last 6 rises: a leak
                                       ▁▄▆▇████   caches fill up: the last windows hardly rise
                                       ▁▁▁████    a jump: the other windows do not rise
                                       ▁▅▂▆▁▅▂▆   fluctuation: the minima do not rise

Windows begin at fixed positions of the series, so that the verdict changes once per window and not
at every step. After a window without a rise, six windows must rise again to count as growth.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

_SMALLEST = 5
_WINDOWS = 6
#: The first windows of a process are not compared, because caches fill.
_WARM_UP = 2
#: A value below this share of the previous one means that the process was restarted.
_RESTARTED = 0.7
#: Each value must rise by at least this share of the mean rise.
_STEADY = 1 / 3
#: For growth that may use up the memory before there are enough windows: number of first values to
#: skip, and number of newest values to compare.
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
    """Return the growth in the shortest windows that show growth; None if no windows do.

    Args:
        values: memory at each step.
        at_least: minimum growth, in the unit of the values.
        share: minimum growth as a share of the first compared value.
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
    """Return the growth of the newest values if each of them rises, else None. Callers should raise
    an alarm only if this growth would soon use up the free memory."""
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
