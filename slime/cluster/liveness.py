"""Whether servers that somebody else has started are still there, asked by HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from slime import deadlines
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet

#: Questions in a row that nobody took: one may meet a connection that was closed meanwhile.
_MISSES = 2


class LivenessProbe:
    """Asks servers now and then whether they are there. Who is slow to answer lives: only when
    nobody takes the question has a server ended, or its host."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fleet: EngineFleet | None = None
        self._asked: dict[str, Future[Any]] = {}
        self._misses: dict[str, int] = {}
        self._next = 0.0

    def gone(self, urls: Sequence[str]) -> list[str]:
        """Those of which it is known by now; never waits."""
        self._turn_to(urls)
        found = []
        for url, answer in list(self._asked.items()):
            if not answer.done():
                continue
            del self._asked[url]
            self._misses[url] = self._misses.get(url, 0) + 1 if _nobody_there(answer) else 0
            if self._misses[url] >= _MISSES:
                found.append(url)
            elif self._misses[url]:
                self._ask(url)
        if self._clock() >= self._next:
            self._next = self._clock() + deadlines.LIVENESS_ASK
            for url in urls:
                if url not in self._asked and url not in found:
                    self._ask(url)
        return found

    def gone_now(self, urls: Sequence[str]) -> list[str]:
        """Ask, and wait for the answers."""
        self._turn_to(urls)
        found = list(urls)
        for _ in range(_MISSES if found else 0):
            assert self._fleet is not None
            asked = {
                url: self._fleet.start_get(url, "/health", deadlines.LIVENESS_ANSWER)
                for url in found
            }
            wait(asked.values(), timeout=deadlines.LIVENESS_ANSWER + 1)
            found = [
                url for url, answer in asked.items() if answer.done() and _nobody_there(answer)
            ]
        return found

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None

    def _turn_to(self, urls: Sequence[str]) -> None:
        if urls and (self._fleet is None or not set(urls) <= set(self._fleet.urls)):
            self.close()
            self._asked, self._fleet = {}, EngineFleet(urls)
        self._asked = {url: answer for url, answer in self._asked.items() if url in urls}
        self._misses = {url: count for url, count in self._misses.items() if url in urls}

    def _ask(self, url: str) -> None:
        assert self._fleet is not None
        self._asked[url] = self._fleet.start_get(url, "/health", deadlines.LIVENESS_ANSWER)


def _nobody_there(answer: Future[Any]) -> bool:
    error = None if answer.cancelled() else answer.exception()
    return (
        isinstance(error, EngineError)
        and error.status is None
        and not isinstance(error.__cause__, TimeoutError)
    )
