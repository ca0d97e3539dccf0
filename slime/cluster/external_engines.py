"""Engines that somebody else has started, and those that leave a running run.

--rollout-external-engine-addrs   there from the launch on, like the run's own
slime engines add                 joins: asked whether it fits ─► up ─► taken in ─► push ─►
admitted, as after a restart slime engines remove              leaves: out of the router ─► its
requests come back aborted, and go on elsewhere ─►
                                  forgotten, and ended if it is the run's own

The run never starts, restarts or ends an external engine, and asks it for no memory. Whether it
lives is asked by HTTP. While weights are pushed nobody joins or leaves: the push talks to all of
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from slime import deadlines
from slime.cluster import engine_fit
from slime.cluster.command_inbox import CommandInbox, EngineCommand
from slime.cluster.engine_fit import named
from slime.cluster.engine_table import EngineEntry, EngineTable, State
from slime.cluster.liveness import LivenessProbe
from slime.cluster.routers import Routers
from slime.cluster.waiting import ActorLost
from slime.config.addresses import engine_url
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import LOADS_PATH, EngineClient, EngineError
from slime.engines.client import num_requests
from slime.errors import RunFailed, UserError
from slime.log import get_logger

logger = get_logger(__name__)

_COMMAND = "slime engines"


class EngineOps(Protocol):
    """What is asked of `slime.cluster.engines.Engines`."""

    @property
    def routers(self) -> Routers: ...
    @property
    def answers_alone(self) -> bool: ...
    def drop_fleets(self) -> None:
        """Close connections to engines that are not those of the table."""

    def end(self, engine: EngineEntry) -> None:
        """One of the run's own, for good."""

    def admit(self) -> None:
        """Let those that are taken in have requests."""


