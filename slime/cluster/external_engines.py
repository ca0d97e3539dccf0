"""Engines that were started outside the run, and engines that leave a running run.

    --rollout-external-engine-addrs  part of the run from the launch on, like the run's own
    slime engines add                joins: checked ─► started ─► rejoined ─► push ─► admitted
    slime engines remove             leaves: out of the router ─► its requests are aborted and
                                     continue elsewhere ─► forgotten; the run stops its own server

The run never starts, restarts or stops an external engine, and never asks it to release memory. Its
liveness is probed over HTTP. No engine joins or leaves during a weight push, which involves all of
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from slime import deadlines
from slime.cluster import engine_fit
from slime.cluster.command_inbox import CommandInbox, EngineCommand
from slime.cluster.engine_table import EngineEntry, EngineTable, State
from slime.cluster.routers import Routers
from slime.cluster.waiting import ActorLost
from slime.config.addresses import engine_url
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import LOADS_PATH, EngineClient, EngineError
from slime.engines.client import num_requests
from slime.engines.fleet import EngineFleet
from slime.errors import RunFailed, UserError
from slime.log import get_logger

logger = get_logger(__name__)

_COMMAND = "slime engines"


#: Refused probes in a row after which a server counts as gone. A single one may have met a
#: connection that was just being closed.
_MAX_MISSES = 2


class LivenessProbe:
    """Probes over HTTP whether servers still run.

    A slow answer counts as alive. Only refused connections mean that the server or its host is
    gone.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fleet: EngineFleet | None = None
        self._asked: dict[str, Future[Any]] = {}
        self._num_misses: dict[str, int] = {}
        self._next = 0.0

    def poll(self, urls: Sequence[str]) -> list[str]:
        """Return the servers known to be gone by now, without waiting."""
        self._reconnect(urls)
        found = []
        for url, answer in list(self._asked.items()):
            if not answer.done():
                continue
            del self._asked[url]
            self._num_misses[url] = self._num_misses.get(url, 0) + 1 if _is_refused(answer) else 0
            if self._num_misses[url] >= _MAX_MISSES:
                found.append(url)
            elif self._num_misses[url]:
                self._ask(url)
        if self._clock() >= self._next:
            self._next = self._clock() + deadlines.EXTERNAL_ENGINES_LIVENESS_POLL
            for url in urls:
                if url not in self._asked and url not in found:
                    self._ask(url)
        return found

    def check_now(self, urls: Sequence[str]) -> list[str]:
        """Probe all servers, wait for the answers, and return those that are gone."""
        self._reconnect(urls)
        found = list(urls)
        for _ in range(_MAX_MISSES if found else 0):
            assert self._fleet is not None
            asked = {
                url: self._fleet.start_get(
                    url, "/health", deadlines.EXTERNAL_ENGINES_LIVENESS_ANSWER
                )
                for url in found
            }
            wait(asked.values(), timeout=deadlines.EXTERNAL_ENGINES_LIVENESS_ANSWER + 1)
            found = [url for url, answer in asked.items() if answer.done() and _is_refused(answer)]
        return found

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = None

    def _reconnect(self, urls: Sequence[str]) -> None:
        if urls and (self._fleet is None or not set(urls) <= set(self._fleet.urls)):
            self.close()
            self._asked = {}
            self._fleet = EngineFleet(urls)
        self._asked = {url: answer for url, answer in self._asked.items() if url in urls}
        self._num_misses = {url: count for url, count in self._num_misses.items() if url in urls}

    def _ask(self, url: str) -> None:
        assert self._fleet is not None
        self._asked[url] = self._fleet.start_get(
            url, "/health", deadlines.EXTERNAL_ENGINES_LIVENESS_ANSWER
        )


def _is_refused(answer: Future[Any]) -> bool:
    error = None if answer.cancelled() else answer.exception()
    return (
        isinstance(error, EngineError)
        and error.status is None
        and not isinstance(error.__cause__, TimeoutError)
    )


class EngineOps(Protocol):
    """Methods of `slime.cluster.engines.Engines`, which imports this module."""

    @property
    def routers(self) -> Routers: ...
    @property
    def answers_alone(self) -> bool: ...
    def drop_fleets(self) -> None: ...
    def stop_engine(self, engine: EngineEntry) -> None: ...
    def admit(self) -> None: ...


