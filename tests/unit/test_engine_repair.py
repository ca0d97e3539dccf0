"""Which engines are restarted when, in which order, and when that ends the run; nothing is started here."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime.cluster.engine_repair import MOST_RESTARTS, EngineRepair, HealthChecks
from slime.cluster.engine_weights import EngineWeights
from slime.cluster.hand_over import CACHE, GRAPHS, WEIGHTS, HandOver, Holder

from slime.cluster import engine_repair
from slime.cluster.engine_actor import Obituary
from slime.config import make_config
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.errors import RunFailed, UserError

KILLED = "was killed (SIGKILL)"


class FakeEngines:
    """Two engines and a router; a start is a `Future`, which the test completes."""

    def __init__(self) -> None:
        self.serving = {0: "http://engine-0/0", 1: "http://engine-1/0"}
        self.part_urls = {"engine-0": self.serving[0], "engine-1": self.serving[1]}
        self.servers = {"engine-0": None, "engine-1": None, "router": None}
        self.behind_router = {0, 1}
        self.dead: dict[str, Obituary] = {}
        self.starts: list[tuple[int, Future[str]]] = []
        self.log: list[str] = []
        self.refused = False
        self.fleet = object()

    def obituaries(self, names: Sequence[str]) -> dict[str, Obituary | None]:
        return {name: self.dead.get(name) for name in names}

    def watch(self, judge: Any) -> Any:
        raise NotImplementedError

    def restartable(self, name: str) -> int | None:
        return int(name[-1]) if name.startswith("engine") else None

    def take_out(self, number: int) -> str:
        self.log.append(f"out {number}")
        del self.serving[number]
        self.behind_router.discard(number)
        return "last words"

    def begin_restart(self, number: int) -> dict[str, Any]:
        self.log.append(f"start {number}")
        self.dead.pop(f"engine-{number}", None)
        self.starts.append((number, Future()))
        return {f"engine-{number}": self.starts[-1][1]}

    def take_in(self, number: int, urls: Sequence[str]) -> None:
        assert number not in self.behind_router
        self.log.append(f"in {number}")
        self.serving[number] = self.part_urls[f"engine-{number}"] = urls[0]

    def put_behind_router(self, number: int) -> None:
        if self.refused:
            raise EngineError(self.serving[number], "no")
        self.log.append(f"router {number}")
        self.behind_router.add(number)

    def release_memory_of(self, number: int, tags: Sequence[str]) -> None:
        self.log.append(f"release {number} {' '.join(sorted(tags))}")

    # -- what happens to them ------------------------------------------------------------------------------

    def die(self, number: int) -> None:
        self.dead[f"engine-{number}"] = Obituary(KILLED, "last words", self.serving[number])

    def come_up(self) -> None:
        """All starts end well."""
        for count, (number, start) in enumerate(self.starts):
            if not start.done():
                start.set_result(f"http://engine-{number}/{count + 1}")


@pytest.fixture(autouse=True)
def futures_for_references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def wait(refs: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref.done()], [ref for ref in refs if not ref.done()]

    monkeypatch.setattr(engine_repair, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(engine_repair, "wait_for", lambda refs, *_, **__: [ref.result() for ref in refs])
    yield


def push(repair: EngineRepair) -> None:
    repair.ask()
    repair.bring_back()
    repair.admit()


def test_a_dead_engine_leaves_at_once_and_comes_back_with_a_push() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    engines.die(1)
    repair.ask()
    assert engines.log == ["out 1", "start 1"] and engines.behind_router == {0}
    push(repair)  # not up yet: the other one goes on alone
    assert engines.log == ["out 1", "start 1"] and set(engines.serving) == {0}
    engines.come_up()
    repair.look()
    assert engines.behind_router == {0}, "no request before it has the weights"
    repair.bring_back()
    assert set(engines.serving) == {0, 1} and engines.behind_router == {0}
    repair.admit()
    assert engines.log == ["out 1", "start 1", "in 1", "router 1"]
    metrics = repair.metrics()
    assert metrics["rollout/engine_restarts"] == 1 and metrics["rollout/engine_restart_seconds"] >= 0
    assert repair.metrics() == {"rollout/engine_restarts": 0}


def test_late_news_of_the_former_server_are_no_death() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    former = Obituary(KILLED, "", engines.serving[1])
    repair.heard("engine-1", former)
    repair.heard("engine-1", former)
    engines.come_up()
    push(repair)
    repair.heard("engine-1", former)
    assert repair.num_lost == 1 and not repair.down


def test_what_cannot_be_restarted_ends_the_run() -> None:
    with pytest.raises(RunFailed, match="router was killed"):
        EngineRepair(FakeEngines()).heard("router", Obituary(KILLED, "its log", "http://router"))


def test_dying_too_often_ends_the_run_with_its_last_words() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)

    def die_and_return() -> None:
        engines.die(0)
        repair.ask()
        engines.come_up()
        push(repair)

    for _ in range(3):
        for _ in range(MOST_RESTARTS):
            die_and_return()
        repair.rollout_completed()  # proved itself
    for _ in range(MOST_RESTARTS):
        die_and_return()
    engines.die(0)
    with pytest.raises(RunFailed, match=r"engine-0 died 4 times .* was killed \(SIGKILL\)") as failed:
        repair.ask()
    assert "last words" in failed.value.why and 0 not in engines.behind_router


def test_a_start_that_fails_is_tried_again_so_many_times() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    engines.die(0)
    repair.ask()
    for attempt in range(MOST_RESTARTS):
        assert len(engines.starts) == attempt + 1
        engines.starts[-1][1].set_exception(UserError("out of memory"))
        if attempt + 1 < MOST_RESTARTS:
            repair.look()
    with pytest.raises(UserError, match="out of memory"):
        repair.look()


def test_an_engine_that_the_router_refuses_is_lost_again() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    engines.die(0)
    repair.ask()
    engines.come_up()
    engines.refused = True
    push(repair)
    assert set(repair.down) == {0} and engines.log[-2:] == ["out 0", "start 0"] and set(engines.serving) == {1}


def test_the_last_engine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, polls = FakeEngines(), []

    def poll(refs: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        polls.append(timeout)
        if len(polls) == 5:
            engines.come_up()
        return [ref for ref in refs if ref.done()], []

    monkeypatch.setattr(engine_repair, "ray", SimpleNamespace(wait=poll))
    repair = EngineRepair(engines)
    engines.die(0)
    engines.die(1)
    push(repair)
    assert engines.behind_router == {0, 1} and len(polls) > 5


def test_the_first_of_all_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    engines.die(0)
    engines.die(1)
    repair.ask()
    engines.starts[1][1].set_result("http://engine-1/1")
    push(repair)
    assert engines.behind_router == {1} and set(repair.down) == {0}


def test_waiting_ends_with_its_deadline_and_with_sigterm() -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines, start_seconds=0.0)
    engines.die(0)
    engines.die(1)
    repair.ask()
    with pytest.raises(engine_repair.DeadlinePassed, match="engine-0, engine-1 did not come up again"):
        repair.bring_back()
    repair = EngineRepair(engines := FakeEngines(), should_stop=lambda: True)
    engines.die(0)
    engines.die(1)
    repair.ask()
    with pytest.raises(engine_repair.StopRequested):
        repair.bring_back()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["die 0", "die 1", "come up", "look", "push", "rollout"]), max_size=30))
def test_in_any_order_requests_go_only_to_engines_with_the_current_weights(events: list[str]) -> None:
    engines = FakeEngines()
    repair = EngineRepair(engines)
    pushed = set(engines.serving.values())
    for event in events:
        try:
            if event.startswith("die") and int(event[-1]) in engines.serving:
                engines.die(int(event[-1]))
            elif event == "come up":
                engines.come_up()
            elif event == "look":
                repair.look()
            elif event == "push":
                repair.ask()
                if not engines.serving:
                    engines.come_up()
                repair.bring_back()
                pushed = set(engines.serving.values())
                repair.admit()
                assert not repair.down or any(not start.done() for _, start in engines.starts)
            elif event == "rollout":
                repair.rollout_completed()
        except RunFailed as failed:
            assert "died 4 times" in str(failed)
            return
        assert engines.behind_router == set(engines.serving)
        assert {engines.serving[number] for number in engines.behind_router} <= pushed


# -- pushes ------------------------------------------------------------------------------------------------------------


class Pushing:
    """`EngineWeights` of trainers that log what they do; ``fails`` is called with the number of each push."""

    def __init__(self, engines: FakeEngines, repair: EngineRepair | None) -> None:
        self.log, self.fails = engines.log, lambda number: None
        self.num_pushes = 0
        trainers = SimpleNamespace(nodes=["n"], reporting_rank=0, call=self.connect)
        engines.layout, engines.nodes, engines.answers_alone = [], {"n"}, False  # type: ignore[attr-defined]
        config: Any = make_config()
        self.weights = EngineWeights(config, engines, trainers, self.push, None, repair)  # type: ignore[arg-type]

    def connect(self, method: str, *args: Any, **_: Any) -> None:
        self.log.append("connect")

    def push(self, method: str, tokens: list[int], what: str) -> list[Any]:
        self.num_pushes += 1
        self.fails(self.num_pushes)
        self.log.append("push")
        return [({"perf/weight_version": 1.0}, None)]


def test_a_restarted_engine_gets_weights_before_requests() -> None:
    engines = FakeEngines()
    pushing = Pushing(engines, repair := EngineRepair(engines))
    pushing.weights.connect()
    pushing.weights.update()
    engines.die(0)
    repair.ask()
    pushing.weights.update()
    engines.come_up()
    pushing.weights.update()
    pushing.weights.update()
    without, back = ["out 0", "start 0", "connect", "push"], ["in 0", "connect", "push", "router 0"]
    assert engines.log == ["connect", "push", *without, *back, "push"]


def test_a_push_that_an_engine_died_of_is_repeated_without_it() -> None:
    engines = FakeEngines()
    pushing = Pushing(engines, EngineRepair(engines))
    pushing.weights.connect()

    def die_at_first(number: int) -> None:
        if number == 1:
            engines.die(1)
            raise UserError("connection refused")

    pushing.fails = die_at_first
    assert pushing.weights.update() == {"perf/weight_version": 1.0}
    assert engines.log == ["connect", "out 1", "start 1", "connect", "push"]


@pytest.mark.parametrize("tolerant", [True, False])
def test_a_push_that_fails_for_another_reason_ends_the_run(tolerant: bool) -> None:
    engines = FakeEngines()
    pushing = Pushing(engines, EngineRepair(engines) if tolerant else None)

    def fail(number: int) -> None:
        raise UserError("weights differ")

    pushing.fails = fail
    with pytest.raises(UserError, match="weights differ"):
        pushing.weights.update()
    assert pushing.num_pushes == 1


# -- taking turns with memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", [Holder.TRAINER, Holder.PUSH, Holder.ENGINES])
def test_an_engine_starts_while_nobody_has_memory(holder: Holder) -> None:
    engines = FakeEngines()
    log = engines.log

    class Memory:
        def release_memory(self, tags: list[str]) -> None:
            log.append("others release " + " ".join(sorted(tags)))

        def resume_memory(self, tags: list[str]) -> None:
            log.append("all resume " + " ".join(sorted(tags)))

    def trainers(method: str, *keep: bool, what: str) -> list[Any]:
        log.append(" ".join([method, *("weights kept" for kept in keep if kept)]))
        return []

    turns = HandOver(Memory(), trainers, offload_train=True, offload_rollout=True)
    turns.before_trainer()
    if holder is not Holder.TRAINER:
        turns.to_push()
    if holder is Holder.ENGINES:
        turns.to_engines()
    repair = EngineRepair(engines, turns)
    engines.die(1)
    repair.ask()
    assert log[-1] == "out 1", "it does not start beside others' memory"
    log.clear()
    begin = engines.begin_restart

    def start_at_once(number: int) -> dict[str, Any]:
        refs = begin(number)
        engines.come_up()
        return refs

    engines.begin_restart = start_at_once  # type: ignore[method-assign]
    repair.bring_back()
    turns.to_push()
    repair.admit()
    given_up = {
        Holder.TRAINER: ["sleep"],
        Holder.PUSH: ["others release weights", "sleep"],
        Holder.ENGINES: [f"others release {CACHE} {WEIGHTS}".replace(CACHE, f"{GRAPHS} {CACHE}")],
    }
    assert log == [
        *given_up[holder],
        "start 1",
        "in 1",
        f"release 1 {GRAPHS} {CACHE} {WEIGHTS}",
        "wake",
        "sleep weights kept",
        f"all resume {WEIGHTS}",
        "sleep",
        f"all resume {GRAPHS} {CACHE}",
        "router 1",
    ]


# -- hanging engines -----------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeFleet:
    """Answers what `answer` gives: None never comes."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls
        self.asked: list[tuple[float, str]] = []
        self.answer: Callable[[str], Any] = lambda url: {}
        self.clock = Clock()

    def start_get(self, url: str, path: str, timeout: float) -> Future[Any]:
        assert path == "/alive" and timeout == 3
        self.asked.append((self.clock.now, url))
        future: Future[Any] = Future()
        answer = self.answer(url)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future


