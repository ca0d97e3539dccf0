"""The actor that owns the server process of an engine or router, and the driver's handle of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ray

from slime import deadlines
from slime.cluster.placement import EnginePart
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.cluster.waiting import NamedActor, Process, this_process
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import EngineError
from slime.engines.keys import RunKeys
from slime.engines.kinds import engine_of
from slime.engines.launch import LaunchSpec
from slime.engines.router import disaggregated_router_command, register_workers, router_command
from slime.errors import RunFailed, UserError
from slime.log import get_logger, log_to_file_only
from slime.processes.footprint import Footprint
from slime.processes.host import PortReservation, reserve_port

logger = get_logger(__name__)

_PORT_TRIES = 5


class DisaggregatedWorkers(NamedTuple):
    """Prefill servers with their bootstrap ports, and decode servers."""

    prefill: list[tuple[str, int]]
    decode: list[str]


class ServerExit(NamedTuple):
    """The end of a server process.

    Attributes:
        how: for messages: "was killed (SIGKILL)".
        log_tail: the last lines of its log.
        exception: the log line of the exception that ended it; "" if there is none.
    """

    how: str
    log_tail: str
    url: str
    exception: str = ""
    pid: int | None = None

    @property
    def why(self) -> str:
        return _log_excerpt(self.exception, self.log_tail, "its log")


class EngineActor:
    """Owns the process of one engine server or router. The process dies with this actor.

    Args:
        run_keys: API keys; the server requires the run's own, also after a restart.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        run_path: Path,
        num_threads: int,
        hosts: Sequence[str],
        run_keys: RunKeys,
        part: EnginePart | None = None,
    ) -> None:
        keys.set_run_keys(run_keys)
        self._run_keys = run_keys
        self.config = config
        self.name = name
        self.num_threads = num_threads
        self.hosts = hosts
        self.part = part
        self.log_path = run_path / "logs" / f"{name}.log"
        self._process: ServerProcess | None = None
        self._footprint = Footprint()
        self._port: PortReservation | None = None
        self._held: list[PortReservation] = []
        self._bootstrap_port: int | None = None
        log_to_file_only(name, run_path / "logs", config.observe.log_level)

    def process(self) -> Process:
        return this_process()

    def memory(self) -> float:
        """Return GB of unshared host memory of the server's processes; 0 if it does not run."""
        pid = self._process.pid if self._process is not None and self._process.is_alive() else None
        return self._footprint.gigabytes(pid) if pid is not None else 0.0

    def rendezvous(self) -> str:
        """Reserve and return host:port where the nodes of this engine meet."""
        host = ray.util.get_node_ip_address()
        self._held.append(reserve_port(host))
        return f"{host}:{self._held[-1].port}"

    def start(self, model_path: str, dist_init_addr: str | None = None) -> str:
        """Start the engine server; returns its base URL once it answers.

        Args:
            dist_init_addr: rendezvous address of a multi-node engine.
        Raises:
            UserError: the server did not start; includes its last log lines.
        """
        if self._process is not None and self._process.is_alive():
            self._process.stop(grace=0)  # the engine's part on another node did not come up
        host = ray.util.get_node_ip_address()

        def spec(port: int) -> LaunchSpec:
            assert self.part is not None
            self._held.append(reserve_port(host))
            place = dataclasses.replace(
                self.part.place,
                nccl_port=self._held[-1].port,
                dist_init_addr=dist_init_addr,
                overrides={**self.part.place.overrides, **self._disaggregation(host)},
            )
            return engine_of(self.config).command(self.config, model_path, host, port, place)

        return self._serve(spec, host)

    def bootstrap_port(self) -> int | None:
        """Return the port where decode servers fetch this prefill server's cache, else None."""
        return self._bootstrap_port

    def _disaggregation(self, host: str) -> dict[str, Any]:
        kind = self.part.group.worker_type if self.part is not None else "regular"
        if kind not in ("prefill", "decode"):
            return {}
        if kind == "decode":
            return {"disaggregation_mode": kind}
        self._held.append(reserve_port(host))
        self._bootstrap_port = self._held[-1].port
        return {"disaggregation_mode": kind, "disaggregation_bootstrap_port": self._bootstrap_port}

    def start_router(
        self,
        worker_urls: list[str],
        external: list[str],
        pairs: DisaggregatedWorkers | None = None,
        port: int | None = None,
    ) -> str:
        keys.register_own(*worker_urls)
        keys.register_external(*external)
        host = ray.util.get_node_ip_address()
        if pairs is not None:
            return self._serve(
                lambda port: disaggregated_router_command(self.config, host, port, *pairs),
                host,
                port,
            )
        policy = self.config.engine.router.get("policy") or "cache_aware"
        for is_last in (not self.config.fault_tolerance.use_fault_tolerance, True):
            url = self._serve(
                lambda port: router_command(self.config, host, port, worker_urls), host, port
            )
            assert self._process is not None
            try:
                asyncio.run(
                    register_workers(
                        url, worker_urls, timeout=deadlines.ROUTER_STARTUP, policy=policy
                    )
                )
                return url
            except EngineError:
                if not self._process.ends_within(deadlines.ENGINE_ACTOR_ROUTER_EXIT):
                    raise
            server_exit = self.kill(self._process.how_it_ended())
            if is_last:
                raise_server_exit(
                    self.name, server_exit, [], what="putting engines behind the router"
                )
            logger.warning(
                "%s %s and is started again", with_pid(self.name, server_exit.pid), server_exit.how
            )
        raise AssertionError("unreachable")

    def _serve(self, make_spec: Callable, host: str, port: int | None = None) -> str:
        for attempt in range(_PORT_TRIES):
            self._port = reserve_port(host, port)
            url = f"http://{host}:{self._port.port}"
            spec = make_spec(self._port.port)
            env = {"OMP_NUM_THREADS": str(self.num_threads), keys.VARIABLE: self._run_keys.own}
            spec = dataclasses.replace(spec, env={**spec.env, **env})
            keys.register_own(url)
            self._process = ServerProcess(self.name, spec, url, self.log_path, self.hosts)
            self._process.start()
            try:
                self._process.wait_ready()
                return url
            except ServerDied as died:
                self._release_ports()
                if died.is_port_clash and attempt + 1 < _PORT_TRIES:
                    logger.warning(
                        "%s: one of its ports was taken meanwhile, trying others", self.name
                    )
                    continue
                fix = "read the log"
                if self.part is not None:
                    remedies = engine_of(self.config).if_out_of_memory
                    fix += f"; on out of memory {' or '.join(remedies)}"
                raise UserError(
                    f"{died.name} {died.what}",
                    why=_log_excerpt(
                        self._process.exception_line(), died.log_tail, str(self.log_path)
                    ),
                    fix=fix,
                ) from died
        raise AssertionError("unreachable")

    def server_exit(self) -> ServerExit | None:
        """Return how the server process ended; None while it lives."""
        assert self._process is not None, "start comes first"
        if self._process.is_alive():
            return None
        return self._server_exit(self._process.how_it_ended())

    def kill(self, how: str) -> ServerExit:
        """Kill what is left of the server and its children, so that another can `start`."""
        assert self._process is not None, "start comes first"
        self._process.stop(grace=0)
        self._release_ports()
        return self._server_exit(how)

    def _server_exit(self, how: str) -> ServerExit:
        assert self._process is not None
        process = self._process
        return ServerExit(
            how, process.log_tail(), process.url, process.exception_line(), process.pid
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._release_ports()

    def _release_ports(self) -> None:
        for reservation in [*([self._port] if self._port is not None else []), *self._held]:
            reservation.release()
        self._port = None
        self._held = []


class EngineHandle:
    """The driver's handle of an `EngineActor`; all methods except `end` return refs to the answers.

    The actor, not the server process, answers: at once, except during a start.

    Args:
        options: Ray options with slot and share.
        hosts: hosts of the run's other servers.
        run_keys: API keys; its server requires the run's own.
        part: None for a router.

    Attributes:
        worker: names the actor in messages and waits.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        run_path: Path,
        num_threads: int,
        options: Mapping[str, Any],
        hosts: Sequence[str],
        run_keys: RunKeys,
        part: EnginePart | None = None,
    ) -> None:
        actor: Any = ray.remote(EngineActor)  # Ray's types do not know the remote methods
        given = config, name, run_path, num_threads, hosts, run_keys, part
        self._actor = actor.options(max_restarts=0, **options).remote(*given)
        self.worker = NamedActor(name, self._actor.process.remote())

    def memory(self) -> ray.ObjectRef:
        return self._actor.memory.remote()

    def rendezvous(self) -> ray.ObjectRef:
        return self._actor.rendezvous.remote()

    def begin_start(self, model_path: str, dist_init_addr: ray.ObjectRef | None) -> ray.ObjectRef:
        """Start the server; the answer is its URL, once it serves.

        Args:
            dist_init_addr: ref to the `rendezvous` of the engine's first node.
        """
        return self._actor.start.remote(model_path, dist_init_addr)

    def begin_router(
        self,
        worker_urls: list[str],
        external: list[str],
        pairs: DisaggregatedWorkers | None,
        port: int | None = None,
    ) -> ray.ObjectRef:
        """Start the router with its workers; the answer is its URL.

        Args:
            external: the workers that were started outside the run.
            port: its former port, if it is started again.
        """
        return self._actor.start_router.remote(worker_urls, external, pairs, port)

    def bootstrap_port(self) -> ray.ObjectRef:
        return self._actor.bootstrap_port.remote()

    def server_exit(self) -> ray.ObjectRef:
        """The answer is a `ServerExit`, or None while the server lives."""
        return self._actor.server_exit.remote()

    def kill(self, how: str) -> ray.ObjectRef:
        """Kill the server; the answer is a `ServerExit` that says ``how``."""
        return self._actor.kill.remote(how)

    def stop(self) -> ray.ObjectRef:
        return self._actor.stop.remote()

    def end(self) -> None:
        """Kill the actor, and with it what is left of its server."""
        ray.kill(self._actor, no_restart=True)


def with_pid(name: str, pid: int | None) -> str:
    return name if pid is None else f"{name} (pid {pid})"


def raise_server_exit(
    name: str, server_exit: ServerExit, remedies: Sequence[str], *, what: str = ""
) -> NoReturn:
    """End the run because a server has ended.

    Args:
        what: the operation in progress ("taking memory back").
    Raises:
        RunFailed: always.
    """
    raise RunFailed(
        f"{what}{': ' if what else ''}{with_pid(name, server_exit.pid)} {server_exit.how}",
        why=server_exit.why,
        fix="  ".join(f"{number}. {remedy}" for number, remedy in enumerate(remedies, 1)),
    )


def _log_excerpt(exception: str, tail: str, log: str) -> str:
    first = f"{exception}\n       " if exception else ""
    shown = "\n".join(f"      {line}" for line in tail.splitlines())
    return f"{first}last lines of {log}:\n{shown}"
