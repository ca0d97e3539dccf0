"""Which engines are restarted when, in which order, and when that ends the run; nothing is started
here."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.cluster import engines as module
from slime.cluster import open_waits, waiting
from slime.cluster import routers as routers_module
from slime.cluster.engine_actor import ServerExit
from slime.cluster.engine_table import (
    CACHE,
    GRAPHS,
    MAX_RESTARTS,
    WEIGHTS,
    EngineEntry,
    EngineTable,
    State,
)
from slime.cluster.engines import EngineHostMemory, Engines
from slime.cluster.external_engines import ExternalEngines
from slime.cluster.gpu_memory import EngineMemory, GpuMemoryOwner, MemoryHolder
from slime.cluster.routers import Routers
from slime.cluster.waiting import ActorDied, NamedActor
from slime.cluster.weight_push import WeightPush
from slime.config import make_config
from slime.engines.api import EngineError
from slime.engines.fleet import Fleets
from slime.errors import RunFailed, UserError
from slime.weights.transport import EngineSlots

KILLED = "was killed (SIGKILL)"


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Handle:
    """Of an engine's or the router's actor; a start is a `Future`, which the test completes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.worker = world, name, NamedActor(name)

    def server_exit(self) -> Future[Any]:
        return done(self.world.dead.get(self.name))

    def kill(self, how: str) -> Future[Any]:
        self.world.log.append(f"out {self.name[-1]}")
        pid = 4711
        if self.name == "router" and self.name in self.world.dead:
            pid = self.world.dead[self.name].pid
        return done(ServerExit(how, "last words", "", pid=pid))

    def begin_start(self, model_path: str, meeting: None) -> Future[Any]:
        self.world.log.append(f"start {self.name[-1]}")
        self.world.dead.pop(self.name, None)
        self.world.starts.append((int(self.name[-1]), Future()))
        return self.world.starts[-1][1]

    def begin_router(
        self, urls: list[str], external: list[str], pairs: None, port: int | None
    ) -> Future[Any]:
        self.world.log.append(f"router at {port}")
        self.world.behind_router = {int(url.split("-")[1][0]) for url in urls}
        self.world.dead.pop(self.name, None)
        return done(f"http://router:{port}")