def silent_until(checks: HealthChecks, fleet: FakeFleet, end: float) -> dict[str, float]:
    """When each engine was first found to hang, looking every half second."""
    found: dict[str, float] = {}
    while fleet.clock.now < end:
        for url in checks.silent(fleet):  # type: ignore[arg-type]
            found.setdefault(url, fleet.clock.now)
        fleet.clock.now += 0.5
    return found


@pytest.fixture
def checked() -> tuple[HealthChecks, FakeFleet]:
    fleet = FakeFleet("a", "b")
    return HealthChecks("/alive", interval=10, timeout=3, first_wait=5, clock=fleet.clock), fleet


def test_engines_that_answer_are_asked_at_the_interval(checked: tuple[HealthChecks, FakeFleet]) -> None:
    checks, fleet = checked
    checks.begin()
    assert silent_until(checks, fleet, 30) == {}
    assert [when for when, url in fleet.asked if url == "a"] == [5, 15, 25]


@pytest.mark.parametrize("answer", [None, EngineError("b", "503")])
def test_one_that_does_not_answer_well_in_time_hangs(checked: tuple[HealthChecks, FakeFleet], answer: Any) -> None:
    checks, fleet = checked
    fleet.answer = lambda url: answer if url == "b" else {}
    checks.begin()
    assert silent_until(checks, fleet, 9) == {"b": 8.0}


