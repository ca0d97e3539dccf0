"""The state of every engine of a run in one table, and the only place that changes it.

    STARTING ─ launched ─► SERVING ─ lost ─► DOWN ─ restarted ─► STARTING ─ came up ─► STARTED
                              ▲               ▲                     │                     │
                              │               ├──── start failed ◄──┘              rejoin │
                              │               └──── lost ◄──── REJOINING ◄────────────────┘
                              └─────────── admitted ◄──────────────┘

    (external engine) ── joined ──► STARTED      SERVING, REJOINING or STARTED ── left ──► (removed)

    SERVING    gets requests, weight pushes and memory calls
    REJOINING  runs again, gets weight pushes and memory calls, but no requests yet
    STARTED    runs again, and gets no calls yet

An external engine (`slime.cluster.external_engines`) enters as STARTED, is never asked for memory,
and is removed when it dies. ``released`` records which memory an engine has given up, because
SGLang dies if it is asked to release or resume the same memory twice. The table makes no calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Tags of an engine's memory, in SGLang's words.
WEIGHTS = "weights"
CACHE = "kv_cache"
GRAPHS = "cuda_graph"
ALL_MEMORY = (CACHE, WEIGHTS, GRAPHS)

#: Deaths of one engine that the run survives without a completed rollout between them.
MAX_RESTARTS = 3


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"
    STARTED = "started"
    REJOINING = "returning"


@dataclass
class EngineEntry:
    """One engine. An engine over several nodes has one part on each.

    Attributes:
        parts: names of its parts, the first node's first: ("engine-3", "engine-3-node-1").
        is_policy: it serves the trained model. Other models get no pushes, and the death of one of
            their engines ends the run.
        can_restart: false for other models, and for prefill and decode servers, whose URLs are on
            the router's command line.
        is_external: it was started outside the run; the name of its only part is its URL.
        ranks: processes that hold weights, for an external engine; others have one per slot.
        urls: base URLs of the parts' servers; () while it does not run.
        released: tags of the memory that it has given up.
        paused: it takes no requests until generation is continued.
        deaths: number of deaths since the last completed rollout.
        reason, since: how it died last, and when the driver noticed.
        starting: Ray references to the answers of a start under way, by actor.
    """

    number: int
    parts: tuple[str, ...]
    is_policy: bool = True
    can_restart: bool = True
    is_external: bool = False
    ranks: int = 1
    state: State = State.STARTING
    urls: tuple[str, ...] = ()
    released: set[str] = field(default_factory=set)
    paused: bool = False
    deaths: int = 0
    reason: str = ""
    since: float = 0.0
    starting: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def url(self) -> str:
        """The base URL of its first node's server."""
        return self.urls[0]

    @property
    def runs(self) -> bool:
        """Whether it gets weight pushes and memory calls."""
        return self.state in (State.SERVING, State.REJOINING)

    @property
    def died_too_often(self) -> bool:
        return self.deaths > MAX_RESTARTS


def external_engine(number: int, url: str) -> EngineEntry:
    """Return the entry of an engine that was started outside the run, before the launch."""
    return EngineEntry(number, (url,), can_restart=False, is_external=True)


