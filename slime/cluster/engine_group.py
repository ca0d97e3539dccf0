"""All engines of a run and their routers, each a Ray actor that owns a server process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slime.cluster.engine_actor import DisaggregatedWorkers, EngineActor, Obituary, raise_obituary
from slime.cluster.engine_memory import MEMORY_SECONDS, EngineMemory
from slime.cluster.engine_placement import EnginePart, engine_parts
from slime.cluster.hand_over import CACHE, GRAPHS, WEIGHTS
from slime.cluster.placement import Slots
from slime.cluster.waiting import ActorDied, DeadlinePassed, Watch, wait_for
from slime.config import Config
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.launch import ServedModel
from slime.engines.router import register_workers, remove_worker
from slime.errors import RunFailed
from slime.log import get_logger
from slime.placement import PlacementPlan
from slime.weights.transport import EngineSlots

logger = get_logger(__name__)

_COLOCATED_SHARE = 0.2
_PAIR = ("prefill", "decode")
_ALL_MEMORY = [CACHE, WEIGHTS, GRAPHS]
_IDLE_SECONDS = 10.0  # for requests that were aborted to end
_ROUTER_SECONDS = 10.0  # to take a worker out; generation is waited for meanwhile
_JOIN_ROUTER_SECONDS = 60.0
_KILL_SECONDS = 60.0
_LOOK_SECONDS = 0.25
_DEATH_SECONDS = 3.0  # connections may break before the process is gone


def _router_name(model: ServedModel) -> str:
    return "router" if model.is_policy else f"router-{model.name}"


class EngineGroup:
    """All engines of a run, and a router in front of those of each model.

    Attributes:
        parts: what was started where; an engine over several nodes has a part on each.
        serving: base URL by number, of the policy's engines that run.
        part_urls: of each part's latest server, by name.
        router_url: the policy's.
        router_urls: by model, the policy's among them.
    """

    def __init__(self, config: Config, plan: PlacementPlan, slots: Slots, run_path: Path, num_threads: int) -> None:
        share = _COLOCATED_SHARE if config.cluster.colocate else 1.0
        actor: Any = ray.remote(EngineActor)  # Ray makes the methods remote; its types do not say so
        self.config, self.plan = config, plan
        self.parts = engine_parts(config, plan, slots)
        self.engines = [
            actor.options(max_restarts=0, **slots.options(part.slot, share)).remote(
                config, part.name, run_path, num_threads, part
            )
            for part in self.parts
        ]
        self.nodes = {slots.places[part.slot].node for part in self.parts if part.model.is_policy}
        self.names = [part.name for part in self.parts]
        self._models = {part.model.name: part.model for part in self.parts}
        self._policy = next(name for name, model in self._models.items() if model.is_policy)
        self._routers = {
            name: actor.options(num_cpus=0, max_restarts=0).remote(config, _router_name(model), run_path, 1)
            for name, model in self._models.items()
        }
        self.serving: dict[int, str] = {}
        self.part_urls: dict[str, str] = {}
        self.router_urls: dict[str, str] = {}
        self.servers = dict(zip(self.names, self.engines))
        self.servers |= {_router_name(self._models[name]): router for name, router in self._routers.items()}
        self._fleet: EngineFleet | None = None
        self._others: EngineFleet | None = None
        self._memory = EngineMemory()
        self._paused = False
        self._model_path = ""

    @property
    def router_url(self) -> str:
        return self.router_urls[self._policy]

    @property
    def fleet(self) -> EngineFleet:
        """Connections to the policy's engines, past the router."""
        if self._fleet is None:
            self._fleet = EngineFleet(list(self.serving.values()))
        return self._fleet

    @property
    def answers_alone(self) -> bool:
        """Whether an engine can generate by itself; prefill and decode servers only do in pairs, behind the router."""
        return all(part.group.worker_type not in _PAIR for part in self.parts if part.model.is_policy)

    @property
    def layout(self) -> list[EngineSlots]:
        """Which slots the ranks of each of the policy's engines stand on, in the order of ``serving``."""
        slots: dict[int, tuple[int, ...]] = {}
        for part in self.parts:
            slots[part.place.number] = (*slots.get(part.place.number, ()), *part.slots)
        return [EngineSlots(url, slots[number]) for number, url in self.serving.items()]

    def begin_start(self, model_path: str) -> dict[str, ray.ObjectRef]:
        """Start all engines at once; a reference by name for each, whose values go to `put_router_in_front`."""
        self._model_path = model_path
        return self._begin_start(self.parts)

    def _begin_start(self, parts: Sequence[EnginePart]) -> dict[str, ray.ObjectRef]:
        meeting: dict[int, Any] = {}
        refs = {}
        for part in parts:
            number, engine = part.place.number, self.servers[part.name]
            if part.place.num_nodes > 1 and part.is_first:
                meeting[number] = engine.rendezvous.remote()  # resolved by Ray before the others' `start` runs
            refs[part.name] = engine.start.remote(self._model_path, meeting.get(number))
        return refs

    def put_routers_in_front(self, urls: list[str], should_stop: Callable[[], bool]) -> None:
        """Args: urls: what the references of `begin_start` held, in their order."""
        started = [self._begin_router(name, urls, should_stop) for name in self._routers]
        names = [_router_name(model) for model in self._models.values()]
        self.router_urls = dict(zip(self._routers, wait_for(started, "starting", 120, should_stop, names=names)))
        self.part_urls = dict(zip(self.names, urls, strict=True))
        policy = [part.place.number for part in self.parts if part.is_first and part.model.is_policy]
        self.serving = dict(zip(policy, self._urls_of(urls, self._policy), strict=True))
        if others := [url for name in self._routers if name != self._policy for url in self._urls_of(urls, name)]:
            self._others = EngineFleet(others)
        for name, url in self.router_urls.items():
            logger.info("%d engine(s) of %s behind %s", len(self._urls_of(urls, name)), name, url)

    def _urls_of(self, urls: list[str], model: str, kind: str | None = None) -> list[str]:
        return [
            url
            for part, url in zip(self.parts, urls, strict=True)
            if part.is_first and part.model.name == model and kind in (None, part.group.worker_type)
        ]

    def _begin_router(self, model: str, urls: list[str], should_stop: Callable[[], bool]) -> ray.ObjectRef:
        prefill, decode = (self._urls_of(urls, model, kind) for kind in _PAIR)
        pairs = None
        if prefill:
            servers = [(p.name, actor) for p, actor, url in zip(self.parts, self.engines, urls) if url in prefill]
            ports = [actor.bootstrap_port.remote() for _, actor in servers]
            names = [name for name, _ in servers]
            ports = wait_for(ports, "asking for bootstrap ports", 60, should_stop, names=names)
            pairs = DisaggregatedWorkers(list(zip(prefill, ports)), decode)
        return self._routers[model].start_router.remote(self._urls_of(urls, model), pairs)

    # -- memory ----------------------------------------------------------------------------------------

    def release_memory(self, tags: Sequence[str]) -> None:
        """Have every engine give up what is tagged and has not been given up, once it has ended its last request.

        Raises:
            RunFailed: an engine refused or did not answer.
        """
        with self._naming_engines("giving memory up"):
            if self.serving:  # else all are dead
                self._end_requests(self.fleet)
                self._memory.release(self.fleet, tags)
            if self._others is not None and CACHE in tags:
                self._others.flush_cache(MEMORY_SECONDS)
                self._memory.release(self._others, _ALL_MEMORY)

    def _end_requests(self, fleet: EngineFleet) -> None:
        try:
            fleet.flush_cache(_IDLE_SECONDS)
        except EngineError as error:
            # a rollout that was given up still sends requests; on memory that is gone they would kill the engine
            logger.warning("engines are paused, because they are not idle: %s", error)
            self._paused = True  # some of them, even if others fail
            fleet.post("/pause_generation", {"mode": "abort"}, MEMORY_SECONDS)
            fleet.flush_cache(MEMORY_SECONDS)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Have every engine take what it lacks of the tagged memory; the contents are those of before or none.

        Models other than the policy take part in no push: they give and take all at once, with the caches.
        """
        with self._naming_engines("taking memory back"):
            if self.serving:
                self._memory.resume(self.fleet, tags)
            if self._others is not None and CACHE in tags:
                self._memory.resume(self._others, _ALL_MEMORY)
            if self._paused and CACHE in tags and self.serving:
                self.fleet.post("/continue_generation", {}, MEMORY_SECONDS)
                self._paused = False

    @contextmanager
    def _naming_engines(self, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            with contextlib.suppress(ActorDied, DeadlinePassed):  # the error at hand says more
                self.raise_if_dead(what, _DEATH_SECONDS if error.status is None else 0.0)
            raise RunFailed(
                f"{what}: {error}",
                why="trainer and engines share GPUs and take turns; the next phase would run out of memory",
                fix="read the engine's log; on out of memory lower --sglang-mem-fraction-static",
            ) from error

    # -- death -----------------------------------------------------------------------------------------

    def obituaries(self, names: Sequence[str]) -> dict[str, Obituary | None]:
        """Of these servers, none of which is starting."""
        refs = [self.servers[name].obituary.remote() for name in names]
        return dict(zip(names, wait_for(refs, "asking the engines", timeout=10, names=names)))

    def raise_if_dead(self, what: str = "", patience: float = 0.0) -> None:
        """Raise a `RunFailed` when a server process has ended that should run, for errors that this would explain.

        Args:
            what: was being done, for the message.
            patience: seconds that its end may take.
        """
        numbers = {name: self.restartable(name) for name in self.servers}
        names = [name for name, number in numbers.items() if number is None or number in self.serving]
        tolerant, end = self.config.fault_tolerance.use_fault_tolerance, time.monotonic() + patience
        while True:
            for name, obituary in self.obituaries(names).items():
                raise_obituary(name, obituary, tolerant=tolerant, what=what)
            if time.monotonic() >= end:
                return
            time.sleep(_LOOK_SECONDS)

    def watch(self, judge: Callable[[str, Obituary | None], None] = raise_obituary) -> Watch:
        """Hears soon of a server process that has ended.

        Args:
            judge: called with its name and obituary; by default raises a `RunFailed`.
        """
        return Watch(self.servers, "obituary", judge)

    # -- restart: take_out ─► begin_restart ─► take_in ─► (push) ─► put_behind_router ---------------------------

    def restartable(self, name: str) -> int | None:
        """The number of the engine that ``name`` is (a part of), if it can be restarted: one of the policy's that
        answers alone. Prefill and decode servers are on their router's command line."""
        for part in self.parts:
            if part.name == name and part.model.is_policy and part.group.worker_type not in _PAIR:
                return part.place.number
        return None

    def names_of(self, number: int) -> list[str]:
        """Of the parts of an engine."""
        return [part.name for part in self.parts if part.place.number == number]

    def take_out(self, number: int) -> str:
        """An engine is dead: end what is left of it, and no request goes there any more. Returns its last log lines."""
        url = self.serving.pop(number)
        self._memory.forget(url)
        self._drop_fleet()
        names = self.names_of(number)
        killed = [self.servers[name].kill.remote() for name in names]
        try:
            asyncio.run(remove_worker(self.router_url, url, _ROUTER_SECONDS))
        except EngineError as error:  # the router goes on sending requests there, which fail and are sent again
            logger.warning("engine-%d is still behind the router: %s", number, error)
        return str(wait_for(killed, "ending a dead engine", _KILL_SECONDS, names=names)[0])

    def begin_restart(self, number: int) -> dict[str, ray.ObjectRef]:
        """Start it again on its slots, with other ports; a reference by name for each part, whose values are URLs."""
        return self._begin_start([part for part in self.parts if part.place.number == number])

    def take_in(self, number: int, urls: Sequence[str]) -> None:
        """It runs again: pushes and memory are its business too from now on, requests not yet.

        Args:
            urls: of its parts.
        """
        self.part_urls |= dict(zip(self.names_of(number), urls, strict=True))
        self.serving = dict(sorted({**self.serving, number: urls[0]}.items()))
        self._drop_fleet()

    def put_behind_router(self, number: int) -> None:
        """It has the current weights: requests may come.

        Raises:
            EngineError: the router does not take it.
        """
        asyncio.run(register_workers(self.router_url, [self.serving[number]], timeout=_JOIN_ROUTER_SECONDS))

    def release_memory_of(self, number: int, tags: Sequence[str]) -> None:
        """`release_memory` of one engine that has just started."""
        with self._naming_engines("giving memory up"):
            fleet = EngineFleet([self.serving[number]])
            try:
                fleet.flush_cache(_IDLE_SECONDS)  # the first token, by which it showed that it runs
                self._memory.release(fleet, tags)
            finally:
                fleet.close()

    def _drop_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None

    def close(self, timeout: float) -> None:
        for fleet in (self._fleet, self._others):
            if fleet is not None:
                fleet.close()
        actors = list(self.servers.values())
        refs = [actor.stop.remote() for actor in actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in actors:
            ray.kill(actor, no_restart=True)