def test_a_bad_moment_is_forgiven(checked: tuple[HealthChecks, FakeFleet]) -> None:
    checks, fleet = checked
    fleet.answer = lambda url: EngineError(url, "503") if fleet.clock.now < 7 else {}
    checks.begin()
    assert silent_until(checks, fleet, 30) == {}


def test_other_engines_are_not_blamed_for_questions_to_the_former_ones(
    checked: tuple[HealthChecks, FakeFleet],
) -> None:
    checks, fleet = checked
    fleet.answer = lambda url: None
    checks.begin()
    assert silent_until(checks, fleet, 7) == {}
    others = FakeFleet("a", "c")
    others.clock.now = 7
    fleet.clock.now = 100
    assert checks.silent(others) == []  # type: ignore[arg-type]


def test_the_end_waits_for_the_answers_to_questions_under_way() -> None:
    fleet = FakeFleet("a", "b")
    checks = HealthChecks("/alive", interval=10, timeout=3, first_wait=0, clock=fleet.clock)
    answers = {url: Future() for url in fleet.urls}
    fleet.start_get = lambda url, path, timeout: answers[url]  # type: ignore[method-assign]
    checks.begin()
    assert checks.silent(fleet) == []  # type: ignore[arg-type]
    answers["a"].set_result({})
    late = threading.Timer(0.2, answers["b"].set_result, [{}])
    late.start()
    assert checks.end(fleet) == [] and answers["b"].done()  # type: ignore[arg-type]
    assert checks.end(fleet) == [], "nothing is under way"  # type: ignore[arg-type]