@dataclass(eq=False)
class ExternalEngines:
    """Manages external engines and executes the commands by which engines join and leave.

    Args:
        inbox: commands of ``slime engines``; None if there can be none.
        shares_gpus: trainer and engines alternate on the same GPUs.

    Attributes:
        named: URLs of --rollout-external-engine-addrs.
    """

    config: Config
    table: EngineTable
    engines: EngineOps
    inbox: CommandInbox | None
    _: KW_ONLY
    shares_gpus: bool
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.named = engine_fit.external_urls(self.config)
        self._tolerant = self.config.fault_tolerance.use_fault_tolerance
        self._liveness = LivenessProbe(self.clock)
        self._num_frozen = 0
        self._still_routed = set[str]()  # lost engines that are still behind the router
        self._next_try = 0.0

    def check_named(self) -> None:
        """Check at the launch, before anything is started, that all named engines fit the run.

        Raises:
            UserError: names the address.
        """
        self._check_policy()
        reference: tuple[str, engine_fit.EngineInfo] | None = None
        for engine in self._external():
            url = engine.name
            info = self._check(url, reference)
            engine.ranks = info.abilities.num_ranks
            reference = reference or (url, info)

    def _check_policy(self) -> None:
        own = [
            engine
            for engine in self.table.engines.values()
            if engine.is_policy and not engine.is_external
        ]
        policy = self.config.engine.router.get("policy") or ""
        if self.named and policy == "power_of_two" and len(own) < 2:
            raise UserError(
                f"--router-policy {policy} needs two engines of the run's own besides "
                "--rollout-external-engine-addrs",
                why="the router must be started with two engines and sends them the run's key, "
                "which external engines must not get",
                fix="choose another policy, for example cache_aware",
            )

    def poll(self) -> None:
        """Drop engines that are gone and execute commands, without waiting for liveness probes.

        Raises:
            RunFailed: an engine with requests is gone, and it was the last one or
                --use-fault-tolerance is off.
        """
        self._drop_gone(
            self._liveness.poll([engine.url for engine in self._external() if engine.urls])
        )
        self._retry_router_removal()
        if self.inbox is None:
            return
        for command in self.inbox.take():
            if self._num_frozen and command.verb != "list":
                continue  # the inbox returns it again
            self.inbox.answer(command, self._execute(command))

    def _retry_router_removal(self) -> None:
        """Remove engines from the router that were lost while it did not answer.

        If such an engine came back, it would get requests but no weights.
        """
        if self._still_routed and self.clock() >= self._next_try:
            self._next_try = self.clock() + deadlines.EXTERNAL_ENGINES_REMOVE_RETRY
            joined_again = {engine.url for engine in self._external() if engine.urls}
            self._still_routed -= joined_again
            self._still_routed = {url for url in self._still_routed if not self._leave_router(url)}

    def poll_for_deaths(self, what: str = "") -> None:
        """Probe all external engines now and drop those that are gone. Raises as `poll`.

        Args:
            what: what was being done, for the message.
        """
        self._drop_gone(
            self._liveness.check_now([engine.url for engine in self._external() if engine.runs]),
            what,
        )

    @contextlib.contextmanager
    def freeze_membership(self) -> Iterator[None]:
        """Let no engine join or leave within the block."""
        self._num_frozen += 1
        try:
            yield
        finally:
            self._num_frozen -= 1

    @contextlib.contextmanager
    def drop_newcomers_on_failure(self) -> Iterator[None]:
        """Drop engines that would get their first weights with a push, if that push fails.

        The push is then repeated without them: a misconfigured external engine must not end the
        run.
        """
        lost = self.table.num_lost
        try:
            yield
        except UserError as error:
            if isinstance(error, ActorLost) and error.names:
                raise  # lost trainers explain the failure
            newcomers = [engine for engine in self._external() if engine.state is State.REJOINING]
            if self.table.num_lost == lost:  # otherwise a death explains the failure
                for engine in newcomers:
                    self.drop(engine, f"did not get its first weights: {error.what}")
            raise

    def close(self) -> None:
        self._liveness.close()
        if self.inbox is not None:
            self.inbox.close()

    # -- joining -----------------------------------------------------------------------------------

    def add(self, address: str) -> str:
        """Let an engine join; return the text for the user.

        Raises:
            UserError: the engine already belongs to the run, or does not fit it.
        """
        url = engine_url(address, f"{_COMMAND} add")
        for engine in self.table.engines.values():
            if url in engine.urls:
                raise UserError(
                    f"{url} is an engine of this run already", why=f"it is {state_name(engine)}"
                )
        if url in self.engines.routers.urls.values():
            raise UserError(f"{url} is the router of this run, no engine")
        warnings: list[str] = []
        keys.register_external(url)
        info = self._check(url, self._reference_engine(), warnings.append)
        self.table.mark_joined(url, info.abilities.num_ranks)
        if self.config.debug.debug_rollout_only:
            self.table.rejoin()
            self.engines.admit()
            answer = f"{url} gets requests, with the weights that it has: there is no trainer"
        else:
            logger.info("%s joins: it gets weights with the next push, then requests", url)
            answer = f"{url} gets weights with the next push, then requests"
        return "\n".join([answer, *warnings])

    def _check(
        self,
        url: str,
        reference: tuple[str, engine_fit.EngineInfo] | None,
        warn: Callable[[str], None] | None = None,
    ) -> engine_fit.EngineInfo:
        if self.shares_gpus:
            raise UserError(
                f"the engine at {url} cannot take part with --colocate",
                why="engines then release their GPU memory for the trainer, which an external "
                "engine is never asked to do; and only the run's own engines can open handles to "
                "weights on a GPU",
                fix="pass --no-colocate, and --rollout-num-gpus if the run should also start "
                "engines",
            )
        if not self.engines.answers_alone:
            raise UserError(
                f"the engine at {url} cannot be combined with prefill and decode servers",
                why="their router sends every request to a pair of them",
                fix="give --sglang-config a regular server group, or leave the engine out",
            )
        info = engine_fit.fetch_engine_info(url)
        warn = warn or (lambda text: logger.warning("%s", text))
        engine_fit.check_fit(self.config, url, info, reference, warn)
        return info

    def _reference_engine(self) -> tuple[str, engine_fit.EngineInfo] | None:
        """Return URL and info of an engine of the run; None if there is none or none answers."""
        for engine in self.table.policy:
            with contextlib.suppress(UserError):
                return engine.url, engine_fit.fetch_engine_info(engine.url)
        return None

    # -- leaving -----------------------------------------------------------------------------------

    def remove(self, wanted: str) -> str:
        """Let an engine leave; return the text for the user.

        Args:
            wanted: its address, or its name ("engine-1").
        Raises:
            UserError: there is no such engine, it is the last one that serves, or others depend on
                it.
        """
        engine = self._find(wanted)
        name = engine.url if engine.is_external else f"{engine.name} ({engine.url})"
        if not (engine.is_external or engine.can_restart):
            raise UserError(
                f"{name} cannot leave",
                why="it serves another model, or is half of a pair: others depend on it",
            )
        if [one for one in self.table.in_state(State.SERVING) if one.is_policy] == [engine]:
            raise UserError(
                f"{name} cannot leave: it is the last engine that serves",
                why="no engine would be left to generate",
                fix=f"let another one join first ({_COMMAND} add), and wait for the push after "
                "which it serves",
            )
        if engine.state is State.SERVING and not self._leave_router(engine.url):
            raise UserError(
                f"{name} cannot leave now: the router has not removed it",
                why="it would still get requests, but no new weights",
                fix="try again in a minute",
            )
        served = engine.state is State.SERVING
        self.table.mark_left(engine.number)
        drained = self._drain(engine.url) if served else True
        self.engines.drop_fleets()
        if not engine.is_external:
            self.engines.stop_engine(engine)
        logger.info(
            "%s has left (%s remove); engines left: %d", name, _COMMAND, len(self.table.policy)
        )
        done = f"{name} has left" + ("" if engine.is_external else ", and its server was stopped")
        return done if drained else f"{done}; requests that it may have lost are sent again"

    def _find(self, wanted: str) -> EngineEntry:
        named = self.table.find(wanted)
        url = "" if named is not None else engine_url(wanted, f"{_COMMAND} remove")
        found = named or next(
            (engine for engine in self.table.engines.values() if url in engine.urls[:1]), None
        )
        if found is None:
            there = ", ".join(
                engine.urls[0] for engine in self.table.engines.values() if engine.urls
            )
            raise UserError(f"{url} is no engine of this run", why=f"the run has {there or 'none'}")
        if not found.urls:
            raise UserError(
                f"{found.name} cannot leave while it is {state_name(found)}",
                why="it died and is being restarted",
            )
        return found

    def _leave_router(self, url: str) -> bool:
        try:
            self.engines.routers.remove_worker(url)
        except EngineError as error:
            # requests that the router still sends there may fail and are retried
            logger.warning("%s is still behind the router: %s", url, error)
            return False
        return True

    def _drain(self, url: str) -> bool:
        """Abort all requests of an engine; their partial responses continue on other engines.

        Returns:
            False if it still has requests or does not answer.
        """

        async def drain() -> None:
            end = time.monotonic() + deadlines.EXTERNAL_ENGINES_DRAIN
            async with EngineClient(url, timeout=deadlines.EXTERNAL_ENGINES_DRAIN) as engine:
                while True:
                    await engine.post("/abort_request", {"abort_all": True})
                    if not num_requests(await engine.get(LOADS_PATH)):
                        return
                    if time.monotonic() > end:
                        raise EngineError(
                            url,
                            f"still has requests after {deadlines.EXTERNAL_ENGINES_DRAIN:.0f} s",
                        )
                    await asyncio.sleep(deadlines.EXTERNAL_ENGINES_DRAIN_POLL)

        try:
            asyncio.run(drain())
        except EngineError as error:
            logger.warning("%s", error)
            return False
        return True

    # -- death -------------------------------------------------------------------------------------

    def drop(self, engine: EngineEntry, how: str, what: str = "") -> None:
        """Remove an engine that no longer answers or was refused.

        Args:
            what: the operation in progress, for the message.

        Raises:
            RunFailed: it had requests and --use-fault-tolerance is off, or no other engine is left.
        """
        url = engine.url
        served = engine.state is State.SERVING
        self.table.mark_left(engine.number)
        self.table.num_lost += 1
        self.engines.drop_fleets()
        said = f"{what}{': ' if what else ''}the external engine {url} {how}"
        if served and not self._tolerant:
            raise RunFailed(
                said,
                why="it had requests of the run, which does not restart external engines",
                fix="with --use-fault-tolerance the run continues as long as another engine serves",
            )
        if not self._leave_router(url):
            self._still_routed.add(url)
        if not any(one.is_policy for one in self.table.engines.values()):
            raise RunFailed(
                said,
                why="it was the last engine",
                fix="use more than one engine, or also engines that the run starts",
            )
        logger.warning(
            "%s; it is removed from the run, engines left: %d; %s add lets it join again",
            said,
            len(self.table.policy),
            _COMMAND,
        )

    def _drop_gone(self, urls: Sequence[str], what: str = "") -> None:
        for engine in [engine for engine in self._external() if engine.urls and engine.url in urls]:
            self.drop(engine, "no longer answers: it refuses connections", what)

    # -- commands ----------------------------------------------------------------------------------

    def _execute(self, command: EngineCommand) -> dict[str, Any]:
        verbs = {"add": self.add, "remove": self.remove}
        try:
            if command.verb == "list":
                engines = list(self.table.engines.values())
                counts = asyncio.run(_counts([next(iter(engine.urls), "") for engine in engines]))
                return {"engines": [_row(*both) for both in zip(engines, counts, strict=True)]}
            if command.verb not in verbs:
                raise UserError(f"unknown command {command.verb!r}", fix="use add, remove or list")
            return {"said": verbs[command.verb](command.url)}
        except RunFailed:
            raise
        except UserError as error:
            logger.warning("%s %s %s: %s", _COMMAND, command.verb, command.url, error)
            return {"refused": {"what": error.what, "why": error.why, "fix": error.fix}}
        except (OSError, ValueError, EngineError) as error:  # a malformed answer of the engine
            logger.warning("%s %s %s failed", _COMMAND, command.verb, command.url, exc_info=True)
            return {
                "refused": {
                    "what": f"{type(error).__name__}: {error}",
                    "why": "",
                    "fix": "see the driver's log",
                }
            }

    def _external(self) -> list[EngineEntry]:
        return [engine for engine in self.table.engines.values() if engine.is_external]


def state_name(engine: EngineEntry) -> str:
    if engine.is_external and engine.state in (State.STARTED, State.REJOINING):
        return "joining"
    return engine.state.value


async def _counts(urls: Sequence[str]) -> list[str]:
    """Return the number of requests of each engine, as text."""

    async def count(url: str) -> str:
        if not url:
            return "-"
        async with EngineClient(url, timeout=deadlines.EXTERNAL_ENGINES_LOADS) as engine:
            try:
                return str(num_requests(await engine.get(LOADS_PATH)))
            except EngineError:
                return "no answer"

    return list(await asyncio.gather(*map(count, urls)))


def _row(engine: EngineEntry, requests: str) -> dict[str, Any]:
    kind = "external" if engine.is_external else "own" if engine.is_policy else "another model's"
    name = "" if engine.is_external else engine.name
    url = next(iter(engine.urls), "")
    return {
        "name": name,
        "url": url,
        "state": state_name(engine),
        "kind": kind,
        "requests": requests,
    }