class World:
    """Two engines, a router and a trainer, and what happens to them."""

    def __init__(self, *, tolerant: bool = True, **limits: Any) -> None:
        self.log: list[str] = []
        self.dead: dict[str, ServerExit] = {}
        self.starts: list[tuple[int, Future[str]]] = []
        self.behind_router = {0, 1}
        self.refused, self.hanging = False, set[int]()
        self.num_pushes = 0
        self.fails: Callable[[int], None] = lambda number: None
        config = make_config(
            use_fault_tolerance=tolerant, check_canary=False, hf_checkpoint="model"
        )
        self.engines = engines = Engines.__new__(Engines)  # no actors: that would need Ray
        engines.config, engines.nodes, engines.restarts_immediately = config, {"n"}, True
        engines._tolerant, engines._health, engines._checking_seconds = tolerant, None, 0.0
        engines._fleets = Fleets(None, lambda: engines.table.groups)
        engines._memory = EngineHostMemory(())
        engines._start_seconds = limits.get("start_seconds", 600.0)
        engines._should_stop = limits.get("should_stop", lambda: False)
        policy, group = (
            SimpleNamespace(name="policy", is_policy=True),
            SimpleNamespace(worker_type="regular"),
        )
        engines._parts = parts = [  # type: ignore[assignment]
            SimpleNamespace(
                name=f"engine-{n}",
                place=SimpleNamespace(number=n, num_nodes=1),
                is_first=True,
                slots=(n,),
                model=policy,
                group=group,
            )
            for n in (0, 1)
        ]
        engines._handles = {f"engine-{n}": Handle(self, f"engine-{n}") for n in (0, 1)}  # type: ignore[assignment, misc]
        engines.routers = self.routers = Routers.__new__(Routers)
        self.routers._config = config
        self.routers._parts, self.routers._models = parts, {"policy": policy}  # type: ignore[assignment, dict-item]
        self.routers._engines, self.routers._should_stop = engines._handles, lambda: False
        self.routers.handles = {"policy": Handle(self, "router")}  # type: ignore[dict-item]
        self.routers.urls = {"policy": "http://router:4000"}
        self.routers._health, self.routers._fleet, self.routers._restarts = None, None, 0
        self.routers._last_pid, self.routers._deaths = {}, Counter()
        engines.table = self.table = EngineTable([EngineEntry(n, (f"engine-{n}",)) for n in (0, 1)])
        for n in (0, 1):
            self.table.mark_launched(n, [f"http://engine-{n}/0"])
        engines.external = ExternalEngines(config, self.table, engines, None, shares_gpus=False)
        engines._stopped = set()
        trainers: Any = SimpleNamespace(
            nodes=["n"], connect_engines=self.connect, update_weights=self.push
        )
        self.weights = WeightPush(engines, trainers, None, None, tolerant=tolerant)

    @property
    def serving(self) -> set[int]:
        return {engine.number for engine in self.table.in_state(State.SERVING)}

    # -- what is done to them ----------------------------------------------------------------------

    def die(self, number: int) -> None:
        url = self.table.engines[number].url
        self.dead[f"engine-{number}"] = ServerExit(KILLED, "last words", url, pid=4711)

    def come_up(self) -> None:
        """All starts end well."""
        for count, (number, start) in enumerate(self.starts):
            if not start.done():
                start.set_result(f"http://engine-{number}/{count + 1}")

    # -- what they do ------------------------------------------------------------------------------

    def connect(self, layout: list[Any], version: int, *, on_this_node: bool) -> None:
        assert on_this_node and len(layout) == len(self.table.policy)
        self.log.append("connect")

    def push(self, tokens: list[int]) -> tuple[dict[str, float], list[float]]:
        self.num_pushes += 1
        self.fails(self.num_pushes)
        self.log.append("push")
        return {"perf/weight_version": 1.0}, []

    async def remove_worker(self, router_url: str, url: str, timeout: float) -> None:
        self.behind_router.discard(int(url.split("-")[1][0]))

    async def register_workers(self, router_url: str, urls: list[str], timeout: float) -> None:
        number = int(urls[0].split("-")[1][0])
        if self.refused or number in self.hanging:
            raise EngineError(urls[0], "no")
        self.log.append(f"router {number}")
        self.behind_router.add(number)


def wait_at_once(
    refs: list[Future[Any]], num_returns: int, timeout: float
) -> tuple[list[Any], list[Any]]:
    return [ref for ref in refs if ref.done()], [ref for ref in refs if not ref.done()]


def results(asked: Mapping[Any, Future[Any]], *_: Any, **__: Any) -> list[Any]:
    return [ref.result() for ref in asked.values()]


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """``worlds(…)``: a `World`, the latest one behind the router."""
    latest: list[World] = []

    def make(**given: Any) -> World:
        latest.append(World(**given))
        return latest[-1]

    async def remove(*given: Any) -> None:
        await latest[-1].remove_worker(*given)

    async def register(*given: Any, **named: Any) -> None:
        await latest[-1].register_workers(*given, **named)

    for of_ray in (module, waiting):
        monkeypatch.setattr(of_ray, "ray", SimpleNamespace(wait=wait_at_once))
    monkeypatch.setattr(module, "wait_for", results)
    monkeypatch.setattr(
        module, "all_answered", lambda asked: all(ref.done() for ref in asked.values())
    )
    monkeypatch.setattr(routers_module, "wait_for", results)
    monkeypatch.setattr(routers_module, "remove_worker", remove)
    monkeypatch.setattr(routers_module, "register_workers", register)
    monkeypatch.setattr("slime.deadlines.ENGINES_POLL", 0.0)
    monkeypatch.setattr("slime.deadlines.ENGINES_DEATH_AFTER_ERROR", 0.0)
    return make


Worlds = Callable[..., World]