def test_who_hangs_is_found_at_the_end_too(checked: tuple[HealthChecks, FakeFleet]) -> None:
    checks, fleet = checked
    fleet.answer = lambda url: None if url == "b" else {}
    checks.begin()
    assert silent_until(checks, fleet, 6) == {}
    fleet.clock.now = 9
    assert checks.end(fleet) == ["b"]  # type: ignore[arg-type]
    fleet.clock.now, fleet.answer = 15, lambda url: None
    assert checks.silent(fleet) == [] and len(fleet.asked) == 4  # type: ignore[arg-type]
    assert checks.end(FakeFleet("a")) == [], "questions to former engines are dropped"  # type: ignore[arg-type]


def test_before_a_release_those_that_died_or_hang_are_left_out() -> None:
    """And the dead first: they would not answer."""
    engines = FakeEngines()

    class Checks(HealthChecks):
        def end(self, fleet: Any) -> list[str]:
            engines.log.append("end")
            return ["http://engine-1/0"]

    repair = EngineRepair(engines, health=Checks("/alive", interval=10, timeout=3, first_wait=0))
    engines.die(0)
    repair.before_release()
    assert engines.log == ["out 0", "start 0", "end", "out 1", "start 1"]
    repair.before_release()
    assert engines.log[5:] == [], "there is nobody to wait for"


def test_a_question_under_way_when_the_engines_change_is_dropped_silently(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        fleet = EngineFleet([url := f"http://127.0.0.1:{silent.getsockname()[1]}"])
        answer = fleet.start_get(url, "/health", timeout=60)
        assert not answer.done()
        fleet.close()
        del answer
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
