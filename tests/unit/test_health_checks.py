"""Engines that are alive and do not answer: who is asked when, and who counts as hung."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.health import HealthChecks


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
        self.idle: set[str] = set()

    def post_to(self, path: str, bodies: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert path == "/flush_cache"
        return {url: {} if url in self.idle else EngineError(url, "busy", 400) for url in bodies}

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


def test_engines_that_answer_are_asked_at_the_interval(
    checked: tuple[HealthChecks, FakeFleet],
) -> None:
    checks, fleet = checked
    checks.begin()
    assert silent_until(checks, fleet, 30) == {}
    assert [when for when, url in fleet.asked if url == "a"] == [5, 15, 25]


@pytest.mark.parametrize("answer", [None, EngineError("b", "503")])
def test_one_that_does_not_answer_well_in_time_hangs(
    checked: tuple[HealthChecks, FakeFleet], answer: Any
) -> None:
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


def test_an_engine_that_is_idle_at_the_end_is_well(checked: tuple[HealthChecks, FakeFleet]) -> None:
    """SGLang sleeps a second before it answers, which nobody need wait for."""
    checks, fleet = checked
    questions: list[Future[Any]] = []
    ask = fleet.start_get
    fleet.answer, fleet.idle = lambda url: None, {"a", "b"}
    fleet.start_get = lambda *request: questions.append(ask(*request)) or questions[-1]  # type: ignore[func-returns-value, method-assign]
    checks.begin()
    assert silent_until(checks, fleet, 6) == {}
    assert checks.end(fleet) == [] and len(questions) == 2  # type: ignore[arg-type]
    assert all(question.cancelled() for question in questions)


def test_rollouts_that_are_short_are_not_checked_each(
    checked: tuple[HealthChecks, FakeFleet],
) -> None:
    checks, fleet = checked
    for _ in range(10):  # of six seconds
        checks.begin()
        assert silent_until(checks, fleet, fleet.clock.now + 6) == {}
        assert checks.end(fleet) == []  # type: ignore[arg-type]
    times = [when for when, url in fleet.asked if url == "a"]
    assert len(times) >= 3 and all(
        later - sooner >= checks.interval for sooner, later in itertools.pairwise(times)
    )


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


def test_a_question_under_way_when_the_engines_change_is_dropped_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        fleet = EngineFleet([url := f"http://127.0.0.1:{silent.getsockname()[1]}"])
        answer = fleet.start_get(url, "/health", timeout=60)
        assert not answer.done()
        fleet.close()
        del answer
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_who_lives_is_waited_for_and_who_does_not_is_not() -> None:
    """A frozen engine's port still takes connections; one that copies its weights has nothing to
    say of that yet."""

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self._say(b"{}")

        def do_POST(self) -> None:
            asked.wait(60)
            self._say(b'{"done": true}')

        def _say(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    asked = threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as frozen,
        ThreadingHTTPServer(("127.0.0.1", 0), Slow) as slow,
    ):
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        urls = [f"http://127.0.0.1:{port}" for port in (frozen.getsockname()[1], slow.server_port)]
        fleet = EngineFleet(urls, patience=0.2)
        try:
            outcomes = fleet.post_to(
                "/release_memory_occupation", {url: {} for url in urls}, timeout=600
            )
            assert isinstance(outcomes[urls[0]], EngineError) and "no sign of life" in str(
                outcomes[urls[0]]
            )
            assert outcomes[urls[1]] == {"done": True}, (
                "it answered after it had been asked whether it lives"
            )
            with pytest.raises(EngineError, match="no sign of life"):
                fleet.flush_cache(600, urls[:1])
        finally:
            fleet.close()
            slow.shutdown()
