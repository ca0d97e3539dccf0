"""All engines of a run: started, watched, restarted. The state of each engine is in
`slime.cluster.engine_table`, its memory the business of `slime.cluster.gpu_memory`, the routers in
front of them that of `slime.cluster.routers`.

With --use-fault-tolerance an engine that dies, or hangs for --rollout-health-check-timeout, is
taken out of the router and started again; the others go on meanwhile. It comes back with the next
weight push, which is between rollouts; only when no engine is left is it waited for, in the middle
of a rollout if need be, since a push then interrupts nobody. Without the flag, and for what cannot
be restarted, a death ends the run.
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
from slime.cluster.engine_fit import named
from slime.cluster.engine_memory import EnginesMemory
from slime.cluster.engine_table import MOST_RESTARTS, EngineEntry, State
from slime.cluster.external_engines import ExternalEngines
from slime.cluster.placement import (
    PAIR,
    EnginePart,
    GpuSlots,
    engine_parts,
    parts_by_number,
    table_of,
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


class Engines:
    """All engines of a run, and a router in front of those of each model.

    Args:
        start_seconds: that one start may take.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.

    Attributes:
        table: which engine is in what state.
        routers: in front of the engines of each model.
        external: who joins and leaves, and the engines that others have started.
        keys: that engines and routers ask for, new for each launch.
        nodes: where the policy's engines stand.
        restarts_at_once: what died starts again as soon as that is known; false while the trainer
            has the GPUs that it shares with engines (`start_again` is called when it sleeps).
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
        own = self.keys = keys.use(keys.RunKeys.new())
        urls = named(config)
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
        if not models:  # external engines have a router, too
            models = {
                "policy": ServedModel("policy", str(config.checkpoint.hf_checkpoint), True, ())
            }
        self.routers = Routers(
            config, models, self._parts, self._handles, run_path, hosts, self.keys, should_stop
        )
        self.table = table_of(self._parts, urls)
        turns = config.cluster.colocate and (slots.on_gpu or engine_of(config).releases_without_gpu)
        self.external = ExternalEngines(
            config, self.table, self, CommandInbox(run_path), shares_gpus=turns
        )
        self._ended, self._memory = set[str](), EnginesMemory(self._handles.values())
        self._tolerant = config.fault_tolerance.use_fault_tolerance
        self.restarts_at_once = True
        self._checking_seconds = 0.0
        self._health = HealthChecks.of(config) if self._tolerant else None
        self._fleets = Fleets(
            self._health.timeout if self._health is not None else None, lambda: self.table.groups
        )

    # -- launch
    # ----------------------------------------------------------------------------------------------

    def begin_start(self) -> dict[NamedActor, ray.ObjectRef]:
        """Start all engines at once; the answers go to `put_routers_in_front`.

        Raises:
            UserError: an external engine does not answer, or cannot take part.
        """
        self.external.check_named()
        return self._begin_start(self._parts)

    def _begin_start(self, parts: Sequence[EnginePart]) -> dict[NamedActor, ray.ObjectRef]:
        model_path = str(self.config.checkpoint.hf_checkpoint)
        meeting: dict[int, ray.ObjectRef] = {}
        asked: dict[NamedActor, ray.ObjectRef] = {}
        for part in parts:
            number = part.place.number
            handle = self._handles[part.name]
            if part.place.num_nodes > 1 and part.is_first:
                meeting[number] = handle.rendezvous()
            asked[handle.worker] = handle.begin_start(model_path, meeting.get(number))
        return asked

    def put_routers_in_front(self, urls: Sequence[str]) -> None:
        """Args: urls: the answers to `begin_start`, in their order."""
        keys.own(*urls)
        url_of = dict(zip((part.name for part in self._parts), urls, strict=True)) | {
            u: u for u in self.external.named
        }
        for engine in self.table.engines.values():
            self.table.launched(engine.number, [url_of[name] for name in engine.parts])
        self.routers.start(url_of)

    @property
    def answers_alone(self) -> bool:
        """Whether an engine can generate by itself; prefill and decode servers only do in pairs,
        behind the router."""
        return all(
            part.group.worker_type not in PAIR for part in self._parts if part.model.is_policy
        )

    @property
    def layout(self) -> list[EngineSlots]:
        """Which slots the ranks of each of the policy's engines stand on that run."""
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
        """Connections to the policy's engines that run, past the router; another one when these
        have changed."""
        return self.fleet_of(self.table.policy)

    def fleet_of(self, engines: Sequence[EngineEntry]) -> EngineFleet:
        """The same for the policy's or the others, all of them that run."""
        return self._fleets.of([engine.url for engine in engines])

    def drop_fleets(self) -> None:
        """Of engines that have changed."""
        self._fleets.keep(self.table.groups)

    # -- death
    # ----------------------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Hears soon of a server process that has ended."""
        handles = [*self._handles.values(), *self.routers.handles.values()]
        return Watch({handle.worker: handle.server_exit for handle in handles}, self.on_server_exit)

    def on_server_exit(self, name: str, server_exit: ServerExit | None, what: str = "") -> None:
        """A server has ended, or None: it lives.

        Args:
            what: was being done with it, for the message.
        Raises:
            RunFailed: it is not restarted: without --use-fault-tolerance, an engine of another
                model or of a pair, or who has died too often.
        """
        if server_exit is None or name in self._ended:
            return
        engine = self.table.find(name)
        if engine is None and self._tolerant:
            if self.routers.is_news(name, server_exit):
                self._start_router_again(name, server_exit.how)
            return
        if not self._tolerant or engine is None or not engine.can_restart:
            remedies = [] if self._tolerant else ["--use-fault-tolerance"]
            if engine is not None:
                remedies += engine_of(self.config).remedies(server_exit.exception)
            raise_server_exit(name, server_exit, remedies, what=what)
        elif self.table.is_news(name, server_exit.url):
            self._lost(
                engine,
                f"{server_exit.how}: {server_exit.exception}"
                if server_exit.exception
                else server_exit.how,
            )

    def poll_for_deaths(self, what: str = "") -> None:
        """Hear now, instead of sooner or later, who has died. Raises as `on_server_exit`."""
        self._hear_of_engines(what)
        self._hear(self.routers.handles.values(), what)

    def _hear_of_engines(self, what: str = "") -> None:
        self.external.poll_for_deaths(what)
        running = [
            engine for engine in (*self.table.policy, *self.table.others) if not engine.is_external
        ]
        self._hear([self._handles[part] for engine in running for part in engine.parts], what)

    def _hear(self, handles: Iterable[EngineHandle], what: str) -> None:
        asked = {handle.worker: handle.server_exit() for handle in handles}
        for worker, server_exit in zip(
            asked, wait_for(asked, "asking the engines", deadlines.ENGINES_ASK)
        ):
            self.on_server_exit(worker.name, server_exit, what)

    def _start_router_again(self, name: str, how: str) -> None:
        refused = self.routers.start_again(name, how, self._serving)
        for engine in [one for one in self.table.those(State.SERVING) if one.url in refused]:
            self._lost(
                engine, "was not accepted by a router that was started again, and was killed"
            )

    def _serving(self) -> dict[str, str]:
        """URLs by name of the engines that requests may go to; who has died with the router is none
        of them."""
        self._hear_of_engines()
        return {engine.name: engine.url for engine in self.table.those(State.SERVING)}

    def _lost(self, engine: EngineEntry, how: str) -> None:
        """It is dead or hangs: end what is left of it, send no request there, and have it start
        again."""
        if engine.is_external:
            self.external.lost(engine, how)
            return
        url = engine.url
        self.table.lost(engine.number, how)
        self.drop_fleets()
        handles = [self._handles[part] for part in engine.parts]
        killed = {handle.worker: handle.kill(how) for handle in handles}
        try:
            self.routers.take_out(url)
        except (
            EngineError
        ) as error:  # the router goes on sending requests there, which fail and are sent again
            logger.warning("%s is still behind the router: %s", engine.name, error)
        server_exit: ServerExit = wait_for(
            killed, "ending a dead engine", deadlines.ENGINES_AT_HAND
        )[0]
        if engine.died_too_often:
            times = (
                f"died {engine.deaths} times without a completed rollout between; the last time "
                f"it {how}"
            )
            raise_server_exit(
                engine.name,
                server_exit._replace(how=times),
                engine_of(self.config).remedies(server_exit.exception),
            )
        logger.warning(
            "%s %s; it is started again; engines that go on meanwhile: %d",
            with_pid(engine.name, server_exit.pid), how, len(self.table.policy),
        )  # fmt: skip
        if self.restarts_at_once:
            self.start_again()

    def end(self, engine: EngineEntry) -> None:
        """One of the run's own, for good: its end is no death."""
        self._ended.update(engine.parts)
        handles = [self._handles[part] for part in engine.parts]
        wait_for(
            {handle.worker: handle.kill("left") for handle in handles},
            "ending an engine",
            deadlines.ENGINES_AT_HAND,
        )

    @contextmanager
    def explained(self, what: str = "") -> Iterator[None]:
        """When the block fails and an engine or a router has died of it, that is the error; or it
        is known, where engines are restarted (`EngineTable.num_lost` has grown).

        Args:
            what: is being done, for messages.
        """
        lost = self.table.num_lost
        try:
            yield
        except (RunFailed, StopRequested):
            raise
        except Exception as error:
            if not isinstance(error, EngineError):
                patience = deadlines.ENGINES_DEATH
            else:
                patience = deadlines.ENGINES_DEATH_OF_CONNECTION if error.status is None else 0.0
            with contextlib.suppress(ActorDied, DeadlinePassed):  # the error at hand says more
                self._hear_of_death(what, lost, patience)
            if not isinstance(error, EngineError):
                raise
            raise RunFailed(
                f"{what}: {error}",
                why="trainer and engines share GPUs and take turns; the next phase would run out "
                "of memory",
                fix="read the engine's log; on out of memory "
                f"{' or '.join(engine_of(self.config).if_out_of_memory)}",
            ) from error

    def _hear_of_death(self, what: str, lost: int, patience: float) -> None:
        end = time.monotonic() + patience
        while self.table.num_lost == lost:
            self.poll_for_deaths(what)
            if time.monotonic() >= end:
                return
            time.sleep(deadlines.ENGINES_LOOK)

    def again_without_dead(self, work: Callable[[], T], what: str) -> T:
        """Do ``work`` (``what``, for messages), and once more each time that an engine has died of
        it; to be called for what can be repeated."""
        while True:
            lost = self.table.num_lost
            try:
                with self.explained():
                    return work()
            except UserError as error:
                if self.table.num_lost == lost and not (
                    isinstance(error, ActorLost) and error.names
                ):  # trainers are gone
                    self._lose_silent()
                if self.table.num_lost == lost:
                    raise
                logger.warning("an engine died during %s, which is repeated: %s", what, error.what)

    def _lose_silent(self) -> None:
        """Lose those who do not answer a question that costs them nothing, whatever their memory
        and weights."""
        if self._health is None or not self.table.policy:
            return
        fleet = self.fleet
        seconds = self._health.timeout
        asked = {url: fleet.start_get(url, LOADS_PATH, seconds) for url in fleet.urls}
        futures.wait(asked.values(), seconds + deadlines.ENGINES_LOOK)
        silent = {
            url
            for url, answer in asked.items()
            if not answer.done() or is_silent(answer.exception())
        }
        self._lose_hanging(silent, seconds)

    def continue_generation(self) -> None:
        """Have them generate again, whatever a push has left them in."""
        if self.table.policy:
            with contextlib.suppress(EngineError):  # who does not is noticed as one that hangs
                self.fleet.post("/continue_generation", {}, deadlines.ENGINES_ASK)

    # -- hanging
    # ----------------------------------------------------------------------------------------------

    def begin_rollout(self) -> None:
        """The engines are awake from now on, which `kill_hanging` presumes."""
        if self._health is not None:
            self._health.begin()

    def kill_hanging(self) -> None:
        """To be called now and then while the engines generate: those that hang are lost, routers
        too. Raises as `on_server_exit`."""
        for name, how in self.routers.hanging().items():
            self._start_router_again(name, how)
        if self._health is not None and self.table.policy:
            self._lose_hanging(self._health.silent(self.fleet), self._health.timeout)

    def end_rollout(self) -> None:
        """To be called before the engines give memory up: those that died or hang are left out, and
        no health check is under way any more. Raises as `on_server_exit`."""
        if self._health is None:
            return
        started = time.perf_counter()
        self.poll_for_deaths()
        if self.table.policy:
            self._lose_hanging(self._health.end(self.fleet), self._health.timeout)
        self._checking_seconds += time.perf_counter() - started

    def _lose_hanging(self, urls: Collection[str], seconds: float) -> None:
        for engine in self.table.policy:
            if (engine.can_restart or engine.is_external) and engine.url in urls:
                ended = "" if engine.is_external else " and was killed"
                self._lost(engine, f"gave no sign of life for {seconds:.0f} s{ended}")

    # -- restart: start_again ─► taken in ─► (push) ─► admit
    # -------------------------------------------------------

    def start_again(self) -> None:
        """Begin to start those that are down, on their slots, with other ports."""
        parts = parts_by_number(self._parts)
        for engine in self.table.those(State.DOWN):
            self.table.started_again(engine.number, self._begin_start(parts[engine.number]))

    def look(self) -> None:
        """Take note of restarts that have come to their end; never waits. One that failed is tried
        again. And of who joins and leaves, which takes a moment.

        Raises:
            UserError: an engine did not come up too often; carries its last log lines. RunFailed:
                an external one is gone, see `ExternalEngines.look`.
        """
        self.external.look()
        for engine in self.table.those(State.STARTING):
            if not engine.starting or not all_answered(engine.starting):
                continue
            try:
                urls = wait_for(engine.starting, "restarting", deadlines.ENGINES_AT_HAND)
                keys.own(*urls)
                self.table.came_up(engine.number, urls)
                logger.info("%s runs again and comes back with the next weight push", engine.name)
            except UserError as error:
                self.table.start_failed(engine.number)
                if engine.died_too_often:
                    raise
                logger.warning("%s did not come up; it is started again: %s", engine.name, error)
                self.start_again()

    def wait_for_restarts(self, *, for_all: bool) -> None:
        """Until all starts under way have come to their end, or the first one. Raises as `look`,
        DeadlinePassed and StopRequested."""
        end = time.monotonic() + (1 + MOST_RESTARTS) * self._start_seconds
        self.look()
        with waiting_for(what := "restarting engines") as wait_a_moment:
            while starting := self.table.those(State.STARTING):
                if not for_all and self.table.those(State.STARTED):
                    return
                if self._should_stop():
                    raise StopRequested(what)
                if time.monotonic() > end:
                    names = ", ".join(engine.name for engine in starting)
                    raise DeadlinePassed(f"{names} did not come up again", fix="look into its log")
                wait_a_moment(
                    {worker: ref for engine in starting for worker, ref in engine.starting.items()}
                )
                self.look()

    def admit(self) -> None:
        """Those taken in have the current weights: requests go there again. Who is refused by the
        router is lost."""
        if self.table.those(State.REJOINING):
            self._hear(
                self.routers.handles.values(), ""
            )  # where it is gone, there is another one now
        for engine in self.table.those(State.REJOINING):
            try:
                self.routers.put_behind(engine.url)
            except EngineError as error:
                self._lost(engine, f"was refused by the router ({error})")
                continue
            seconds = self.table.admitted(engine.number)
            how = "serves after" if engine.is_external else "is back after"
            logger.warning(
                "%s %s %.1f s as %s: it %s", engine.name, how, seconds, engine.url, engine.reason
            )

    def reset_death_counts(self) -> None:
        """A rollout was completed with those that run."""
        self.table.reset_death_counts()
        self.routers.reset_death_counts()

    def metrics(self) -> dict[str, float]:
        """Host memory of the engines; with --use-fault-tolerance restarts that were completed since
        the last call, the longest time that one was away, and what the trainer waited for checks of
        the others to end."""
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
        """Ask all to stop, then kill what is left; external ones are left alone."""
        self.external.close()
        self._fleets.keep([])
        self.routers.close()
        handles = [*self._handles.values(), *self.routers.handles.values()]
        refs = [handle.stop() for handle in handles]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for handle in handles:
            handle.end()