class EngineTable:
    """All engines by number.

    Attributes:
        num_lost: total number of lost engines. If it grows during a call that fails, a lost engine
            explains the failure.
    """

    def __init__(
        self, engines: Iterable[EngineEntry], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engines = {engine.number: engine for engine in engines}
        self._clock = clock
        self.num_lost = 0
        self._seconds_away: list[float] = []
        self._next_number = max(self.engines, default=-1) + 1

    # -- queries -----------------------------------------------------------------------------------

    @property
    def policy(self) -> list[EngineEntry]:
        """Running engines of the trained model, which get weight pushes."""
        return [engine for engine in self.engines.values() if engine.is_policy and engine.runs]

    @property
    def others(self) -> list[EngineEntry]:
        """Running engines of other models."""
        return [engine for engine in self.engines.values() if not engine.is_policy and engine.runs]

    @property
    def groups(self) -> list[list[str]]:
        """URLs of `policy`, then of `others`."""
        return [[engine.url for engine in engines] for engines in (self.policy, self.others)]

    def in_state(self, state: State) -> list[EngineEntry]:
        return [engine for engine in self.engines.values() if engine.state is state]

    @property
    def away(self) -> list[EngineEntry]:
        """Engines that died or joined, and do not take part in pushes yet."""
        return [engine for engine in self.engines.values() if engine.reason and not engine.runs]

    def find(self, part: str) -> EngineEntry | None:
        """Return the engine with this part; None for the router."""
        return next((engine for engine in self.engines.values() if part in engine.parts), None)

    def is_current_server(self, part: str, url: str) -> bool:
        """Return whether ``url`` is the part's current server: reports about a former one may be
        late."""
        engine = self.find(part)
        return engine is not None and engine.runs and engine.urls[engine.parts.index(part)] == url

    # -- transitions -------------------------------------------------------------------------------

    def mark_launched(self, number: int, urls: Sequence[str]) -> None:
        engine = self._expect_state(number, State.STARTING)
        engine.state = State.SERVING
        engine.urls = tuple(urls)

    def mark_lost(self, number: int, reason: str) -> EngineEntry:
        engine = self._expect_state(number, State.SERVING, State.REJOINING)
        engine.state = State.DOWN
        engine.urls = ()
        engine.released = set()
        engine.paused = False
        engine.reason = reason
        engine.since = self._clock()
        engine.deaths += 1
        self.num_lost += 1
        return engine

    def mark_started_again(self, number: int, answers: Mapping[Any, Any]) -> None:
        engine = self._expect_state(number, State.DOWN)
        engine.state = State.STARTING
        engine.starting = answers

    def mark_start_failed(self, number: int) -> None:
        engine = self._expect_state(number, State.STARTING)
        engine.state = State.DOWN
        engine.starting = {}
        engine.deaths += 1

    def mark_came_up(self, number: int, urls: Sequence[str]) -> None:
        engine = self._expect_state(number, State.STARTING)
        engine.state = State.STARTED
        engine.urls = tuple(urls)
        engine.starting = {}

    def mark_joined(self, url: str, ranks: int) -> EngineEntry:
        """Add an engine that was started outside the run."""
        self._next_number = max(self._next_number, max(self.engines, default=-1) + 1)
        engine = external_engine(self._next_number, url)
        self._next_number += 1  # never reused, because slots are looked up by number
        engine.ranks = ranks
        engine.state = State.STARTED
        engine.urls = (url,)
        engine.reason = "joined"
        engine.since = self._clock()
        self.engines[engine.number] = engine
        return engine

    def mark_left(self, number: int) -> None:
        """Remove an engine."""
        self._expect_state(number, State.SERVING, State.REJOINING, State.STARTED)
        del self.engines[number]

    def rejoin(self) -> None:
        """Let all started engines take part in pushes and memory calls, but not in requests yet."""
        for engine in self.in_state(State.STARTED):
            engine.state = State.REJOINING

    def mark_admitted(self, number: int) -> float:
        """Record that an engine gets requests again; return the seconds since it died or joined."""
        engine = self._expect_state(number, State.REJOINING)
        engine.state = State.SERVING
        seconds = self._clock() - engine.since
        if not engine.is_external:
            self._seconds_away.append(seconds)
        return seconds

    def reset_death_counts(self) -> None:
        for engine in self.policy:
            engine.deaths = 0

    def pop_seconds_away(self) -> list[float]:
        """Return how long each restarted engine was away, for those admitted since the last
        call."""
        seconds = self._seconds_away
        self._seconds_away = []
        return seconds

    # -- memory ------------------------------------------------------------------------------------

    @staticmethod
    def to_release(engines: Iterable[EngineEntry], tags: Sequence[str]) -> dict[str, list[str]]:
        """Return URL → which of ``tags`` the engine still holds, without engines that hold none.

        External engines are left out: they share no GPU with the trainer.
        """
        own = [engine for engine in engines if not engine.is_external]
        todo = {engine.url: [tag for tag in tags if tag not in engine.released] for engine in own}
        return {url: held for url, held in todo.items() if held}

    @staticmethod
    def to_resume(engines: Iterable[EngineEntry], tags: Sequence[str]) -> dict[str, list[str]]:
        """Return URL → which of ``tags`` the engine has released, without engines that hold all."""
        todo = {engine.url: [tag for tag in tags if tag in engine.released] for engine in engines}
        return {url: lacking for url, lacking in todo.items() if lacking}

    def mark_released(self, url: str, tags: Iterable[str]) -> None:
        engine = self._running_at(url)
        assert not engine.released & set(tags), (
            f"{url} has released {engine.released}, and was asked for {tags}"
        )
        engine.released |= set(tags)

    def mark_resumed(self, url: str, tags: Iterable[str]) -> None:
        engine = self._running_at(url)
        assert set(tags) <= engine.released, (
            f"{url} has released {engine.released}, and was asked to take {tags}"
        )
        engine.released -= set(tags)

    def mark_paused(self, urls: Iterable[str]) -> None:
        """Record engines that were asked to pause, whether or not they did."""
        for url in urls:
            self._running_at(url).paused = True

    def mark_continued(self, url: str) -> None:
        self._running_at(url).paused = False

    # -- helpers -----------------------------------------------------------------------------------

    def _expect_state(self, number: int, *states: State) -> EngineEntry:
        engine = self.engines[number]
        assert engine.state in states, f"engine {number} is {engine.state.value}"
        return engine

    def _running_at(self, url: str) -> EngineEntry:
        [engine] = [engine for engine in self.engines.values() if engine.runs and engine.url == url]
        return engine
