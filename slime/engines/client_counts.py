"""What the rollout's client counts: requests, and how long there were any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class ClientCounters:
    """Sums over the client's life, apart from `take`, which gives the difference since its last
    call."""

    requests: int = 0
    retries: int = 0
    _taken: dict[str, int] = field(default_factory=dict)

    def take(self) -> dict[str, int]:
        now = {"requests": self.requests, "retries": self.retries}
        since = {name: value - self._taken.get(name, 0) for name, value in now.items()}
        self._taken = now
        return since


class BusyClock:
    """How much of the time some request was under way, over all clients that share it.

    Args:
        clock: seconds.

    Example:
        >>> seconds = iter([0, 2, 5, 10])
        >>> busy = BusyClock(clock=lambda: next(seconds))     # at 0 s
        >>> busy.began(); busy.ended()                        # from 2 s to 5 s
        >>> busy.take_idle_ratio()                            # at 10 s
        0.7
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._busy = 0.0
        self._taken = self._since = clock()

    def began(self) -> None:
        self._turn()
        self._count += 1

    def ended(self) -> None:
        self._turn()
        self._count -= 1

    def _turn(self) -> None:
        now = self._clock()
        self._busy += (now - self._since) * (self._count > 0)
        self._since = now

    def take_idle_ratio(self) -> float:
        """Share of the time since the last call, or the beginning, in which no request was under
        way."""
        self._turn()
        seconds = self._since - self._taken
        busy = self._busy
        self._taken = self._since
        self._busy = 0.0
        return max(0.0, 1.0 - busy / seconds) if seconds > 0 else 0.0
