"""--use-fault-tolerance: engines that died, or hang, start again and come back with the current weights.

    serving ── ended, or silent for --rollout-health-check-timeout ──► down: killed, out of the router, starts again
       ▲                                                                 │ it answers
       └── router ◄── canary ◄── weight push, by all engines ◄── up ◄────┘

The others go on generating meanwhile. An engine comes back with the next weight push, which is between rollouts; only
when no engine is left is it waited for, in the middle of a rollout if need be, since a push then interrupts nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from slime.cluster.engine_actor import Obituary, raise_obituary
from slime.cluster.hand_over import HandOver
from slime.cluster.waiting import DeadlinePassed, StopRequested, Watch, wait_for
from slime.config import Config
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.kinds import engine_of
from slime.errors import UserError
from slime.log import get_logger

logger = get_logger(__name__)

#: Deaths of one engine since a rollout was last completed; one more ends the run.
MOST_RESTARTS = 3
_POLL_SECONDS = 0.5
_ASK_AGAIN_SECONDS = 0.1
_AT_HAND_SECONDS = 60.0


class Engines(Protocol):
    """What `slime.cluster.engine_group.EngineGroup` can do, as far as it is needed here."""

    serving: dict[int, str]
    part_urls: dict[str, str]
    servers: dict[str, Any]

    @property
    def fleet(self) -> EngineFleet: ...
    def watch(self, judge: Callable[[str, Obituary | None], None]) -> Watch: ...
    def obituaries(self, names: Sequence[str]) -> dict[str, Obituary | None]: ...
    def restartable(self, name: str) -> int | None: ...
    def take_out(self, number: int) -> str: ...
    def begin_restart(self, number: int) -> dict[str, ray.ObjectRef]: ...
    def take_in(self, number: int, urls: Sequence[str]) -> None: ...
    def release_memory_of(self, number: int, tags: Sequence[str]) -> None: ...
    def put_behind_router(self, number: int) -> None: ...


@dataclass
class _Restart:
    """Of one engine.

    Attributes:
        reason: how it died.
        since: when that was known; `time.monotonic`.
        refs: of the start that is under way, by the name of the engine's part; empty before it.
        urls: of its parts, from the moment they run.
    """

    reason: str
    since: float = field(default_factory=time.monotonic)
    refs: Mapping[str, ray.ObjectRef] = field(default_factory=dict)
    urls: Sequence[str] = ()


class EngineRepair:
    """Knows which engines are down and brings them back.

    Args:
        hand_over: where trainer and engines take turns with memory. An engine then starts only when it is waited for,
            alone on its GPU; otherwise as soon as its death is known.
        health: None leaves hanging engines alone.
        start_seconds: that one start may take.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.

    Attributes:
        down: by the engine's number.
        num_lost: engines that died, all in all.
    """

    def __init__(
        self,
        engines: Engines,
        hand_over: HandOver | None = None,
        health: HealthChecks | None = None,
        start_seconds: float = 600.0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engines, self._hand_over, self.health = engines, hand_over, health
        self._start_seconds, self._should_stop = start_seconds, should_stop
        self.down: dict[int, _Restart] = {}
        self.num_lost = 0
        self._returning: dict[int, _Restart] = {}
        self._deaths: Counter[int] = Counter()
        self._seconds: list[float] = []  # of the restarts since `metrics` was last called

    def watch(self) -> Watch:
        """Tells `heard`."""
        return self.engines.watch(self.heard)

    # -- death -------------------------------------------------------------------------------------------------

    def heard(self, name: str, obituary: Obituary | None) -> None:
        """What the watch has heard.

        Raises:
            RunFailed: a server has died that is not restarted: the router, an engine of another model or of a pair, or
                one that has died too often.
        """
        if obituary is None:
            return
        number = self.engines.restartable(name)
        if number is None:
            raise_obituary(name, obituary, tolerant=True)
        elif number in self.engines.serving and obituary.url == self.engines.part_urls[name]:  # no late news
            self._lost(number, f"{obituary.how}: {obituary.exception}" if obituary.exception else obituary.how)

    def ask(self) -> None:
        """Hear now, instead of sooner or later, who has died. Raises as `heard`."""
        names = [name for name in self.engines.servers if self.engines.restartable(name) not in self.down]
        for name, obituary in self.engines.obituaries(names).items():
            self.heard(name, obituary)

    def kill_hanging(self) -> None:
        """To be called now and then while the engines generate: those that hang are lost. Raises as `heard`."""
        if self.health is None or not self.engines.serving:
            return
        self._lose_hanging(self.health.silent(self.engines.fleet))

    def _lose_hanging(self, urls: Sequence[str]) -> None:
        assert self.health is not None
        numbers = {url: number for number, url in self.engines.serving.items() if number not in self._returning}
        for url in urls:
            if url in numbers:
                self._lost(numbers[url], f"gave no sign of life for {self.health.timeout:.0f} s and was killed")

    def _lost(self, number: int, how: str) -> None:
        """An engine that serves is dead or hangs: from now on no request goes there, and it is to start again."""
        url = self.engines.serving[number]
        log_tail = self.engines.take_out(number)
        self._returning.pop(number, None)
        self.num_lost += 1
        self._deaths[number] += 1
        if self._deaths[number] > MOST_RESTARTS:
            times = f"died {self._deaths[number]} times without a completed rollout between; the last time it {how}"
            raise_obituary(f"engine-{number}", Obituary(times, log_tail, url), tolerant=True)
        logger.warning("engine-%d %s; it is started again, %d go on meanwhile", number, how, len(self.engines.serving))
        self.down[number] = _Restart(how)
        if self._hand_over is None:
            self._start_again()

    def any_serves(self) -> bool:
        """As of now."""
        self.ask()
        return bool(self.engines.serving)

    def has_lost_more_than(self, lost: int) -> bool:
        """Something has failed: was it that an engine died, ``lost`` being `num_lost` before?"""
        if self.num_lost == lost:
            time.sleep(_POLL_SECONDS)  # connections may break before the process is gone
            self.ask()
        return self.num_lost > lost

    def begin_rollout(self) -> None:
        """The engines are awake from now on, which `kill_hanging` presumes."""
        if self.health is not None:
            self.health.begin()

    def before_release(self) -> None:
        """To be called before the engines give memory up: those that died or hang are left out, and no health check is
        under way any more. Raises as `heard`."""
        self.ask()
        if self.health is not None and self.engines.serving:
            self._lose_hanging(self.health.end(self.engines.fleet))

    def rollout_completed(self) -> None:
        """The engines that serve have proved themselves."""
        for number in self.engines.serving:
            del self._deaths[number]

    # -- restart -----------------------------------------------------------------------------------------------

    def bring_back(self) -> None:
        """Between rollouts: those that are up again count among the engines that pushes go to. `admit` is to follow.

        The others are waited for where trainer and engines take turns, and the first one when no engine is left.

        Raises:
            UserError: an engine did not come up too often; carries its last log lines.
        """
        if not self.down:
            return
        if self._hand_over is not None:
            fresh: list[int] = []
            with self._hand_over.restarting(lambda tags: self._release(fresh, tags)):
                self._start_again()
                self._wait()
                fresh += self._take_in()
            return
        if not self.engines.serving:
            self._wait(for_all=False)
        self.look()
        self._take_in()

    def _release(self, numbers: Sequence[int], tags: Sequence[str]) -> None:
        for number in numbers:
            self.engines.release_memory_of(number, tags)

    def _start_again(self) -> None:
        """Begin to start those that are down and not starting."""
        for number, restart in self.down.items():
            if not restart.refs:
                restart.refs = self.engines.begin_restart(number)

    def look(self) -> None:
        """Take note of starts that have come to their end; never waits. One that failed is tried again.

        Raises:
            UserError: an engine did not come up too often; carries its last log lines.
        """
        for number, restart in self.down.items():
            refs = list(restart.refs.values())
            if not refs or restart.urls or not _all_done(refs):
                continue
            try:
                restart.urls = wait_for(refs, "restarting", _AT_HAND_SECONDS, names=list(restart.refs))
                logger.info("engine-%d runs again and comes back with the next weight push", number)
            except UserError as error:
                self._deaths[number] += 1
                if self._deaths[number] > MOST_RESTARTS:
                    raise
                logger.warning("engine-%d did not come up; it is started again: %s", number, error)
                restart.refs = self.engines.begin_restart(number)

    def _wait(self, *, for_all: bool = True) -> None:
        """Until all starts under way have come to their end, or the first one."""
        end = time.monotonic() + (1 + MOST_RESTARTS) * self._start_seconds
        while refs := [ref for restart in self.down.values() if not restart.urls for ref in restart.refs.values()]:
            if not for_all and any(restart.urls for restart in self.down.values()):
                return
            if self._should_stop():
                raise StopRequested("restarting engines")
            if time.monotonic() > end:
                names = ", ".join(f"engine-{number}" for number, restart in self.down.items() if not restart.urls)
                raise DeadlinePassed(f"{names} did not come up again", fix="look into its log")
            ray.wait(refs, num_returns=len(refs), timeout=_POLL_SECONDS)
            self.look()

    def _take_in(self) -> list[int]:
        up = {number: restart for number, restart in self.down.items() if restart.urls}
        for number, restart in up.items():
            self.engines.take_in(number, restart.urls)
            self._returning[number] = self.down.pop(number)
        return list(up)

    def admit(self) -> None:
        """Those brought back have the current weights: requests go there again.

        An engine that the router refuses counts as lost.
        """
        if self._returning and self._hand_over is not None:
            self._hand_over.to_engines()  # requests may come from now on
        for number in list(self._returning):
            restart = self._returning[number]
            try:
                self.engines.put_behind_router(number)
            except EngineError as error:
                self._lost(number, f"was refused by the router ({error})")
                continue
            del self._returning[number]
            seconds = time.monotonic() - restart.since
            self._seconds.append(seconds)
            logger.warning(
                "engine-%d is back after %.1f s as %s: it %s", number, seconds, restart.urls[0], restart.reason
            )

    def metrics(self) -> dict[str, float]:
        """Restarts that were completed since the last call, and the longest time that one of these engines was away."""
        seconds, self._seconds = self._seconds, []
        found = {"rollout/engine_restarts": float(len(seconds))}
        return found | ({"rollout/engine_restart_seconds": max(seconds)} if seconds else {})


def _all_done(refs: list[ray.ObjectRef]) -> bool:
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)


class HealthChecks:
    """Finds engines that hang: alive, but no good answer for ``timeout`` seconds after they were asked.

    Only engines that are awake may be asked: SGLang's answer is a token. So no question may be under way either when
    they give their memory up (`end`).

    Args:
        path: that answers 200 while all is well.
        interval: seconds between two questions to an engine.
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
        self._path, self._clock = path, clock
        self.interval, self.timeout, self.first_wait = interval, timeout, first_wait
        self._next = 0.0
        self._fleet: EngineFleet | None = None
        self._asked_at = 0.0
        self._open: dict[str, Future[Any]] = {}

    @staticmethod
    def of(config: Config) -> HealthChecks:
        flags = config.fault_tolerance
        return HealthChecks(
            engine_of(config).health_path,
            interval=flags.rollout_health_check_interval,
            timeout=flags.rollout_health_check_timeout,
            first_wait=flags.rollout_health_check_first_wait,
        )

    def begin(self) -> None:
        """The engines are awake from now on."""
        self._open, self._next = {}, self._clock() + self.first_wait

    def silent(self, fleet: EngineFleet) -> list[str]:
        """Ask when it is time, and hear who has answered; never waits. URLs of those that hang."""
        now = self._clock()
        if fleet is not self._fleet:  # other engines; those that closed connections carried will not be answered
            self._fleet, self._open = fleet, {}
        if not self._open:
            if now >= self._next:
                self._asked_at, self._next = now, now + self.interval
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
        hanging, self._open = list(self._open), {}
        return hanging

    def end(self, fleet: EngineFleet) -> list[str]:
        """Wait for the answers to questions under way; `begin` is to come before the next ones. URLs of those that
        hang."""
        if fleet is not self._fleet:  # its questions were dropped with its connections
            self._open = {}
        hanging: list[str] = []
        while self._open:
            wait(self._open.values(), timeout=_POLL_SECONDS)
            hanging += self.silent(fleet)
            if self._open:
                time.sleep(_ASK_AGAIN_SECONDS)
        return hanging

    def _ask(self, fleet: EngineFleet, urls: list[str]) -> dict[str, Future[Any]]:
        return {url: fleet.start_get(url, self._path, self.timeout) for url in urls}
