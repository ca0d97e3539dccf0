"""Find engines that hang: alive, but without a healthy answer for too long. Part of
--use-fault-tolerance."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.kinds import engine_of


@dataclass(eq=False)
class HealthChecks:
    """Finds engines without a healthy answer for ``timeout`` seconds after a check began.

    Only engines that are awake may be checked, because SGLang generates a token to answer. So all
    checks must end before engines release their memory (`end`).

    Args:
        path: answers 200 while the engine is healthy.
        interval: seconds between two checks of an engine, also across rollouts.
        first_wait: seconds before the first check after each `begin`.
    """

    path: str
    _: KW_ONLY
    interval: float
    timeout: float
    first_wait: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._next = 0.0
        self._fleet: EngineFleet | None = None
        self._asked_at = 0.0
        self._open: dict[str, Future[Any]] = {}

    @staticmethod
    def of(config: Config, path: str = "") -> HealthChecks:
        """Make the checks of a run.

        Args:
            path: used instead of the engine's own health path.
        """
        flags = config.fault_tolerance
        return HealthChecks(
            path or engine_of(config).health_path,
            interval=flags.rollout_health_check_interval,
            timeout=flags.rollout_health_check_timeout,
            first_wait=flags.rollout_health_check_first_wait,
        )

    def begin(self) -> None:
        """Allow checks: the engines are awake."""
        self._open = {}
        self._next = max(self._next, self.clock() + self.first_wait)

    def silent(self, fleet: EngineFleet) -> list[str]:
        """Start checks that are due, read answers without waiting, and return URLs of hanging
        engines."""
        now = self.clock()
        # checks over closed connections get no answer
        if fleet is not self._fleet:
            self._fleet = fleet
            self._open = {}
        if not self._open:
            if now >= self._next:
                self._asked_at = now
                self._next = now + self.interval
                self._open = self._ask(fleet, list(fleet.urls))
            return []
        for url, answer in list(self._open.items()):
            if answer.done():
                del self._open[url]
                if answer.exception() is not None and now < self._asked_at + self.timeout:
                    self._open |= self._ask(fleet, [url])
                elif answer.exception() is not None:
                    self._open[url] = answer
        if now < self._asked_at + self.timeout:
            return []
        hanging = list(self._open)
        self._open = {}
        return hanging

    def end(self, fleet: EngineFleet) -> list[str]:
        """Finish the running checks, and start none until the next `begin`; return URLs of engines
        that hang.

        SGLang sleeps for a second before it answers. An engine that can empty its cache meanwhile,
        in milliseconds, is healthy and has no request left, so its answer is not awaited.
        """
        if fleet is not self._fleet:  # its checks ended with its connections
            self._open = {}
        wait(
            self._open.values(),
            timeout=max(0.0, self._asked_at + deadlines.HEALTH_ARRIVAL - self.clock()),
        )
        if any(not answer.done() for answer in self._open.values()):
            for url, outcome in fleet.post_to(
                "/flush_cache", {url: {} for url in self._open}, deadlines.HEALTH_FLUSH
            ).items():
                if not isinstance(outcome, EngineError):
                    self._open.pop(url).cancel()
        hanging: list[str] = []
        while self._open:
            wait(self._open.values(), timeout=deadlines.HEALTH_POLL)
            hanging += self.silent(fleet)
            if self._open:
                time.sleep(deadlines.HEALTH_RETRY)
        return hanging

    def _ask(self, fleet: EngineFleet, urls: list[str]) -> dict[str, Future[Any]]:
        return {url: fleet.start_get(url, self.path, self.timeout) for url in urls}
