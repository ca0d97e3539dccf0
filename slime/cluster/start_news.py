"""What comes up slowly says so: an engine loads, compiles and captures graphs for minutes, and a silent wait looks like
a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ray

from slime.log import get_logger

logger = get_logger(__name__)

_FIRST_SECONDS = 45.0


class StartNews:
    """Names, at growing intervals, those that are still coming up, with the last line of their log.

    Args:
        coming_up: by actor name.
        logs: folder of ``<name>.log``; logs that are on another host are left out.
        clock: seconds.
    """

    def __init__(
        self,
        coming_up: Mapping[str, ray.ObjectRef],
        logs: Path,
        clock: Callable[[], float] = time.monotonic,
        done: Callable[[ray.ObjectRef], bool] = lambda ref: bool(ray.wait([ref], timeout=0)[0]),
    ) -> None:
        self._coming_up, self._logs, self._clock, self._done = coming_up, logs, clock, done
        self._started = clock()
        self._next = _FIRST_SECONDS

    def look(self) -> None:
        """To be called now and then; never waits."""
        waited = self._clock() - self._started
        if waited < self._next:
            return
        self._next = 2 * waited
        for name, ref in self._coming_up.items():
            if not self._done(ref):
                logger.info("%s is coming up for %.0f s%s", name, waited, self._last_words(name))

    def _last_words(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        if not path.exists():
            return ""
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - 4096))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; {path}: {lines[-1][:160]}" if lines else ""
