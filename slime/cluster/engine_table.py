"""The state of all engines of a run in one table: which of them may be asked what. Every change of
it is a method here.

    starting ── launched ──► serving ── lost ──► down ── started again ──► starting ── came up ──►
    up
                                ▲                 ▲                           │                    │
                                taken in │                 ├────── start failed ◄──────┘
                                ▼ │                 └────────────────── lost ◄──────────────────
                                returning └─────────────────────────────────────────────── admitted
                                ◄────────┘
    joined ─► up                any of serving, returning, up ── left ─► forgotten

    serving     gets requests, pushes, and its turn with memory
    returning   runs again, gets pushes and its turn with memory, no requests until it is admitted
    up          runs again and is not known to anybody yet

Engines that somebody else has started (`slime.cluster.external_engines`) join as one that came up,
are never asked for memory, and are forgotten when they die. An engine that serves or returns has
released some of its memory (``released``: SGLang dies of being asked twice to give the same memory
up, or to take it back) and may be paused; what died has neither. Nothing here asks anybody
anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Tags of an engine's memory, as SGLang calls them.
WEIGHTS = "weights"
CACHE = "kv_cache"
GRAPHS = "cuda_graph"
ALL_MEMORY = (CACHE, WEIGHTS, GRAPHS)

#: Deaths of one engine since a rollout was last completed; one more ends the run.
MOST_RESTARTS = 3


class State(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"
    STARTED = "started"
    REJOINING = "returning"


@dataclass
class EngineEntry:
    """One engine; over several nodes it has a part on each.

    Attributes:
        parts: names of its parts, the first node's first: ("engine-3", "engine-3-node-1").
        is_policy: it serves the model that is trained; others get no pushes, and their death ends
            the run.
        can_restart: one of the policy's that answers alone. Prefill and decode servers are on their
            router's command line.
        is_external: somebody else has started it; its part's name is its URL.
        ranks: processes that hold its weights, of an external one; others' are as many as their
            slots.
        urls: of the parts' servers while it runs.
        released: tags of the memory that it has given up.
        paused: it takes no requests until it is told to go on.
        deaths: since it last proved itself.
        reason, since: how it died last, and when that was known.
        starting: answers to the start under way, by whoever was asked (Ray's references).
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
        """The base URL of the engine: its first node's."""
        return self.urls[0]

    @property
    def runs(self) -> bool:
        """It may be asked for memory and pushed to."""
        return self.state in (State.SERVING, State.REJOINING)

    @property
    def died_too_often(self) -> bool:
        return self.deaths > MOST_RESTARTS


def external_engine(number: int, url: str) -> EngineEntry:
    """One that somebody else has started, not yet launched."""
    return EngineEntry(number, (url,), can_restart=False, is_external=True)


class EngineTable:
    """All engines by number.

    Attributes:
        num_lost: engines that died, or were given up, all in all: who sees it grow knows that
            something failed because of that.
    """

    def __init__(
        self, engines: Iterable[EngineEntry], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engines = {engine.number: engine for engine in engines}
        self._clock = clock
        self.num_lost = 0
        self._seconds_away: list[float] = []
        self._next_number = max(self.engines, default=-1) + 1

    # -- who is there
    # ------------------------------------------------------------------------------------------

    @property
    def policy(self) -> list[EngineEntry]:
        """Those that pushes go to: the policy's that run."""
        return [engine for engine in self.engines.values() if engine.is_policy and engine.runs]

    @property
    def others(self) -> list[EngineEntry]:
        """Of other models; they run as long as the run does."""
        return [engine for engine in self.engines.values() if not engine.is_policy and engine.runs]

    @property
    def groups(self) -> list[list[str]]:
        """URLs of the policy's that run, and of the others'."""
        return [[engine.url for engine in engines] for engines in (self.policy, self.others)]

    def those(self, state: State) -> list[EngineEntry]:
        return [engine for engine in self.engines.values() if engine.state is state]

    @property
    def away(self) -> list[EngineEntry]:
        """Those that died and have not been taken in again."""
        return [engine for engine in self.engines.values() if engine.reason and not engine.runs]

    def find(self, part: str) -> EngineEntry | None:
        """Whose part it is; None for what is no engine, the router."""
        return next((engine for engine in self.engines.values() if part in engine.parts), None)

    def is_news(self, part: str, url: str) -> bool:
        """Whether the end of a server is that of the engine's present one, not of a former one,
        heard late."""
        engine = self.find(part)
        return engine is not None and engine.runs and engine.urls[engine.parts.index(part)] == url

    # -- life
    # ----------------------------------------------------------------------------------------------

    def launched(self, number: int, urls: Sequence[str]) -> None:
        """At the launch: requests may come at once, and it holds all its memory."""
        engine = self._in(number, State.STARTING)
        engine.state, engine.urls = State.SERVING, tuple(urls)

    def lost(self, number: int, reason: str) -> EngineEntry:
        """It died, or is as good as dead."""
        engine = self._in(number, State.SERVING, State.REJOINING)
        engine.state, engine.urls, engine.released, engine.paused = State.DOWN, (), set(), False
        engine.reason, engine.since = reason, self._clock()
        engine.deaths += 1
        self.num_lost += 1
        return engine

    def started_again(self, number: int, answers: Mapping[Any, Any]) -> None:
        engine = self._in(number, State.DOWN)
        engine.state = State.STARTING
        engine.starting = answers

    def start_failed(self, number: int) -> None:
        engine = self._in(number, State.STARTING)
        engine.state = State.DOWN
        engine.starting = {}
        engine.deaths += 1

    def came_up(self, number: int, urls: Sequence[str]) -> None:
        engine = self._in(number, State.STARTING)
        engine.state, engine.urls, engine.starting = State.STARTED, tuple(urls), {}

    def joined(self, url: str, ranks: int) -> EngineEntry:
        """Somebody else has started it. It gets weights with the next push, and requests after
        it."""
        self._next_number = max(self._next_number, max(self.engines, default=-1) + 1)
        engine = external_engine(self._next_number, url)
        self._next_number += 1  # that of an engine that has left is not given again: slots go by it
        engine.ranks = ranks
        engine.state = State.STARTED
        engine.urls = (url,)
        engine.reason, engine.since = "joined", self._clock()
        self.engines[engine.number] = engine
        return engine

    def left(self, number: int) -> None:
        """Nobody talks to it any more, and it is forgotten."""
        self._in(number, State.SERVING, State.REJOINING, State.STARTED)
        del self.engines[number]

    def rejoin(self) -> None:
        """All that are up: from now on pushes and memory are their business too, requests not
        yet."""
        for engine in self.those(State.STARTED):
            engine.state = State.REJOINING

    def admitted(self, number: int) -> float:
        """It has the current weights and gets requests; returns the seconds since it died, or
        joined."""
        engine = self._in(number, State.REJOINING)
        engine.state = State.SERVING
        seconds = self._clock() - engine.since
        if not engine.is_external:
            self._seconds_away.append(seconds)
        return seconds

    def reset_death_counts(self) -> None:
        """A rollout was completed with those that run."""
        for engine in self.policy:
            engine.deaths = 0

    def pop_seconds_away(self) -> list[float]:
        """Of the engines that were restarted and admitted since the last call."""
        seconds = self._seconds_away
        self._seconds_away = []
        return seconds

    # -- memory
    # ----------------------------------------------------------------------------------------------

    @staticmethod
    def to_release(engines: Iterable[EngineEntry], tags: Sequence[str]) -> dict[str, list[str]]:
        """By URL: what of ``tags`` each of them still has. Who has nothing of it is not to be
        asked, nor are external ones, whose memory is nobody's here."""
        own = [engine for engine in engines if not engine.is_external]
        todo = {engine.url: [tag for tag in tags if tag not in engine.released] for engine in own}
        return {url: held for url, held in todo.items() if held}

    @staticmethod
    def to_resume(engines: Iterable[EngineEntry], tags: Sequence[str]) -> dict[str, list[str]]:
        """By URL: what of ``tags`` each of them has given up."""
        todo = {engine.url: [tag for tag in tags if tag in engine.released] for engine in engines}
        return {url: lacking for url, lacking in todo.items() if lacking}

    def released(self, url: str, tags: Iterable[str]) -> None:
        """It has done what it was asked."""
        engine = self._at(url)
        assert not engine.released & set(tags), (
            f"{url} has released {engine.released}, and was asked for {tags}"
        )
        engine.released |= set(tags)

    def resumed(self, url: str, tags: Iterable[str]) -> None:
        engine = self._at(url)
        assert set(tags) <= engine.released, (
            f"{url} has released {engine.released}, and was asked to take {tags}"
        )
        engine.released -= set(tags)

    def paused(self, urls: Iterable[str]) -> None:
        """They were asked to pause, and may have done so."""
        for url in urls:
            self._at(url).paused = True

    def went_on(self, url: str) -> None:
        self._at(url).paused = False

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _in(self, number: int, *states: State) -> EngineEntry:
        engine = self.engines[number]
        assert engine.state in states, f"engine {number} is {engine.state.value}"
        return engine

    def _at(self, url: str) -> EngineEntry:
        [engine] = [engine for engine in self.engines.values() if engine.runs and engine.url == url]
        return engine
