"""The pace of a run between its beginning, when nothing is ready, and its end, when nothing is
started any more.

A run that generates ahead trains its first step behind everything that it began with, and its last
ones with engines that have ever less to do: both ends make it look faster or slower than it is in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def num_rollouts(steps: int, ahead: int) -> int:
    """How many a run needs so that in ``steps`` of them as many are under way as it may have:
    --num-rollout."""
    return steps + ahead


def between(rows: Rows, steps: int, ahead: int) -> tuple[Rows, float]:
    """The steps that tell the pace, and the seconds that they took.

    The first step is left out, in which kernels are compiled, or all whose rollouts began together,
    and whatever is behind ``steps``. Rollouts that began together go on ending together, in waves
    of ``ahead``: of the rest, as many whole ones as there are.

    Args:
        rows: of a run's metrics, one for each step; "time" is when the step was over.
        steps: those that are measured and those before them.
        ahead: rollouts under way besides the one that is trained.
    Raises:
        ValueError: there is no whole wave.
    """
    first = max(1, ahead)
    done = min(len(rows), steps)
    chosen = rows[first : done - done % first]
    if not chosen:
        raise ValueError(
            f"{done} steps, but the pace is that of {first} or more behind the first {first}"
        )
    return chosen, chosen[-1]["time"] - rows[first - 1]["time"]
