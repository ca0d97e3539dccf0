"""All engines of a run: their start, the detection of deaths and hangs, and restarts.

`slime.cluster.engine_table` holds the state of each engine, `slime.cluster.gpu_memory` moves their
GPU memory, and `slime.cluster.routers` owns the routers in front of them.

With --use-fault-tolerance an engine that dies, or does not answer for
--rollout-health-check-timeout, is removed from the router and restarted while the others continue.
It returns with the next weight push, between two rollouts. Only if no engine is left does the run
wait for it, even within a rollout, which a push then does not interrupt. Without the flag, and for
engines that cannot be restarted, a death ends the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import ray

from slime import deadlines
from slime.cluster.command_inbox import CommandInbox
from slime.cluster.engine_actor import EngineHandle, ServerExit, raise_server_exit, with_pid
from slime.cluster.engine_fit import external_urls
from slime.cluster.engine_table import MAX_RESTARTS, EngineEntry, State
from slime.cluster.external_engines import ExternalEngines
from slime.cluster.placement import (
    PAIR,
    EnginePart,
    GpuSlots,
    engine_parts,
    initial_engine_table,
    parts_by_number,
)
from slime.cluster.routers import Routers
from slime.cluster.waiting import (
    ActorDied,
    ActorLost,
    DeadlinePassed,
    NamedActor,
    StopRequested,
    Watch,
    all_answered,
    wait_for,
    waiting_for,
)
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import LOADS_PATH, EngineError, is_silent
from slime.engines.fleet import EngineFleet, Fleets
from slime.engines.health import HealthChecks
from slime.engines.kinds import engine_of
from slime.engines.launch import ServedModel
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.placement import PlacementPlan
from slime.weights.transport import EngineSlots

logger = get_logger(__name__)
T = TypeVar("T")

_COLOCATED_SHARE = 0.2


class EngineHostMemory:
    """Host memory of the run's engine servers, as a metric.

    Each server is asked at one step and its answer is read at the next, so nothing waits. A server
    that hangs or died is skipped.
    """

    def __init__(self, handles: Collection[EngineHandle]) -> None:
        self._handles = handles
        self._asked: dict[EngineHandle, ray.ObjectRef] = {}
        self._gigabytes: dict[EngineHandle, float] = {}

    def metrics(self) -> dict[str, float]:
        """Return ``perf/engine_memory_gb``, the largest of the values received so far."""
        for handle in self._handles:
            ref = self._asked.get(handle)
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                continue
            if ref is not None:
                self._gigabytes.pop(handle, None)
                with contextlib.suppress(ray.exceptions.RayError):
                    self._gigabytes[handle] = ray.get(ref)
            self._asked[handle] = handle.memory()
        most = max(self._gigabytes.values(), default=0.0)
        return {"perf/engine_memory_gb": most} if most else {}


class Engines:
    """All engines of a run, and one router per model.

    Args:
        start_seconds: deadline of one engine's start.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.

    Attributes:
        table: the state of each engine.
        external: engines that were started outside the run; also handles engines that join and
            leave.
        keys: API keys of engines and routers, new for each launch.
        nodes: nodes on which the policy's engines run.
        restarts_immediately: restart a dead engine as soon as its death is known. False while the
            trainer uses the GPUs that it shares with engines; then `restart_dead` is called later.
    """

    def __init__(
        self,
        config: Config,
        plan: PlacementPlan,
        slots: GpuSlots,
        run_path: Path,
        num_threads: int,
        start_seconds: float,
        should_stop: Callable[[], bool],
    ) -> None:
        share = _COLOCATED_SHARE if config.cluster.colocate else 1.0
        self.config = config
        self._start_seconds = start_seconds
        self._should_stop = should_stop
        self._parts = engine_parts(config, plan, slots)
        own = self.keys = keys.set_run_keys(keys.RunKeys.new())
        urls = external_urls(config)
        hosts = sorted(
            {*(place.ip for place in slots.places), *(urlsplit(url).hostname or "" for url in urls)}
        )
        self._handles = {
            p.name: EngineHandle(
                config, p.name, run_path, num_threads, slots.options(p.slot, share), hosts, own, p
            )
            for p in self._parts
        }
        self.nodes = {slots.places[part.slot].node for part in self._parts if part.model.is_policy}
        models = {part.model.name: part.model for part in self._parts}
        if not models:  # external engines need a router too
            models = {
                "policy": ServedModel("policy", str(config.checkpoint.hf_checkpoint), True, ())
            }
        self.routers = Routers(
            config, models, self._parts, self._handles, run_path, hosts, self.keys, should_stop
        )
        self.table = initial_engine_table(self._parts, urls)
        turns = config.cluster.colocate and (slots.on_gpu or engine_of(config).releases_without_gpu)
        self.external = ExternalEngines(
            config, self.table, self, CommandInbox(run_path), shares_gpus=turns
        )
        self._stopped = set[str]()  # parts of own engines that left the run
        self._memory = EngineHostMemory(self._handles.values())
        self._tolerant = config.fault_tolerance.use_fault_tolerance
        self.restarts_immediately = True
        self._checking_seconds = 0.0
        self._health = HealthChecks.of(config) if self._tolerant else None
        self._fleets = Fleets(
            self._health.timeout if self._health is not None else None, lambda: self.table.groups
        )

    # -- launch ------------------------------------------------------------------------------------

    def begin_start(self) -> dict[NamedActor, ray.ObjectRef]:
        """Start all engines at once; pass the answers to `start_routers`.

        Raises:
            UserError: an external engine does not answer or does not fit this run.
        """
        self.external.check_named()
        return self._start_parts(self._parts)

    def _start_parts(self, parts: Sequence[EnginePart]) -> dict[NamedActor, ray.ObjectRef]:
        model_path = str(self.config.checkpoint.hf_checkpoint)
        rendezvous: dict[int, ray.ObjectRef] = {}
        asked: dict[NamedActor, ray.ObjectRef] = {}
        for part in parts:
            number = part.place.number
            handle = self._handles[part.name]
            if part.place.num_nodes > 1 and part.is_first:
                rendezvous[number] = handle.rendezvous()
            asked[handle.worker] = handle.begin_start(model_path, rendezvous.get(number))
        return asked

    def start_routers(self, urls: Sequence[str]) -> None:
        """Start the routers, given the answers to `begin_start` in order."""
        keys.register_own(*urls)
        url_of = dict(zip((part.name for part in self._parts), urls, strict=True)) | {
            u: u for u in self.external.named
        }
        for engine in self.table.engines.values():
            self.table.mark_launched(engine.number, [url_of[name] for name in engine.parts])
        deaths = Watch({own.worker: own.server_exit for own in self._handles.values()}, _raise_exit)
        self.routers.start(url_of, deaths.poll)

    @property
    def answers_alone(self) -> bool:
        """Whether each engine can generate by itself: prefill and decode servers cannot."""
        return all(
            part.group.worker_type not in PAIR for part in self._parts if part.model.is_policy
        )

    @property
    def layout(self) -> list[EngineSlots]:
        """Slots of the ranks of each running policy engine."""
        parts = parts_by_number(self._parts)
        slots = {
            number: tuple(slot for part in own for slot in part.slots)
            for number, own in parts.items()
        }
        found = ((engine, slots.get(engine.number, ())) for engine in self.table.policy)
        return [
            EngineSlots(engine.url, own, engine.ranks, keys.key_of(engine.url))
            for engine, own in found
        ]

    @property
    def fleet(self) -> EngineFleet:
        """Direct connections to the running policy engines."""
        return self.fleet_of(self.table.policy)

    def fleet_of(self, engines: Sequence[EngineEntry]) -> EngineFleet:
        """Return connections to ``engines``, which are all of `EngineTable.policy` or `others`."""
        return self._fleets.of([engine.url for engine in engines])

    def drop_fleets(self) -> None:
        """Close connections to engines that no longer run."""
        self._fleets.keep(self.table.groups)

    # -- death -------------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Return a watch that reports when a server process ends."""
        handles = [*self._handles.values(), *self.routers.handles.values()]
        return Watch({handle.worker: handle.server_exit for handle in handles}, self.on_server_exit)

    def on_server_exit(self, name: str, server_exit: ServerExit | None, what: str = "") -> None:
        """Restart a server that ended; do nothing if ``server_exit`` is None.

        Args:
            what: the operation in progress, for the message.

        Raises:
            RunFailed: it is not restarted, because --use-fault-tolerance is off, because the engine
                serves another model or is one of a pair, or because it died too often.
        """
        if server_exit is None or name in self._stopped:
            return
        engine = self.table.find(name)
        if engine is None and self._tolerant:
            if self.routers.is_current_process(name, server_exit):
                self._restart_router(name, server_exit.how)
            return
        if not self._tolerant or engine is None or not engine.can_restart:
            remedies = [] if self._tolerant else ["--use-fault-tolerance"]
            if engine is not None:
                remedies += engine_of(self.config).remedies(server_exit.exception)
            raise_server_exit(name, server_exit, remedies, what=what)
        elif self.table.is_current_server(name, server_exit.url):
            self._handle_loss(
                engine,
                f"{server_exit.how}: {server_exit.exception}"
                if server_exit.exception
                else server_exit.how,
            )

    def poll_for_deaths(self, what: str = "") -> None:
        """Ask all servers now whether they live. Raises as `on_server_exit`."""
        self._poll_engines(what)
        self._poll_servers(self.routers.handles.values(), what)

    def _poll_engines(self, what: str = "") -> None:
        self.external.poll_for_deaths(what)
        running = [
            engine for engine in (*self.table.policy, *self.table.others) if not engine.is_external
        ]
        self._poll_servers(
            [self._handles[part] for engine in running for part in engine.parts], what
        )

    def _poll_servers(self, handles: Iterable[EngineHandle], what: str) -> None:
        asked = {handle.worker: handle.server_exit() for handle in handles}
        for worker, server_exit in zip(
            asked, wait_for(asked, "asking the engines", deadlines.ENGINES_ANSWER)
        ):
            self.on_server_exit(worker.name, server_exit, what)

    def _restart_router(self, name: str, how: str) -> None:
        refused = self.routers.start_again(name, how, self._serving)
        for engine in [one for one in self.table.in_state(State.SERVING) if one.url in refused]:
            self._handle_loss(
                engine, "was not accepted by a router that was started again, and was killed"
            )

    def _serving(self) -> dict[str, str]:
        """Return name → URL of the engines that get requests."""
        self._poll_engines()  # an engine may have died together with the router
        return {engine.name: engine.url for engine in self.table.in_state(State.SERVING)}

    def _handle_loss(self, engine: EngineEntry, how: str) -> None:
        """Remove a dead or hanging engine from the router, kill what is left, and restart it."""
        if engine.is_external:
            self.external.drop(engine, how)
            return
        url = engine.url
        self.table.mark_lost(engine.number, how)
        self.drop_fleets()
        handles = [self._handles[part] for part in engine.parts]
        killed = {handle.worker: handle.kill(how) for handle in handles}
        try:
            self.routers.remove_worker(url)
        except EngineError as error:
            # requests that the router still sends there fail and are retried
            logger.warning("%s is still behind the router: %s", engine.name, error)
        server_exit: ServerExit = wait_for(
            killed, "ending a dead engine", deadlines.ENGINES_ACTOR_CALL
        )[0]
        if engine.died_too_often:
            all_deaths = (
                f"died {engine.deaths} times without a completed rollout in between; the last time "
                f"it {how}"
            )
            raise_server_exit(
                engine.name,
                server_exit._replace(how=all_deaths),
                engine_of(self.config).remedies(server_exit.exception),
            )
        logger.warning(
            "%s %s; it is started again; engines that continue meanwhile: %d",
            with_pid(engine.name, server_exit.pid),
            how,
            len(self.table.policy),
        )
        if self.restarts_immediately:
            self.restart_dead()

    def stop_engine(self, engine: EngineEntry) -> None:
        """Stop one of the run's own engines permanently; this does not count as a death."""
        self._stopped.update(engine.parts)
        handles = [self._handles[part] for part in engine.parts]
        wait_for(
            {handle.worker: handle.kill("left") for handle in handles},
            "ending an engine",
            deadlines.ENGINES_ACTOR_CALL,
        )

    @contextmanager
    def explain_failures(self, what: str = "") -> Iterator[None]:
        """Find out whether an engine or router died if the block fails.

        Without --use-fault-tolerance the death is raised instead. With it, the engine is restarted,
        and `EngineTable.num_lost` has grown when the block's error is raised.

        Args:
            what: what the block does, for messages.
        """
        lost = self.table.num_lost
        try:
            yield
        except (RunFailed, StopRequested):
            raise
        except Exception as error:
            if not isinstance(error, EngineError):
                patience = deadlines.ENGINES_DEATH_AFTER_ERROR
            else:
                patience = deadlines.ENGINES_DEATH_AFTER_DISCONNECT if error.status is None else 0.0
            with contextlib.suppress(ActorDied, DeadlinePassed):  # the block's error says more
                self._poll_until_death(what, lost, patience)
            if not isinstance(error, EngineError):
                raise
            raise RunFailed(
                f"{what}: {error}",
                why="trainer and engines share GPUs and take turns; the next phase would run out "
                "of memory",
                fix="read the engine's log; on out of memory "
                f"{' or '.join(engine_of(self.config).if_out_of_memory)}",
            ) from error

    def _poll_until_death(self, what: str, lost: int, patience: float) -> None:
        end = time.monotonic() + patience
        while self.table.num_lost == lost:
            self.poll_for_deaths(what)
            if time.monotonic() >= end:
                return
            time.sleep(deadlines.ENGINES_POLL)

    def retry_without_dead(self, work: Callable[[], T], what: str) -> T:
        """Call ``work``, and repeat it as long as engines die during the call.

        Args:
            what: what ``work`` does, for messages.
        """
        while True:
            lost = self.table.num_lost
            try:
                with self.explain_failures():
                    return work()
            except UserError as error:
                lost_trainers = isinstance(error, ActorLost) and error.names
                if self.table.num_lost == lost and not lost_trainers:
                    self._drop_unresponsive()
                if self.table.num_lost == lost:
                    raise
                logger.warning("an engine died during %s, which is repeated: %s", what, error.what)

    def _drop_unresponsive(self) -> None:
        """Drop engines that do not answer a cheap request, which needs no GPU memory or weights."""
        if self._health is None or not self.table.policy:
            return
        fleet = self.fleet
        seconds = self._health.timeout
        asked = {url: fleet.start_get(url, LOADS_PATH, seconds) for url in fleet.urls}
        futures.wait(asked.values(), seconds + deadlines.ENGINES_POLL)
        silent = {
            url
            for url, answer in asked.items()
            if not answer.done() or is_silent(answer.exception())
        }
        self._drop_hanging(silent, seconds)

    def continue_generation(self) -> None:
        """Resume generation after a push that was interrupted."""
        if self.table.policy:
            with contextlib.suppress(EngineError):  # the health check finds an engine that hangs
                self.fleet.post("/continue_generation", {}, deadlines.ENGINES_ANSWER)

    # -- hanging -----------------------------------------------------------------------------------

    def begin_health_checks(self) -> None:
        """Start a new round of health checks; the engines must hold all their memory."""
        if self._health is not None:
            self._health.begin()

    def kill_hanging(self) -> None:
        """Restart engines and routers that hang. Call this repeatedly while engines generate.

        Raises as `on_server_exit`.
        """
        for name, how in self.routers.hanging().items():
            self._restart_router(name, how)
        if self._health is not None and self.table.policy:
            self._drop_hanging(self._health.silent(self.fleet), self._health.timeout)

    def stop_health_checks(self) -> None:
        """Finish all health checks and drop engines that died or hang, before memory is released.

        Raises as `on_server_exit`.
        """
        if self._health is None:
            return
        started = time.perf_counter()
        self.poll_for_deaths()
        if self.table.policy:
            self._drop_hanging(self._health.end(self.fleet), self._health.timeout)
        self._checking_seconds += time.perf_counter() - started

    def _drop_hanging(self, urls: Collection[str], seconds: float) -> None:
        for engine in self.table.policy:
            if (engine.can_restart or engine.is_external) and engine.url in urls:
                ended = "" if engine.is_external else " and was killed"
                self._handle_loss(engine, f"gave no sign of life for {seconds:.0f} s{ended}")

    # -- restart: restart_dead ─► rejoin ─► (push) ─► admit ----------------------------------------

    def restart_dead(self) -> None:
        """Begin to restart all dead engines, on their slots and with new ports."""
        parts = parts_by_number(self._parts)
        for engine in self.table.in_state(State.DOWN):
            self.table.mark_started_again(engine.number, self._start_parts(parts[engine.number]))

    def poll(self) -> None:
        """Process finished restarts, repeat failed ones, and handle engines that join and leave.

        Restarts are not waited for; joining or leaving takes a moment.

        Raises:
            UserError: an engine failed to start too often; carries its last log lines.
            RunFailed: an external engine is gone, see `ExternalEngines.poll`.
        """
        self.external.poll()
        for engine in self.table.in_state(State.STARTING):
            if not engine.starting or not all_answered(engine.starting):
                continue
            try:
                urls = wait_for(engine.starting, "restarting", deadlines.ENGINES_ACTOR_CALL)
                keys.register_own(*urls)
                self.table.mark_came_up(engine.number, urls)
                logger.info("%s runs again and comes back with the next weight push", engine.name)
            except UserError as error:
                self.table.mark_start_failed(engine.number)
                if engine.died_too_often:
                    raise
                logger.warning("%s did not come up; it is started again: %s", engine.name, error)
                self.restart_dead()

    def wait_for_restarts(self, *, for_all: bool) -> None:
        """Wait until all running starts have ended, or until the first engine is up.

        Raises as `poll`, and DeadlinePassed and StopRequested.
        """
        end = time.monotonic() + (1 + MAX_RESTARTS) * self._start_seconds
        self.poll()
        with waiting_for(what := "restarting engines") as wait_a_moment:
            while starting := self.table.in_state(State.STARTING):
                if not for_all and self.table.in_state(State.STARTED):
                    return
                if self._should_stop():
                    raise StopRequested(what)
                if time.monotonic() > end:
                    names = ", ".join(engine.name for engine in starting)
                    raise DeadlinePassed(f"{names} did not come up again", fix="look into its log")
                wait_a_moment(
                    {worker: ref for engine in starting for worker, ref in engine.starting.items()}
                )
                self.poll()

    def admit(self) -> None:
        """Put rejoined engines back behind the router; one that it refuses counts as dead."""
        if self.table.in_state(State.REJOINING):
            self._poll_servers(self.routers.handles.values(), "")  # restarts a router that died
        for engine in self.table.in_state(State.REJOINING):
            try:
                self.routers.add_worker(engine.url)
            except EngineError as error:
                self._handle_loss(engine, f"was refused by the router ({error})")
                continue
            seconds = self.table.mark_admitted(engine.number)
            how = "serves after" if engine.is_external else "is back after"
            logger.warning(
                "%s %s %.1f s as %s: it %s", engine.name, how, seconds, engine.url, engine.reason
            )

    def reset_death_counts(self) -> None:
        """Forget earlier deaths, because a rollout was completed."""
        self.table.reset_death_counts()
        self.routers.reset_death_counts()

    def metrics(self) -> dict[str, float]:
        """Return the engines' host memory and, with --use-fault-tolerance, restart metrics.

        The latter count from the last call: completed restarts, the longest time that an engine was
        away, and the time that the trainer waited for health checks to end.
        """
        found = self._memory.metrics()
        if not self._tolerant:
            return found
        seconds = self.table.pop_seconds_away()
        found |= {
            "rollout/engine_restarts": float(len(seconds)),
            "perf/engine_checks_time": self._checking_seconds,
        }
        found["rollout/router_restarts"] = float(self.routers.pop_restarts())
        self._checking_seconds = 0.0
        return found | ({"rollout/engine_restart_seconds": max(seconds)} if seconds else {})

    def close(self, timeout: float) -> None:
        """Ask all servers of the run to stop, then kill what is left."""
        self.external.close()
        self._fleets.keep([])
        self.routers.close()
        handles = [*self._handles.values(), *self.routers.handles.values()]
        refs = [handle.stop() for handle in handles]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for handle in handles:
            handle.end()


def _raise_exit(name: str, server_exit: ServerExit | None) -> None:
    if server_exit is not None:
        raise_server_exit(name, server_exit, [], what="while the run came up")
