"""The routers in front of each model's engines. With --use-fault-tolerance a dead router is
restarted at its old address, which all clients know."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import ray

from slime import deadlines
from slime.cluster.engine_actor import (
    DisaggregatedWorkers,
    EngineHandle,
    ServerExit,
    raise_server_exit,
    with_pid,
)
from slime.cluster.engine_table import MAX_RESTARTS
from slime.cluster.placement import PAIR, EnginePart
from slime.cluster.waiting import wait_for
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.health import HealthChecks
from slime.engines.keys import RunKeys
from slime.engines.launch import ServedModel
from slime.engines.router import LIVENESS_PATH, register_workers, remove_worker, workers_at_start
from slime.errors import RunFailed
from slime.log import get_logger

logger = get_logger(__name__)


class Routers:
    """The routers of a run, one per model.

    Args:
        models: by name.
        parts: all parts of the run's own engines; handles: the handles of their actors, by name.
        hosts: hosts of the run's servers.
        run_keys: API keys; routers require the run's own.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.

    Attributes:
        urls: by model.
        handles: handles of the routers' actors, by model.
    """

    def __init__(
        self,
        config: Config,
        models: Mapping[str, ServedModel],
        parts: Sequence[EnginePart],
        handles: Mapping[str, EngineHandle],
        run_path: Path,
        hosts: Sequence[str],
        run_keys: RunKeys,
        should_stop: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._engines = handles
        self._should_stop = should_stop
        self._config = config
        self._models = models
        self.handles: dict[str, EngineHandle] = {}
        for name, model in models.items():
            router = "router" if model.is_policy else f"router-{model.name}"
            self.handles[name] = EngineHandle(
                config, router, run_path, 1, {"num_cpus": 0}, hosts, run_keys
            )
        self.urls: dict[str, str] = {}
        tolerant = config.fault_tolerance.use_fault_tolerance
        self._health = HealthChecks.of(config, path=LIVENESS_PATH) if tolerant else None
        self._fleet: EngineFleet | None = None
        # process of each router's last death, which may be reported twice
        self._last_pid: dict[str, int | None] = {}
        self._deaths: Counter[str] = Counter()
        self._restarts = 0

    @property
    def url(self) -> str:
        """URL of the policy's router."""
        return next(self.urls[name] for name, model in self._models.items() if model.is_policy)

    def start(self, url_of: Mapping[str, str], on_poll: Callable[[], None]) -> None:
        """Start all routers, given the URL of each engine part by name.

        Args:
            on_poll: called while waiting; raises if an engine has ended.
        Raises:
            RunFailed: an engine is not healthy in time. Also what ``on_poll`` raises.
        """
        asked = {router.worker: self._begin(name, url_of) for name, router in self.handles.items()}
        try:
            urls = wait_for(asked, "starting", deadlines.ROUTERS_START, self._should_stop, on_poll)
        except EngineError as error:
            raise RunFailed(
                f"putting engines behind the router: {error}",
                why="the router asks each engine for /health, and these did not answer",
                fix="read the logs of these engines; py-spy dump shows where one hangs",
            ) from error
        self.urls = dict(zip(self.handles, urls))
        keys.register_own(*self.urls.values())
        for name, url in self.urls.items():
            logger.info(
                "%d engine(s) of %s behind %s", len(self._worker_urls(name, url_of)), name, url
            )

    def _first_parts(self, model: str, kind: str | None = None) -> list[str]:
        return [
            part.name
            for part in self._parts
            if part.is_first and part.model.name == model and kind in (None, part.group.worker_type)
        ]

    def _worker_urls(self, model: str, url_of: Mapping[str, str]) -> list[str]:
        """Return the URLs of the model's engines; external engines belong to the policy."""
        own = {part.name for part in self._parts}
        if self._models[model].is_policy:
            external = [url for name, url in url_of.items() if name not in own]
        else:
            external = []
        return [url_of[name] for name in self._first_parts(model) if name in url_of] + external

    def _begin(
        self, model: str, url_of: Mapping[str, str], port: int | None = None
    ) -> ray.ObjectRef:
        prefill, decode = (self._first_parts(model, kind) for kind in PAIR)
        pairs = None
        if prefill:
            asked = {
                self._engines[name].worker: self._engines[name].bootstrap_port() for name in prefill
            }
            ports = wait_for(
                asked, "asking for bootstrap ports", deadlines.ROUTERS_ACTOR_CALL, self._should_stop
            )
            pairs = DisaggregatedWorkers(
                [(url_of[name], port) for name, port in zip(prefill, ports)],
                [url_of[name] for name in decode],
            )
        behind = self._worker_urls(model, url_of)
        return self.handles[model].begin_router(
            behind, list(filter(keys.is_external, behind)), pairs, port
        )

    # -- workers of the policy's router ------------------------------------------------------------

    def remove_worker(self, url: str) -> None:
        """Send this engine no more requests. Raises EngineError if the router refuses or hangs."""
        asyncio.run(remove_worker(self.url, url, deadlines.ROUTERS_REMOVE_WORKER))

    def add_worker(self, url: str) -> None:
        """Send requests to this engine. Raises EngineError if the router refuses or hangs."""
        asyncio.run(register_workers(self.url, [url], timeout=deadlines.ROUTERS_ADD_WORKER))

    # -- death and restart -------------------------------------------------------------------------

    @property
    def can_restart(self) -> bool:
        return self._health is not None

    def is_current_process(self, name: str, server_exit: ServerExit) -> bool:
        """Return whether this is the end of the router's current process, not a late report."""
        return name not in self._last_pid or server_exit.pid != self._last_pid[name]

    def start_again(
        self, name: str, how: str, serving: Callable[[], Mapping[str, str]]
    ) -> list[str]:
        """Kill the rest of a router and restart it.

        Clients retry their requests meanwhile, and weight pushes do not use the router.

        Args:
            name: name of its actor; how: how it ended.
            serving: returns name → URL of the engines to put behind it; called once the old router
                is gone.
        Returns:
            URLs of the engines that it does not accept.
        Raises:
            RunFailed: there were too many deaths since the last completed rollout.
            UserError: it does not start.
        """
        model = next(model for model, router in self.handles.items() if router.worker.name == name)
        router = self.handles[model]
        url = self.urls[model]
        began = time.monotonic()
        [server_exit] = wait_for(
            {router.worker: router.kill(how)}, "ending a dead router", deadlines.ROUTERS_ACTOR_CALL
        )
        self._last_pid[name] = server_exit.pid
        self._deaths[name] += 1
        if self._deaths[name] > MAX_RESTARTS:
            times = (
                f"died {self._deaths[name]} times without a completed rollout in between; the last "
                f"time it {how}"
            )
            raise_server_exit(name, server_exit._replace(how=times), [])
        url_of = serving()
        late = [] if self._starts_with_workers(model, url_of) else self._worker_urls(model, url_of)
        asked = {router.worker: self._begin(model, {} if late else url_of, urlsplit(url).port)}
        wait_for(asked, "starting the router again", deadlines.ROUTERS_START, self._should_stop)
        refused = self._register_late(url, late)
        self._restarts += 1
        if self._health is not None:
            self._health.begin()  # the former process no longer answers its checks
        logger.warning(
            "%s %s; it was started again within %.1f s at its old address, %s",
            with_pid(name, server_exit.pid),
            how,
            time.monotonic() - began,
            url,
        )
        return refused

    def _starts_with_workers(self, model: str, url_of: Mapping[str, str]) -> bool:
        """Return whether the workers are on the router's command line."""
        policy = self._config.engine.router.get("policy") or "cache_aware"
        return bool(
            self._first_parts(model, PAIR[0])
            or workers_at_start(policy, self._worker_urls(model, url_of))
        )

    def _register_late(self, url: str, engines: Iterable[str]) -> list[str]:
        """Register engines with a running router; return those that it does not accept."""

        async def put(engine: str) -> str:
            try:
                await register_workers(url, [engine], timeout=deadlines.ROUTERS_ADD_WORKER_AGAIN)
            except EngineError as error:
                logger.warning("%s", error)
                return engine
            return ""

        async def put_all() -> list[str]:
            return [engine for engine in await asyncio.gather(*map(put, engines)) if engine]

        return asyncio.run(put_all())

    def hanging(self) -> dict[str, str]:
        """Return the routers that hang, with the reason, without waiting."""
        if self._health is None:
            return {}
        if self._fleet is None:
            self._fleet = EngineFleet(list(self.urls.values()))
        silent = self._health.silent(self._fleet)
        name_of = {self.urls[model]: router.worker.name for model, router in self.handles.items()}
        return {
            name_of[url]: f"gave no sign of life for {self._health.timeout:.0f} s and was killed"
            for url in silent
        }

    def reset_death_counts(self) -> None:
        """Forget earlier deaths, because a rollout was completed."""
        self._deaths.clear()

    def pop_restarts(self) -> int:
        """Return the number of restarts since the last call."""
        count = self._restarts
        self._restarts = 0
        return count

    def close(self) -> None:
        """Close the connections. `Engines.close` ends the actors."""
        if self._fleet is not None:
            self._fleet.close()