def test_a_dead_engine_leaves_at_once_and_comes_back_with_a_push(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds()
    world.die(1)
    world.engines.poll_for_deaths()
    assert world.log == ["out 1", "start 1"] and world.behind_router == {0}
    assert (
        "engine-1 (pid 4711) was killed (SIGKILL); it is started again; engines that continue "
        "meanwhile: 1" in caplog.text
    )
    world.weights.push()  # not up yet: the other one goes on alone
    assert world.log[2:] == ["connect", "push"] and world.serving == {0}
    world.come_up()
    world.engines.poll()
    assert world.behind_router == {0}, "no request before it has the weights"
    world.weights.push()
    assert world.log[4:] == ["connect", "push", "router 1"] and world.serving == {0, 1}
    metrics = world.engines.metrics()
    assert (
        metrics["rollout/engine_restarts"] == 1 and metrics["rollout/engine_restart_seconds"] >= 0
    )
    none = {
        "rollout/engine_restarts": 0,
        "rollout/router_restarts": 0,
        "perf/engine_checks_time": 0,
    }
    assert world.engines.metrics() == none


def test_late_news_of_the_former_server_are_no_death(worlds: Worlds) -> None:
    world = worlds()
    former = ServerExit(KILLED, "", world.table.engines[1].url)
    world.engines.on_server_exit("engine-1", former)
    world.engines.on_server_exit("engine-1", former)
    world.come_up()
    world.weights.push()
    world.engines.on_server_exit("engine-1", former)
    assert world.table.num_lost == 1 and not world.table.away


def test_without_the_flag_the_death_of_the_router_ends_the_run(worlds: Worlds) -> None:
    with pytest.raises(RunFailed, match=r"router \(pid 7\) was killed"):
        worlds(tolerant=False).engines.on_server_exit(
            "router", ServerExit(KILLED, "its log", "http://router", pid=7)
        )


def test_a_router_that_dies_is_started_again_at_its_address(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds()
    former = world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=7)
    world.engines.poll_for_deaths()
    assert world.log == [
        "out r",
        "router at 4000",
        "router 0",
        "router 1",
    ] and world.behind_router == {0, 1}
    assert re.search(
        r"router \(pid 7\) was killed .* started again within .* http://router:4000", caplog.text
    )
    world.engines.on_server_exit("router", former)
    assert len(world.log) == 4, "its end is told twice, by a watch and when it is asked for"
    assert world.engines.metrics()["rollout/router_restarts"] == 1


def test_who_died_with_the_router_is_not_behind_the_new_one(worlds: Worlds) -> None:
    world = worlds()
    world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=7)
    world.die(1)
    world.engines.on_server_exit("router", world.dead["router"])
    assert world.behind_router == world.serving == {0}
    world.come_up()
    world.weights.push()
    assert world.behind_router == world.serving == {0, 1}


def test_a_router_that_dies_before_an_engine_comes_back_is_no_refusal(worlds: Worlds) -> None:
    world = worlds()
    world.die(1)
    world.engines.poll_for_deaths()
    world.come_up()

    def die(number: int) -> None:
        world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=7)

    world.fails = die
    world.weights.push()
    assert world.serving == world.behind_router == {0, 1}


def test_a_router_that_dies_too_often_ends_the_run(worlds: Worlds) -> None:
    world = worlds()

    def die(pid: int) -> None:
        world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=pid)
        world.engines.poll_for_deaths()

    for pid in range(MAX_RESTARTS):
        die(pid)
    world.engines.reset_death_counts()
    for pid in range(10, 10 + MAX_RESTARTS):
        die(pid)
    with pytest.raises(RunFailed, match=r"router \(pid 20\) died 4 times .* was killed"):
        die(20)


def test_an_engine_that_hangs_when_the_router_is_started_again_is_lost(worlds: Worlds) -> None:
    world = worlds()
    world.hanging = {1}
    world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=7)
    world.engines.poll_for_deaths()
    assert world.log == ["out r", "router at 4000", "router 0", "out 1", "start 1"]
    assert world.behind_router == world.serving == {0}


def test_a_router_that_hangs_is_started_again(worlds: Worlds) -> None:
    world = worlds()
    silent = {"silent": lambda fleet: ["http://router:4000"], "begin": lambda: None}
    world.routers._health = SimpleNamespace(timeout=3.0, **silent)  # type: ignore[assignment]
    world.routers._fleet = object()  # type: ignore[assignment]
    world.engines.kill_hanging()
    assert world.log == ["out r", "router at 4000", "router 0", "router 1"]


