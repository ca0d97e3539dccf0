"""Engines and their router as Ray actors that own the server processes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray

from slime.cluster.engine_placement import EnginePart, engine_parts
from slime.cluster.hand_over import CACHE, GRAPHS, WEIGHTS
from slime.cluster.placement import Slots
from slime.cluster.plan import PlacementPlan
from slime.cluster.ports import PortReservation, node_ip, reserve_port
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.cluster.waiting import Watch, wait_for
from slime.config import Config
from slime.errors import RunFailed, UserError
from slime.observe.log import get_logger, log_to_file_only
from slime.rollout.engines.api import EngineError
from slime.rollout.engines.sglang.groups import ServedModel
from slime.weights.engine_fleet import EngineFleet
from slime.weights.transport import EngineSlots

logger = get_logger(__name__)

_COLOCATED_SHARE = 0.2
_PORT_TRIES = 5
_PAIR = ("prefill", "decode")
_ALL_MEMORY = [CACHE, WEIGHTS, GRAPHS]
_IDLE_SECONDS = 10.0  # for requests that were aborted to end
_MEMORY_SECONDS = 300.0  # a copy of the weights to the host or back, and the end of the last requests


class DisaggregatedWorkers(NamedTuple):
    """Prefill servers with their bootstrap ports, and decode servers."""

    prefill: list[tuple[str, int]]
    decode: list[str]


class EngineActor:
    """Owns one engine server process, or the router. The process dies with this actor."""

    def __init__(
        self, config: Config, name: str, run_path: Path, num_threads: int, part: EnginePart | None = None
    ) -> None:
        self.config, self.name, self.num_threads, self.part = config, name, num_threads, part
        self.log_path = run_path / "logs" / f"{name}.log"
        self._process: ServerProcess | None = None
        self._port: PortReservation | None = None
        self._held: list[PortReservation] = []
        self._bootstrap_port: int | None = None
        log_to_file_only(config, name, run_path / "logs")

    def rendezvous(self) -> str:
        """host:port where the nodes of this engine meet; held until the engine is stopped."""
        host = node_ip()
        self._held.append(reserve_port(host))
        return f"{host}:{self._held[-1].port}"

    def start(self, model_path: str, dist_init_addr: str | None = None) -> str:
        """Start the engine server; returns its base URL once it answers.

        Args:
            dist_init_addr: where the nodes of an engine meet that has several.
        Raises:
            UserError: it did not come up; carries its last log lines.
        """
        from slime.rollout.engines.launch import LaunchSpec, embedded_command, sglang_command

        host = node_ip()

        def sglang(port: int) -> LaunchSpec:
            assert self.part is not None
            self._held.append(reserve_port(host))
            place = dataclasses.replace(
                self.part.place,
                nccl_port=self._held[-1].port,
                dist_init_addr=dist_init_addr,
                overrides={**self.part.place.overrides, **self._disaggregation(host)},
            )
            return sglang_command(self.config, model_path, host, port, place)

        if self.config.engine.rollout_engine == "sglang":
            return self._serve(sglang, host)
        assert self.part is not None
        number = self.part.place.number
        return self._serve(lambda port: embedded_command(self.config, model_path, host, port, number), host)

    def bootstrap_port(self) -> int | None:
        """Where decode servers fetch the cache of this prefill server; None for servers of another kind."""
        return self._bootstrap_port

    def _disaggregation(self, host: str) -> dict[str, Any]:
        """Options of a prefill or decode server."""
        kind = self.part.group.worker_type if self.part is not None else "regular"
        if kind not in ("prefill", "decode"):
            return {}
        if kind == "decode":
            return {"disaggregation_mode": kind}
        self._held.append(reserve_port(host))
        self._bootstrap_port = self._held[-1].port
        return {"disaggregation_mode": kind, "disaggregation_bootstrap_port": self._bootstrap_port}

    def start_router(self, worker_urls: list[str], pairs: DisaggregatedWorkers | None = None) -> str:
        from slime.rollout.engines.launch import disaggregated_router_command, router_command
        from slime.rollout.router import register_workers

        host = node_ip()
        if pairs is not None:
            return self._serve(lambda port: disaggregated_router_command(self.config, host, port, *pairs), host)
        url = self._serve(lambda port: router_command(self.config, host, port, worker_urls), host)
        policy = self.config.engine.router.get("policy") or "cache_aware"
        asyncio.run(register_workers(url, worker_urls, timeout=60.0, policy=policy))
        return url

    def _serve(self, make_spec: Callable, host: str) -> str:
        for attempt in range(_PORT_TRIES):
            self._port = reserve_port(host)
            url = f"http://{host}:{self._port.port}"
            spec = make_spec(self._port.port)
            spec = dataclasses.replace(spec, env={**spec.env, "OMP_NUM_THREADS": str(self.num_threads)})
            self._process = ServerProcess(self.name, spec, url, self.log_path)
            self._process.start()
            try:
                self._process.wait_ready()
                return url
            except ServerDied as died:
                self._give_ports_back()
                if died.is_port_clash and attempt + 1 < _PORT_TRIES:
                    logger.warning("%s: one of its ports was taken meanwhile, trying others", self.name)
                    continue
                raise UserError(
                    f"{died.name} {died.what}",
                    why=f"last lines of {self.log_path}:\n{_indent(died.log_tail)}",
                    fix="read the log; on out of memory lower --sglang-mem-fraction-static",
                ) from died
        raise AssertionError("unreachable")

    def obituary(self) -> tuple[str, str] | None:
        """How the server process ended and its last log lines; None while it lives."""
        assert self._process is not None, "start comes first"
        if self._process.is_alive():
            return None
        return self._process.how_it_ended(), self._process.log_tail()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._give_ports_back()

    def _give_ports_back(self) -> None:
        for reservation in [*([self._port] if self._port is not None else []), *self._held]:
            reservation.release()
        self._port, self._held = None, []


def _router_name(model: ServedModel) -> str:
    return "router" if model.is_policy else f"router-{model.name}"


def _raise_obituary(name: str, obituary: tuple[str, str] | None) -> None:
    if obituary is None:
        return
    how, log_tail = obituary
    raise RunFailed(
        f"{name} {how}",
        why=f"last lines of its log:\n{_indent(log_tail)}",
        fix="1. --use-fault-tolerance  2. a higher --sglang-mem-fraction-static  3. a smaller --rollout-batch-size"
        "  4. --sglang-disable-cuda-graph, to find the cause",
    )


def _indent(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())


class EngineGroup:
    """All engines of a run, and a router in front of those of each model.

    Attributes:
        parts: what was started where; an engine over several nodes has a part on each.
        urls: base URLs of the policy's engines, one each, once they run.
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
        self.urls: list[str] = []
        self.router_urls: dict[str, str] = {}
        self.servers = dict(zip(self.names, self.engines))
        self.servers |= {_router_name(self._models[name]): router for name, router in self._routers.items()}
        self._fleet: EngineFleet | None = None
        self._others: EngineFleet | None = None
        self._paused = False

    @property
    def router_url(self) -> str:
        return self.router_urls[self._policy]

    @property
    def fleet(self) -> EngineFleet:
        """Connections to the policy's engines, past the router."""
        if self._fleet is None:
            self._fleet = EngineFleet(self.urls)
        return self._fleet

    @property
    def answers_alone(self) -> bool:
        """Whether an engine can generate by itself; prefill and decode servers only do in pairs, behind the router."""
        return all(part.group.worker_type not in _PAIR for part in self.parts if part.model.is_policy)

    @property
    def layout(self) -> list[EngineSlots]:
        """Which slots the ranks of each of the policy's engines stand on, in the order of ``urls``."""
        slots: dict[int, tuple[int, ...]] = {}
        for part in self.parts:
            slots[part.place.number] = (*slots.get(part.place.number, ()), *part.slots)
        firsts = [part for part in self.parts if part.is_first and part.model.is_policy]
        return [EngineSlots(url, slots[part.place.number]) for url, part in zip(self.urls, firsts, strict=True)]

    def begin_start(self, model_path: str) -> dict[str, ray.ObjectRef]:
        """Start all engines at once; a reference by name for each, whose values go to `put_router_in_front`."""
        meeting: dict[int, Any] = {}
        refs = {}
        for part, engine in zip(self.parts, self.engines):
            number = part.place.number
            if part.place.num_nodes > 1 and part.is_first:
                meeting[number] = engine.rendezvous.remote()  # resolved by Ray before the others' `start` runs
            refs[part.name] = engine.start.remote(model_path, meeting.get(number))
        return refs

    def put_routers_in_front(self, urls: list[str], should_stop: Callable[[], bool]) -> None:
        """Args: urls: what the references of `begin_start` held, in their order."""
        started = [self._begin_router(name, urls, should_stop) for name in self._routers]
        names = [_router_name(model) for model in self._models.values()]
        self.router_urls = dict(zip(self._routers, wait_for(started, "starting", 120, should_stop, names=names)))
        self.urls = self._urls_of(urls, self._policy)
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
        """Have every engine give up what is tagged, once it has ended its last request.

        Raises:
            RunFailed: an engine refused or did not answer.
        """
        with self._naming_engines("giving memory up"):
            fleet = self.fleet
            try:
                fleet.flush_cache(_IDLE_SECONDS)
            except EngineError as error:
                # a rollout that was given up still sends requests; on memory that is gone they would kill the engine
                logger.warning("engines are paused, because they are not idle: %s", error)
                fleet.post("/pause_generation", {"mode": "abort"}, _MEMORY_SECONDS)
                self._paused = True
                fleet.flush_cache(_MEMORY_SECONDS)
            fleet.post("/release_memory_occupation", {"tags": list(tags)}, _MEMORY_SECONDS)
            if self._others is not None and CACHE in tags:
                self._others.flush_cache(_MEMORY_SECONDS)
                self._others.post("/release_memory_occupation", {"tags": _ALL_MEMORY}, _MEMORY_SECONDS)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Have every engine take memory for what is tagged; the contents are those of before or none.

        Models other than the policy take part in no push: they give and take all at once, with the caches.
        """
        with self._naming_engines("taking memory back"):
            self.fleet.post("/resume_memory_occupation", {"tags": list(tags)}, _MEMORY_SECONDS)
            if self._others is not None and CACHE in tags:
                self._others.post("/resume_memory_occupation", {"tags": _ALL_MEMORY}, _MEMORY_SECONDS)
            if self._paused and CACHE in tags:
                self.fleet.post("/continue_generation", {}, _MEMORY_SECONDS)
                self._paused = False

    @contextmanager
    def _naming_engines(self, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            raise RunFailed(
                f"{what}: {error}",
                why="trainer and engines share GPUs and take turns; the next phase would run out of memory",
                fix="read the engine's log; on out of memory lower --sglang-mem-fraction-static",
            ) from error

    # -- death -----------------------------------------------------------------------------------------

    def raise_if_dead(self) -> None:
        """Raise a `RunFailed` when a server process has ended; answers now, for errors that this would explain."""
        refs = [actor.obituary.remote() for actor in self.servers.values()]
        names = list(self.servers)
        for name, obituary in zip(names, wait_for(refs, "asking the engines", timeout=10, names=names)):
            _raise_obituary(name, obituary)

    def watch(self) -> Watch:
        """Raises a `RunFailed` soon after a server process has ended."""
        return Watch(self.servers, "obituary", _raise_obituary)

    def close(self, timeout: float) -> None:
        for fleet in (self._fleet, self._others):
            if fleet is not None:
                fleet.close()
        actors = list(self.servers.values())
        refs = [actor.stop.remote() for actor in actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in actors:
            ray.kill(actor, no_restart=True)