class ExternalEngines:
    """Who joins, leaves and dies, beside the engines that the run has started.

    Args:
        desk: orders; None where nobody can give any.
        shares_gpus: trainer and engines take turns with the memory of the same GPUs.

    Attributes:
        named: URLs of --rollout-external-engine-addrs.
    """

    def __init__(
        self,
        config: Config,
        table: EngineTable,
        company: EngineOps,
        desk: CommandInbox | None,
        *,
        shares_gpus: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.named = named(config)
        self._config = config
        self._table = table
        self._company = company
        self._desk = desk
        self._shares_gpus = shares_gpus
        self._tolerant = config.fault_tolerance.use_fault_tolerance
        self._signs = LivenessProbe(clock)
        self._num_talks = 0
        self._clock, self._to_take_out, self._next_try = clock, set[str](), 0.0

    def check_named(self) -> None:
        """At the launch, before anything is started: each of them can take part.

        Raises:
            UserError: names the address.
        """
        self._check_policy()
        other: tuple[str, engine_fit.Said] | None = None
        for engine in self._external():
            url = engine.name
            said = self._check(url, other)
            engine.ranks = said.num_ranks
            other = other or (url, said)

    def _check_policy(self) -> None:
        own = [
            engine
            for engine in self._table.engines.values()
            if engine.is_policy and not engine.is_external
        ]
        policy = self._config.engine.router.get("policy") or ""
        if self.named and policy == "power_of_two" and len(own) < 2:
            raise UserError(
                f"--router-policy {policy} needs two engines of the run's own beside "
                "--rollout-external-engine-addrs",
                why="the router wants to be started with two engines, and these get the run's "
                "key, which is not for"
                " engines that somebody else has started",
                fix="take another policy, cache_aware for one",
            )

    def look(self) -> None:
        """Hear who has gone, and obey orders; never waits for an answer of those that are only
        watched.

        Raises:
            RunFailed: one that had requests is gone, without --use-fault-tolerance or as the last
                one.
        """
        self._lose(self._signs.gone([engine.url for engine in self._external() if engine.urls]))
        self._take_out_late()
        for order in self._desk.take() if self._desk is not None else ():
            if self._num_talks and order.verb != "list":
                continue  # the desk gives it again
            assert self._desk is not None
            self._desk.answer(order, self._obey(order))

    def _take_out_late(self) -> None:
        """Those that were lost while the router did not answer: back alive, they would get requests
        and no weights."""
        if self._to_take_out and self._clock() >= self._next_try:
            self._next_try = self._clock() + deadlines.EXTERNAL_ENGINES_TRY_AGAIN
            self._to_take_out -= {
                engine.url for engine in self._external() if engine.urls
            }  # they have joined again
            self._to_take_out = {url for url in self._to_take_out if not self._leave_router(url)}

    def poll_for_deaths(self, what: str = "") -> None:
        """Hear now who has gone. Raises as `look`.

        Args:
            what: was being done, for the message.
        """
        self._lose(
            self._signs.gone_now([engine.url for engine in self._external() if engine.runs]), what
        )

    @contextlib.contextmanager
    def freeze_membership(self) -> Iterator[None]:
        """Within, all are talked to."""
        self._num_talks += 1
        try:
            yield
        finally:
            self._num_talks -= 1

    @contextlib.contextmanager
    def newcomers_are_blamed(self) -> Iterator[None]:
        """A push that fails is repeated without those who would have got their first weights with
        it: somebody else's mistake must not end the run."""
        lost = self._table.num_lost
        try:
            yield
        except UserError as error:
            if isinstance(error, ActorLost) and error.names:
                raise  # trainers are gone: that explains the push
            newcomers = [engine for engine in self._external() if engine.state is State.REJOINING]
            if self._table.num_lost == lost:  # else somebody has died of it
                for engine in newcomers:
                    self.lost(engine, f"did not get its first weights: {error.what}")
            raise

    def close(self) -> None:
        self._signs.close()
        if self._desk is not None:
            self._desk.close()

    # -- joining
    # ----------------------------------------------------------------------------------------------

    def add(self, address: str) -> str:
        """Let an engine join; what is to be said of it.

        Raises:
            UserError: it is there already, or cannot take part.
        """
        url = engine_url(address, f"{_COMMAND} add")
        there = next(
            (engine for engine in self._table.engines.values() if url in engine.urls), None
        )
        if there is not None:
            raise UserError(
                f"{url} is an engine of this run already", why=f"it is {state_of(there)}"
            )
        if url in self._company.routers.urls.values():
            raise UserError(f"{url} is the router of this run, no engine")
        warnings: list[str] = []
        keys.external(url)
        said = self._check(url, self._somebody(), warnings.append)
        self._table.joined(url, said.num_ranks)
        if self._config.debug.debug_rollout_only:
            self._table.rejoin()
            self._company.admit()
            return "\n".join(
                [
                    f"{url} gets requests, with the weights that it has: there is no trainer",
                    *warnings,
                ]
            )
        logger.info("%s joins: it gets weights with the next push, then requests", url)
        return "\n".join([f"{url} gets weights with the next push, then requests", *warnings])

    def _check(
        self,
        url: str,
        other: tuple[str, engine_fit.Said] | None,
        warn: Callable[[str], None] | None = None,
    ) -> engine_fit.Said:
        if self._shares_gpus:
            raise UserError(
                f"the engine at {url} cannot take part with --colocate",
                why="trainer and engines take turns with the memory of their GPUs, which is not "
                "asked of an engine that"
                " somebody else has started; and handles to weights on a GPU reach the run's own "
                "engines only",
                fix="pass --no-colocate, and --rollout-num-gpus for engines of the run's own "
                "beside it",
            )
        if not self._company.answers_alone:
            raise UserError(
                f"the engine at {url} cannot stand beside prefill and decode servers",
                why="their router sends every request to a pair",
                fix="give --sglang-config a regular server group, or leave the engine out",
            )
        said = engine_fit.ask(url)
        engine_fit.check_fit(
            self._config, url, said, other, warn or (lambda text: logger.warning("%s", text))
        )
        return said

    def _somebody(self) -> tuple[str, engine_fit.Said] | None:
        """An engine that takes part, and what it says; None when none is there, or does not
        answer."""
        for engine in self._table.policy:
            with contextlib.suppress(UserError):
                return engine.url, engine_fit.ask(engine.url)
        return None

    # -- leaving
    # ----------------------------------------------------------------------------------------------

    def remove(self, wanted: str) -> str:
        """Let an engine leave; what is to be said of it.

        Args:
            wanted: its address, or its name ("engine-1").
        Raises:
            UserError: there is no such engine, it is the last one that serves, or it cannot be done
                without.
        """
        engine = self._find(wanted)
        name = engine.url if engine.is_external else f"{engine.name} ({engine.url})"
        if not (engine.is_external or engine.can_restart):
            raise UserError(
                f"{name} cannot leave",
                why="it serves another model, or is one half of a pair: others rely on it",
            )
        if [one for one in self._table.those(State.SERVING) if one.is_policy] == [engine]:
            raise UserError(
                f"{name} cannot leave: it is the last engine that serves",
                why="nobody would generate any more",
                fix=f"let another one join first ({_COMMAND} add), and wait for the push after "
                "which it serves",
            )
        if engine.state is State.SERVING and not self._leave_router(engine.url):
            raise UserError(
                f"{name} cannot leave now: the router does not let go of it",
                why="it would get requests, and no weights any more",
                fix="try again in a minute",
            )
        served = engine.state is State.SERVING
        self._table.left(engine.number)
        left = self._drain(engine.url) if served else True
        self._company.drop_fleets()
        if not engine.is_external:
            self._company.end(engine)
        logger.info("%s has left (%s remove), %d go on", name, _COMMAND, len(self._table.policy))
        done = f"{name} has left" + ("" if engine.is_external else ", and its server was ended")
        return (
            done if left else f"{done}; some of its requests may be lost, and are then sent again"
        )

    def _find(self, wanted: str) -> EngineEntry:
        named = next(
            (engine for engine in self._table.engines.values() if wanted in engine.parts), None
        )
        url = "" if named is not None else engine_url(wanted, f"{_COMMAND} remove")
        found = named or next(
            (engine for engine in self._table.engines.values() if url in engine.urls[:1]), None
        )
        if found is None:
            there = ", ".join(
                engine.urls[0] for engine in self._table.engines.values() if engine.urls
            )
            raise UserError(f"{url} is no engine of this run", why=f"there are {there or 'none'}")
        if not found.urls:
            raise UserError(
                f"{found.name} cannot leave while it is {state_of(found)}",
                why="it died, and is being started again",
            )
        return found

    def _leave_router(self, url: str) -> bool:
        try:
            self._company.routers.take_out(url)
        except (
            EngineError
        ) as error:  # the router goes on sending requests there, which may fail and are sent again
            logger.warning("%s is still behind the router: %s", url, error)
            return False
        return True

    def _drain(self, url: str) -> bool:
        """Have its requests come back, aborted with what they have; whoever sent them goes on
        elsewhere.

        Returns:
            False: it still had some, or does not answer.
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

    # -- death
    # ----------------------------------------------------------------------------------------------

    def lost(self, engine: EngineEntry, how: str, what: str = "") -> None:
        """It does not answer any more, or was refused: it is taken out and forgotten.

        Args:
            what: was being done with it.
        Raises:
            RunFailed: it had requests, and there is no --use-fault-tolerance, or no other engine.
        """
        url = engine.url
        served = engine.state is State.SERVING
        self._table.left(engine.number)
        self._table.num_lost += 1
        self._company.drop_fleets()
        said = f"{what}{': ' if what else ''}the external engine {url} {how}"
        if served and not self._tolerant:
            raise RunFailed(
                said,
                why="the run had requests there, and does not start it again: somebody else did",
                fix="with --use-fault-tolerance the run goes on as long as another engine serves",
            )
        if not self._leave_router(url):
            self._to_take_out.add(url)
        if not any(one.is_policy for one in self._table.engines.values()):
            raise RunFailed(
                said,
                why="it was the last engine",
                fix="more than one engine, or engines of the run's own",
            )
        logger.warning(
            "%s; it is taken out, %d go on; %s add takes it back",
            said,
            len(self._table.policy),
            _COMMAND,
        )

    def _lose(self, urls: Sequence[str], what: str = "") -> None:
        for engine in [engine for engine in self._external() if engine.urls and engine.url in urls]:
            self.lost(engine, "does not answer any more: nobody listens there", what)

    # -- orders
    # ----------------------------------------------------------------------------------------------

    def _obey(self, order: EngineCommand) -> dict[str, Any]:
        verbs = {"add": self.add, "remove": self.remove}
        try:
            if order.verb == "list":
                engines = list(self._table.engines.values())
                counts = asyncio.run(_counts([next(iter(engine.urls), "") for engine in engines]))
                return {"engines": [_row(*both) for both in zip(engines, counts, strict=True)]}
            if order.verb not in verbs:
                raise UserError(f"there is no order {order.verb!r}", fix="add, remove or list")
            return {"said": verbs[order.verb](order.url)}
        except RunFailed:
            raise
        except UserError as error:
            logger.warning("%s %s %s: %s", _COMMAND, order.verb, order.url, error)
            return {"refused": {"what": error.what, "why": error.why, "fix": error.fix}}
        except (
            OSError,
            ValueError,
            EngineError,
        ) as error:  # strange answers of what somebody else runs
            logger.warning("%s %s %s failed", _COMMAND, order.verb, order.url, exc_info=True)
            return {
                "refused": {
                    "what": f"{type(error).__name__}: {error}",
                    "why": "",
                    "fix": "see the driver's log",
                }
            }

    def _external(self) -> list[EngineEntry]:
        return [engine for engine in self._table.engines.values() if engine.is_external]


def state_of(engine: EngineEntry) -> str:
    """In a word."""
    return (
        "joining"
        if engine.is_external and engine.state in (State.STARTED, State.REJOINING)
        else engine.state.value
    )


async def _counts(urls: Sequence[str]) -> list[str]:
    """Of each engine: how many requests it has, as text."""

    async def of(url: str) -> str:
        if not url:
            return "-"
        async with EngineClient(url, timeout=deadlines.EXTERNAL_ENGINES_ASK) as engine:
            try:
                return str(num_requests(await engine.get(LOADS_PATH)))
            except EngineError:
                return "no answer"

    return list(await asyncio.gather(*map(of, urls)))


def _row(engine: EngineEntry, requests: str) -> dict[str, Any]:
    kind = "external" if engine.is_external else "own" if engine.is_policy else "another model's"
    name = "" if engine.is_external else engine.name
    url = next(iter(engine.urls), "")
    return {"name": name, "url": url, "state": state_of(engine), "kind": kind, "requests": requests}