def test_without_the_flag_a_death_ends_the_run_and_says_what_was_done(worlds: Worlds) -> None:
    world = worlds(tolerant=False)
    world.die(0)
    with (
        pytest.raises(
            RunFailed, match=r"^taking memory back: engine-0 \(pid 4711\) was killed \(SIGKILL\)"
        ) as failed,
        world.engines.explain_failures("taking memory back"),
    ):
        raise EngineError("http://engine-0/0", "connection reset")
    assert "--use-fault-tolerance" in failed.value.fix and world.engines.metrics() == {}


def test_an_error_that_no_death_explains_is_worded_once(worlds: Worlds) -> None:
    world = worlds()
    with (
        pytest.raises(RunFailed, match=r"^giving memory up: http://engine-0/0: no") as failed,
        world.engines.explain_failures(),
        world.engines.explain_failures("giving memory up"),
    ):
        raise EngineError("http://engine-0/0", "no", 500)
    assert "take turns" in failed.value.why
    with pytest.raises(ZeroDivisionError), world.engines.explain_failures("training"):
        raise ZeroDivisionError


def test_dying_too_often_ends_the_run_with_its_last_words(worlds: Worlds) -> None:
    world = worlds()

    def die_and_return() -> None:
        world.die(0)
        world.engines.poll_for_deaths()
        world.come_up()
        world.weights.push()

    for _ in range(3):
        for _ in range(MAX_RESTARTS):
            die_and_return()
        world.engines.reset_death_counts()
    for _ in range(MAX_RESTARTS):
        die_and_return()
    world.die(0)
    with pytest.raises(
        RunFailed, match=r"engine-0 \(pid 4711\) died 4 times .* was killed \(SIGKILL\)"
    ) as failed:
        world.engines.poll_for_deaths()
    assert "last words" in failed.value.why and 0 not in world.behind_router


def test_a_start_that_fails_is_tried_again_so_many_times(worlds: Worlds) -> None:
    world = worlds()
    world.die(0)
    world.engines.poll_for_deaths()
    for attempt in range(MAX_RESTARTS):
        assert len(world.starts) == attempt + 1
        world.starts[-1][1].set_exception(UserError("out of memory"))
        if attempt + 1 < MAX_RESTARTS:
            world.engines.poll()
    with pytest.raises(UserError, match="out of memory"):
        world.engines.poll()


def test_an_engine_that_the_router_refuses_is_lost_again(worlds: Worlds) -> None:
    world = worlds()
    world.die(0)
    world.engines.poll_for_deaths()
    world.come_up()
    world.refused = True
    world.weights.push()
    assert world.log[-2:] == ["out 0", "start 0"] and world.serving == {1}


def test_the_last_engine_is_waited_for(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world, polls = worlds(), []

    def poll(
        refs: list[Future[Any]], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        polls.append(timeout)
        assert re.search(
            r"\(restarting engines\) for engine-0, engine-1$", open_waits.describe()
        ), open_waits.describe()
        if len(polls) == 5:
            world.come_up()
        return [ref for ref in refs if ref.done()], []

    monkeypatch.setattr(waiting, "ray", SimpleNamespace(wait=poll))
    world.die(0)
    world.die(1)
    world.weights.push()
    assert world.behind_router == {0, 1} and len(polls) == 5


def test_the_first_of_all_is_enough(worlds: Worlds) -> None:
    world = worlds()
    world.die(0)
    world.die(1)
    world.engines.poll_for_deaths()
    world.starts[1][1].set_result("http://engine-1/1")
    world.weights.push()
    assert world.behind_router == {1} and [engine.number for engine in world.table.away] == [0]


def test_waiting_ends_with_its_deadline_and_with_sigterm(worlds: Worlds) -> None:
    for limits, ends in (
        ({"start_seconds": 0.0}, module.DeadlinePassed),
        ({"should_stop": lambda: True}, None),
    ):
        world = worlds(**limits)
        world.die(0)
        world.die(1)
        with pytest.raises(ends or module.StopRequested) as caught:
            world.weights.push()
        assert ends is None or "engine-0, engine-1 did not come up again" in str(caught.value)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["die 0", "die 1", "come up", "look", "push", "rollout", "die r"]),
        max_size=30,
    )
)
def test_in_any_order_requests_go_only_to_engines_with_the_current_weights(
    worlds: Worlds, events: list[str]
) -> None:
    world = worlds()
    pushed, pids = {engine.url for engine in world.table.policy}, itertools.count()

    def note(number: int) -> None:
        pushed.clear()
        pushed.update(engine.url for engine in world.table.policy)

    world.fails = note
    for event in events:
        try:
            if event == "die r":
                world.dead["router"] = ServerExit(KILLED, "", "http://router:4000", pid=next(pids))
                world.engines.poll_for_deaths()
            elif event.startswith("die") and world.table.engines[int(event[-1])].runs:
                world.die(int(event[-1]))
            elif event == "come up":
                world.come_up()
            elif event == "look":
                world.engines.poll()
            elif event == "push":
                world.engines.poll_for_deaths()
                if not world.table.policy:
                    world.come_up()
                world.weights.push()
                assert not world.table.away or any(not start.done() for _, start in world.starts)
            elif event == "rollout":
                world.engines.reset_death_counts()
        except RunFailed as failed:
            assert "died 4 times" in str(failed)
            return
        assert (
            world.behind_router == world.serving == {engine.number for engine in world.table.policy}
        )
        assert {engine.url for engine in world.table.policy} <= pushed


