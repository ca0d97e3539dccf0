"""The table of engines: any sequence of events keeps its promises, whatever fails in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime.cluster.engine_table import ALL_MEMORY, MAX_RESTARTS, EngineEntry, EngineTable, State

NUMBERS = st.integers(0, 3)
TAGS = st.lists(st.sampled_from(ALL_MEMORY), min_size=1, max_size=3, unique=True)


class Events(RuleBasedStateMachine):
    """Three engines of the policy and a judge. ``held`` is what each server, by URL, really has: it
    is the servers that die of being asked twice."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        policy = [EngineEntry(number, (f"engine-{number}",)) for number in range(3)]
        self.table = EngineTable(
            [*policy, EngineEntry(3, ("engine-3",), False, False)], clock=lambda: self.now
        )
        self.held: dict[str, set[str]] = {}
        self.weights: dict[str, int] = {}
        self.version = 0
        self.num_starts = 0
        for number in range(4):
            self.table.mark_launched(number, [self.server()])

    def server(self) -> str:
        self.num_starts += 1
        url = f"http://host:{self.num_starts}"
        self.held[url] = set(ALL_MEMORY)
        return url

    def engine(self, number: int, *states: State) -> EngineEntry | None:
        engine = self.table.engines[number]
        return engine if engine.state in states else None

    @rule(number=st.integers(0, 2))
    def dies(self, number: int) -> None:
        if engine := self.engine(number, State.SERVING, State.REJOINING):
            url, lost = engine.url, self.table.num_lost
            assert self.table.is_current_server(engine.name, url)
            del self.held[url]
            self.table.mark_lost(number, "was killed")
            assert self.table.num_lost == lost + 1 and not self.table.is_current_server(
                engine.name, url
            ), "it is heard once"

    @rule(number=NUMBERS)
    def starts_again(self, number: int) -> None:
        if engine := self.engine(number, State.DOWN):
            self.table.mark_started_again(number, {"engine": "answer"})
            assert engine.starting

    @rule(number=NUMBERS, fails=st.booleans())
    def start_ends(self, number: int, fails: bool) -> None:
        if self.engine(number, State.STARTING):
            if fails:
                self.table.mark_start_failed(number)
            else:
                self.table.mark_came_up(number, [self.server()])

    @rule()
    def push(self) -> None:
        self.table.rejoin()
        self.version += 1
        for engine in self.table.policy:
            self.weights[engine.url] = self.version
        assert not self.table.in_state(State.STARTED)

    @rule(number=NUMBERS)
    def is_admitted(self, number: int) -> None:
        if engine := self.engine(number, State.REJOINING):
            self.now += 1.0
            assert self.table.mark_admitted(number) == self.now - engine.since > 0

    @rule(tags=TAGS, others=st.booleans(), first_fails=st.booleans())
    def release(self, tags: list[str], others: bool, first_fails: bool) -> None:
        todo = self.table.to_release(self.table.others if others else self.table.policy, tags)
        for url in list(todo)[first_fails:]:
            assert todo[url] and set(todo[url]) <= self.held[url], "asked twice"
            self.held[url] -= set(todo[url])
            self.table.mark_released(url, todo[url])

    @rule(tags=TAGS, others=st.booleans(), first_fails=st.booleans())
    def resume(self, tags: list[str], others: bool, first_fails: bool) -> None:
        todo = self.table.to_resume(self.table.others if others else self.table.policy, tags)
        for url in list(todo)[first_fails:]:
            assert todo[url] and not set(todo[url]) & self.held[url], "asked twice"
            self.held[url] |= set(todo[url])
            self.table.mark_resumed(url, todo[url])

    @rule()
    def pause(self) -> None:
        self.table.mark_paused(engine.url for engine in self.table.policy)

    @precondition(lambda self: any(engine.paused for engine in self.table.policy))
    @rule()
    def continue_generation(self) -> None:
        for engine in self.table.policy:
            self.table.mark_continued(engine.url)

    @rule()
    def rollout_is_completed(self) -> None:
        self.table.reset_death_counts()

    @invariant()
    def nobody_who_is_dead_is_asked(self) -> None:
        running = [*self.table.policy, *self.table.others]
        assert all(engine.url in self.held for engine in running)
        assert all(
            not engine.released and not engine.paused
            for engine in self.table.engines.values()
            if not engine.runs
        )

    @invariant()
    def the_table_knows_what_each_holds(self) -> None:
        for engine in (*self.table.policy, *self.table.others):
            assert self.held[engine.url] == set(ALL_MEMORY) - engine.released

    @invariant()
    def everybody_is_somewhere(self) -> None:
        counted = len(self.table.policy) + len(self.table.others) + len(self.table.away)
        assert counted == 4 and len(self.table.others) == 1

    @invariant()
    def requests_go_only_where_a_push_went(self) -> None:
        restarted = [engine for engine in self.table.in_state(State.SERVING) if engine.reason]
        assert all(engine.url in self.weights for engine in restarted)


Events.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEvents = Events.TestCase


def test_dying_once_too_often() -> None:
    table = EngineTable([EngineEntry(0, ("engine-0",))])
    table.mark_launched(0, ["http://host:1"])
    for _ in range(MAX_RESTARTS):
        assert not table.mark_lost(0, "was killed").died_too_often
        table.mark_started_again(0, {})
        table.mark_came_up(0, ["http://host:1"])
        table.rejoin()
        table.mark_admitted(0)
    assert table.mark_lost(0, "was killed").died_too_often
    assert len(table.pop_seconds_away()) == MAX_RESTARTS and table.pop_seconds_away() == []


def test_what_is_no_state_for_it_is_our_mistake() -> None:
    table = EngineTable([EngineEntry(0, ("engine-0", "engine-0-node-1"))])
    table.mark_launched(0, ["http://a:1", "http://b:1"])
    with pytest.raises(AssertionError, match="engine 0 is serving"):
        table.mark_came_up(0, ["http://a:1"])
    with pytest.raises(AssertionError, match="was asked to take"):
        table.mark_resumed("http://a:1", ["weights"])
    assert table.find("engine-0-node-1") is table.engines[0] and table.find("router") is None
    assert table.is_current_server("engine-0-node-1", "http://b:1") and not table.is_current_server(
        "engine-0-node-1", "http://a:1"
    )
