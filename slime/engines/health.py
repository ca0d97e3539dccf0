"""Find engines that hang: alive, but without a good answer for too long. Part of
--use-fault-tolerance."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.kinds import engine_of


class HealthChecks:
    """Finds engines that gave no good answer for ``timeout`` seconds after they were asked.

    Only engines that are awake may be asked, because SGLang generates a token to answer. So no
    question may be under way either when they release their memory (`end`).

    Args:
        path: that answers 200 while all is well.
        interval: seconds between two questions to an engine, from one rollout to the next too.
        first_wait: seconds before the first one, after each `begin`.
    """

    def __init__(
        self,
        path: str,
        *,
        interval: float,
        timeout: float,
        first_wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock = clock
        self.interval = interval
        self.timeout = timeout
        self.first_wait = first_wait
        self._next = 0.0
        self._fleet: EngineFleet | None = None
        self._asked_at = 0.0
        self._open: dict[str, Future[Any]] = {}

    @staticmethod
    def of(config: Config, path: str = "") -> HealthChecks:
        """Make the checks of a run.

        Args:
            path: asked instead of the engine's own health path.
        """
        flags = config.fault_tolerance
        return HealthChecks(
            path or engine_of(config).health_path,
            interval=flags.rollout_health_check_interval,
            timeout=flags.rollout_health_check_timeout,
            first_wait=flags.rollout_health_check_first_wait,
        )

    def begin(self) -> None:
        """Allow questions: the engines are awake."""
        self._open = {}
        self._next = max(self._next, self._clock() + self.first_wait)

    def silent(self, fleet: EngineFleet) -> list[str]:
        """Ask when it is due, read answers without waiting, and return URLs of hanging engines."""
        now = self._clock()
        # questions over connections that are closed will not be answered
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
        """Finish the questions under way, until the next `begin`; return URLs of engines that hang.

        SGLang's answer takes a whole second, in which it sleeps. An engine that empties its cache
        meanwhile, which takes milliseconds, is well and has no request left: its answer is not
        waited for.
        """
        if fleet is not self._fleet:  # its questions were dropped with its connections
            self._open = {}
        wait(
            self._open.values(),
            timeout=max(0.0, self._asked_at + deadlines.HEALTH_ARRIVAL - self._clock()),
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
        return {url: fleet.start_get(url, self._path, self.timeout) for url in urls}