# -- pushes ----------------------------------------------------------------------------------------


def test_a_restarted_engine_gets_weights_before_requests(worlds: Worlds) -> None:
    world = worlds()
    world.weights.connect()
    world.weights.push()
    world.die(0)
    world.engines.poll_for_deaths()
    world.weights.push()
    world.come_up()
    world.weights.push()
    world.weights.push()
    without, back = ["out 0", "start 0", "connect", "push"], ["connect", "push", "router 0"]
    assert world.log == ["connect", "push", *without, *back, "push"]


def test_a_push_that_an_engine_died_of_is_repeated_without_it(worlds: Worlds) -> None:
    world = worlds()
    world.weights.connect()

    def die_at_first(number: int) -> None:
        if number == 1:
            world.die(1)
            raise UserError("connection refused")

    world.fails = die_at_first
    assert world.weights.push() == {"perf/weight_version": 1.0}
    assert world.log == ["connect", "out 1", "start 1", "connect", "push"]


def test_a_push_that_an_engine_hangs_in_is_repeated_without_it(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives, so that nobody hears of a death; it does not answer a plain question
    either."""
    world = worlds()
    world.weights.connect()
    silent = EngineError("http://engine-1/0", "gave no answer within 3 s")

    class Fleet:
        urls = ("http://engine-0/0", "http://engine-1/0")

        def start_get(self, url: str, path: str, timeout: float) -> Future[Any]:
            answer: Future[Any] = done({})
            if url == silent.url:
                answer = Future()
                answer.set_exception(silent)
            return answer

    def hang_at_first(number: int) -> None:
        if number == 1:
            raise UserError("failed in the phase 'pause'")

    world.engines._health = SimpleNamespace(timeout=3.0, begin=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(Engines, "fleet", Fleet())
    world.fails = hang_at_first
    assert world.weights.push() == {"perf/weight_version": 1.0}
    assert world.log == ["connect", "out 1", "start 1", "connect", "push"]


def test_engines_are_not_blamed_for_the_death_of_a_trainer(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that hang in a broadcast whose sender is dead are well."""
    world = worlds()
    monkeypatch.setattr(Engines, "_drop_unresponsive", lambda self: pytest.fail("they are asked"))

    def die(number: int) -> None:
        raise ActorDied("trainer-0 died").naming(NamedActor("trainer-0"))

    world.fails = die
    with pytest.raises(ActorDied):
        world.weights.push()
    assert world.weights.is_pushing and world.serving == {0, 1}, (
        "who begins again must have them go on"
    )


@pytest.mark.parametrize("tolerant", [True, False])
def test_a_push_that_fails_for_another_reason_ends_the_run(tolerant: bool, worlds: Worlds) -> None:
    world = worlds(tolerant=tolerant)

    def fail(number: int) -> None:
        raise UserError("weights differ")

    world.fails = fail
    with pytest.raises(UserError, match="weights differ"):
        world.weights.push()
    assert world.num_pushes == 1


def test_an_engine_that_joins_gets_weights_before_requests(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without --use-fault-tolerance."""
    world = worlds(tolerant=False)
    world.weights.connect()
    world.weights.push()
    world.table.mark_joined("http://engine-2/0", 1)
    world.engines.poll()
    assert world.behind_router == {0, 1} and world.engines.layout[-1].url != "http://engine-2/0"
    world.weights.push()
    assert world.log == ["connect", "push", "connect", "push", "router 2"] and world.serving == {
        0,
        1,
        2,
    }
    assert world.engines.layout[-1] == EngineSlots("http://engine-2/0", (), 1)
    assert "http://engine-2/0 serves after" in caplog.text


def test_a_newcomer_that_cannot_be_pushed_to_ends_no_run(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds(tolerant=False)
    world.weights.connect()
    world.table.mark_joined("http://engine-2/0", 1)

    def refuse(number: int) -> None:
        if number == 1:
            raise UserError("the shapes differ")

    world.fails = refuse
    world.weights.push()
    assert world.log == ["connect", "connect", "connect", "push"] and world.serving == {0, 1}
    assert "http://engine-2/0 did not get its first weights: the shapes differ" in caplog.text
    assert len(world.table.engines) == 2


def test_the_end_of_one_that_has_left_is_no_death(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(tolerant=False)
    world.weights.connect()
    monkeypatch.setattr(ExternalEngines, "_leave_router", lambda self, url: True)
    monkeypatch.setattr(ExternalEngines, "_drain", lambda self, url: True)
    server_exit = ServerExit(KILLED, "", world.table.engines[1].url)
    world.engines.external.remove("engine-1")
    world.engines.on_server_exit("engine-1", server_exit)
    world.weights.push()
    assert world.log == ["connect", "out 1", "connect", "push"] and world.serving == {0}


# -- taking turns with memory ----------------------------------------------------------------------


@pytest.mark.parametrize("turn", [MemoryHolder.TRAINER, MemoryHolder.PUSH, MemoryHolder.ENGINES])
def test_an_engine_starts_while_the_others_generate(
    turn: MemoryHolder, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    log, table = world.log, world.table

    def release(tags: Any) -> None:
        for url, todo in sorted(table.to_release(table.policy, tags).items()):
            log.append(f"{url[7:15]} releases " + " ".join(sorted(todo)))
            table.mark_released(url, todo)

    def resume(tags: Any) -> None:
        for url, todo in sorted(table.to_resume(table.policy, tags).items()):
            log.append(f"{url[7:15]} resumes " + " ".join(sorted(todo)))
            table.mark_resumed(url, todo)

    def sleep(keep_weights: bool) -> dict[str, float]:
        log.append("sleep but for weights" if keep_weights else "sleep")
        return {}

    def wake() -> dict[str, float]:
        log.append("wake")
        return {}

    turns = world.weights.gpu_memory = GpuMemoryOwner(
        release, resume, sleep, wake, offload_train=True, offload_rollout=True
    )
    world.engines.restarts_immediately = False
    monkeypatch.setattr(
        Engines, "wait_for_restarts", lambda self, for_all: (world.come_up(), self.poll())
    )
    everything, rest = f"{GRAPHS} {CACHE} {WEIGHTS}", f"{GRAPHS} {CACHE}"
    turns.release_for_launch()
    if turn is not MemoryHolder.TRAINER:
        turns.onload_weights()
    if turn is MemoryHolder.ENGINES:
        world.weights.wake_engines()
    world.die(1)
    log.clear()
    world.engines.poll_for_deaths()
    if turn is MemoryHolder.ENGINES:
        assert log == ["out 1", "start 1"], (
            "the trainer sleeps, and what died has left its GPU to itself"
        )
    else:
        assert log == ["out 1"], "it does not start beside others' memory"
        log.clear()
        world.weights.push()  # to the survivor
        woken = [f"engine-0 releases {WEIGHTS}", "wake"] if turn is MemoryHolder.PUSH else []
        assert log == [
            *woken,
            "connect",
            "sleep but for weights",
            f"engine-0 resumes {WEIGHTS}",
            "push",
        ]
        log.clear()
        world.weights.wake_engines()
        assert log == ["sleep", f"engine-0 resumes {rest}", "start 1"]
    log.clear()
    world.weights.onload_trainer()
    assert log == [f"engine-0 releases {everything}", f"engine-1 releases {everything}", "wake"]
    assert world.serving == {0}, "it has no weights yet"
    log.clear()
    world.weights.push()
    assert log == [
        *(
            "connect",
            "sleep but for weights",
            f"engine-0 resumes {WEIGHTS}",
            f"engine-1 resumes {WEIGHTS}",
            "push",
        ),
        *("sleep", f"engine-0 resumes {rest}", f"engine-1 resumes {rest}", "router 1"),
    ]


def test_where_no_engine_is_left_it_starts_while_nobody_has_memory(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    log = world.log

    def note(word: str) -> Callable[..., dict[str, float]]:
        return lambda *_: log.append(word) or {}  # type: ignore[func-returns-value]

    def no_memory(tags: Any) -> None: ...

    turns = GpuMemoryOwner(
        no_memory, no_memory, note("sleep"), note("wake"), offload_train=True, offload_rollout=True
    )
    world.weights.gpu_memory, world.engines.restarts_immediately = turns, False
    monkeypatch.setattr(
        Engines, "wait_for_restarts", lambda self, for_all: (world.come_up(), self.poll())
    )
    turns.release_for_launch()
    for number in (0, 1):
        world.die(number)
    world.weights.push()
    expected = [
        "out 0", "out 1", "sleep", "start 0", "start 1", "wake", "connect", "sleep", "push",
        "sleep"
    ]  # fmt: skip
    assert log == [*expected, "router 0", "router 1"]


class DyingFleet:
    """Connections to servers that log what they are asked; the second one dies of the first request
    to resume."""

    def __init__(self, world: World) -> None:
        self.world, self.has_died = world, False

    def flush_cache(self, timeout: float, urls: list[str]) -> None: ...

    def post_to(self, path: str, bodies: dict[str, Any], timeout: float) -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        for url, body in bodies.items():
            if "resume" in path and url.startswith("http://engine-1") and not self.has_died:
                self.has_died = True
                self.world.die(1)
                outcomes[url] = EngineError(url, "connection reset")
            else:
                self.world.log.append(f"{url[7:15]} {path[1:8]} {' '.join(sorted(body['tags']))}")
                outcomes[url] = {}
        return outcomes


def test_an_engine_that_dies_of_taking_its_memory_back_for_a_push(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has its memory by then, and is not asked again before it has given it up."""
    world = worlds()
    log, fleet = world.log, DyingFleet(world)
    memory = EngineMemory(world.table, lambda engines: fleet, world.engines.explain_failures)  # type: ignore[arg-type, return-value]

    def note(*words: str) -> Callable[..., dict[str, float]]:
        return lambda *keep: log.append(words[any(keep)]) or {}  # type: ignore[func-returns-value]

    turns = world.weights.gpu_memory = GpuMemoryOwner(
        memory.release, memory.resume, note("sleep", "sleep but for weights"), note("wake"),
        offload_train=True, offload_rollout=True,
    )  # fmt: skip
    world.engines.restarts_immediately = False
    monkeypatch.setattr("slime.deadlines.ENGINES_DEATH_AFTER_DISCONNECT", 0.0)
    monkeypatch.setattr(
        Engines, "wait_for_restarts", lambda self, for_all: (world.come_up(), self.poll())
    )
    turns.release_for_launch()
    world.weights.connect()
    log.clear()
    world.weights.push()
    assert log == [
        *("sleep but for weights", f"engine-0 resume_ {WEIGHTS}", "out 1"),
        *(f"engine-0 release {WEIGHTS}", "wake", "connect"),
        *("sleep but for weights", f"engine-0 resume_ {WEIGHTS}", "push"),
    ]


def test_before_a_release_those_that_died_or_hang_are_left_out(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the dead first: they would not answer."""
    world = worlds()

    def end(fleet: Any) -> list[str]:
        world.log.append("end")
        return ["http://engine-1/0"]

    monkeypatch.setattr(Engines, "fleet", None)
    world.engines._health = SimpleNamespace(end=end, timeout=3)  # type: ignore[assignment]
    world.die(0)
    world.engines.stop_health_checks()
    assert world.log == ["out 0", "start 0", "end", "out 1", "start 1"]
    world.engines.stop_health_checks()
    assert world.log[5:] == [], "there is nobody to wait for"
