"""Engines and their router as Ray actors that own the server processes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime.cluster.placement import Slots
from slime.cluster.plan import PlacementPlan
from slime.cluster.ports import PortReservation, node_ip, reserve_port
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.cluster.waiting import Watch, wait_for
from slime.config import Config
from slime.errors import RunFailed, UserError
from slime.observe.log import get_logger, log_to_file_only

logger = get_logger(__name__)

_COLOCATED_SHARE = 0.2
_PORT_TRIES = 5


class EngineActor:
    """Owns one engine server process, or the router. The process dies with this actor."""

    def __init__(self, config: Config, name: str, run_path: Path, num_threads: int) -> None:
        self.config, self.name, self.num_threads = config, name, num_threads
        self.log_path = run_path / "logs" / f"{name}.log"
        self._process: ServerProcess | None = None
        self._port: PortReservation | None = None
        log_to_file_only(config, name, run_path / "logs")

    def start(self, model_path: str) -> str:
        """Start the engine server; returns its base URL once it answers.

        Raises:
            UserError: it did not come up; carries its last log lines.
        """
        from slime.rollout.engines.launch import embedded_command, sglang_command

        kind = self.config.engine.rollout_engine
        command = sglang_command if kind == "sglang" else embedded_command
        host = node_ip()
        return self._serve(lambda port: command(self.config, model_path, host, port), host)

    def start_router(self, worker_urls: list[str]) -> str:
        from slime.rollout.engines.launch import router_command
        from slime.rollout.router import register_workers

        host = node_ip()
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
                self._port.release()
                if died.is_port_clash and attempt + 1 < _PORT_TRIES:
                    logger.warning("%s: port %d was taken meanwhile, trying another", self.name, self._port.port)
                    continue
                raise UserError(
                    f"{died.name} {died.what}",
                    why=f"last lines of {self.log_path}:\n{_indent(died.log_tail)}",
                    fix="read the log; on out of memory lower --sglang-mem-fraction-static",
                    check_id="engine-start",
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
        if self._port is not None:
            self._port.release()
            self._port = None


def _raise_obituary(name: str, obituary: tuple[str, str] | None) -> None:
    if obituary is None:
        return
    how, log_tail = obituary
    raise RunFailed(
        f"{name} {how}",
        why=f"last lines of its log:\n{_indent(log_tail)}",
        fix="1. --use-fault-tolerance  2. a higher --sglang-mem-fraction-static  3. a smaller --rollout-batch-size"
        "  4. --sglang-disable-cuda-graph, to find the cause",
        check_id="engine-died",
    )


def _indent(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())


class EngineGroup:
    """All engines of a run, and the router in front of them."""

    def __init__(self, config: Config, plan: PlacementPlan, slots: Slots, run_path: Path, num_threads: int) -> None:
        share = _COLOCATED_SHARE if config.cluster.colocate else 1.0
        actor: Any = ray.remote(EngineActor)  # Ray makes the methods remote; its types do not say so
        self.config, self.plan = config, plan
        self.engines = [
            actor.options(
                max_restarts=0, **slots.options(plan.rollout_offset + i * plan.slots_per_engine, share)
            ).remote(config, f"engine-{i}", run_path, num_threads)
            for i in range(plan.num_engines)
        ]
        first_slots = range(plan.rollout_offset, plan.rollout_offset + plan.num_rollout, plan.slots_per_engine)
        self.nodes = {slots.places[slot].node for slot in first_slots}
        self._router = actor.options(num_cpus=0, max_restarts=0).remote(config, "router", run_path, 1)
        self.urls: list[str] = []
        self.router_url = ""
        self.names = [f"engine-{i}" for i in range(plan.num_engines)]
        self.servers = dict(zip(self.names, self.engines)) | {"router": self._router}

    def begin_start(self, model_path: str) -> dict[str, ray.ObjectRef]:
        """Start all engines at once; a reference by name for each, whose values go to `put_router_in_front`."""
        return {name: engine.start.remote(model_path) for name, engine in zip(self.names, self.engines)}

    def put_router_in_front(self, urls: list[str], should_stop: Callable[[], bool]) -> None:
        self.urls = urls
        ref = self._router.start_router.remote(urls)
        [self.router_url] = wait_for([ref], "starting", 120, should_stop, names=["router"])
        logger.info("%d engine(s) behind %s", len(urls), self.router_url)

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
        actors = list(self.servers.values())
        refs = [actor.stop.remote() for actor in actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in actors:
            ray.kill(actor, no_restart=True)
