"""Which engine has released what: SGLang dies of being asked twice to give memory up, or to take it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slime.engines.api import EngineError
from slime.engines.fleet import answers

MEMORY_SECONDS = 300.0  # a copy of the weights to the host or back, and the end of the last requests


class Fleet(Protocol):
    """What of `slime.engines.fleet.EngineFleet` is needed here."""

    @property
    def urls(self) -> Sequence[str]: ...
    def post_to(
        self, path: str, bodies: Mapping[str, dict[str, Any]], timeout: float
    ) -> Mapping[str, dict[str, Any] | EngineError]: ...


class EngineMemory:
    """Has engines release memory and take it back; none is asked for what it has done already.

    When one of several fails, the others have done what they were asked. So a verb can be called again:

        release(fleet, ["weights"])   a: released    b: released
        resume(fleet, ["weights"])    a: there       b: dies; EngineError
        resume(fleet, ["weights"])    a: not asked   b: asked, if it is still one of the fleet
    """

    def __init__(self) -> None:
        self._released: dict[str, set[str]] = {}

    def release(self, fleet: Fleet, tags: Sequence[str]) -> None:
        """Raises: EngineError: an engine failed; names all that did."""
        for url in fleet.urls:
            self._released.setdefault(url, set())
        todo = {url: [tag for tag in tags if tag not in self._released[url]] for url in fleet.urls}
        failed = self._ask(fleet, "/release_memory_occupation", todo)
        for url in todo.keys() - failed.keys():
            self._released[url] |= set(todo[url])
        answers(list(failed.values()))

    def resume(self, fleet: Fleet, tags: Sequence[str]) -> None:
        """Raises: EngineError: an engine failed; names all that did."""
        todo = {url: [tag for tag in tags if tag in self._released.get(url, ())] for url in fleet.urls}
        failed = self._ask(fleet, "/resume_memory_occupation", todo)
        for url in todo.keys() - failed.keys():
            self._released.get(url, set()).difference_update(todo[url])
        answers(list(failed.values()))

    def forget(self, url: str) -> None:
        """The engine is no more; another one may come to have its URL."""
        self._released.pop(url.rstrip("/"), None)

    @staticmethod
    def _ask(fleet: Fleet, path: str, todo: Mapping[str, list[str]]) -> dict[str, EngineError]:
        """Errors by URL, of those that failed."""
        outcomes = fleet.post_to(path, {url: {"tags": tags} for url, tags in todo.items() if tags}, MEMORY_SECONDS)
        return {url: outcome for url, outcome in outcomes.items() if isinstance(outcome, EngineError)}
