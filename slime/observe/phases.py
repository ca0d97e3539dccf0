"""Durations of the phases of a process. One clock gives the ``perf/{phase}_time`` metrics and the
events of the timeline.

Example:
    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout"):
    ...     generate()
    >>> timer.pop_metrics()
    {'perf/rollout_time': 2.1}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Epoch seconds at time 0 of the monotonic clock; read once, as the wall clock may go backwards.
_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Return seconds since 1970, monotonic within this process; the time base of phases and
    traces."""
    return _EPOCH + time.perf_counter()


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One finished phase: `start` in epoch seconds, `duration` in seconds, `depth` 0 for outermost
    phases."""

    name: str
    start: float
    duration: float
    depth: int


class PhaseTimer:
    """Times named phases, which may nest. Several entries of a phase in a step add up. Not
    thread-safe.

    Args:
        on_change: called with the name of the innermost open phase, or None, whenever it
            changes.
    """

    def __init__(self, on_change: Callable[[str | None], None] | None = None) -> None:
        self._on_change = on_change
        self._open: list[tuple[str, float]] = []
        self._events: list[PhaseEvent] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks may nest."""
        self._begin(name)
        try:
            yield
        finally:
            self._end()

    def _begin(self, name: str) -> None:
        self._open.append((name, now()))
        self._changed()

    def _end(self) -> None:
        name, start = self._open.pop()
        duration = now() - start
        self._events.append(PhaseEvent(name, start, duration, len(self._open)))
        self._seconds[name] = self._seconds.get(name, 0.0) + duration
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.open_phase)

    @property
    def open_phase(self) -> str | None:
        """Name of the innermost open phase; None if there is none."""
        return self._open[-1][0] if self._open else None

    def pop_metrics(self) -> dict[str, float]:
        """Return ``perf/{phase}_time`` in seconds for the phases that ended since the last call."""
        seconds = self._seconds
        self._seconds = {}
        return {f"perf/{name}_time": value for name, value in seconds.items()}

    def forget_all_but(self, name: str) -> None:
        """Drop the seconds of all other phases since the last `pop_metrics`, for example before
        their step is repeated."""
        self._seconds = {name: self._seconds[name]} if name in self._seconds else {}

    def pop_events(self) -> list[PhaseEvent]:
        """Return the phases that ended since the last call, in order of their end."""
        events = self._events
        self._events = []
        return events
