"""Trainer and engines take turns with GPU memory: nobody takes before the other has given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.cluster.engine_table import CACHE, GRAPHS, WEIGHTS, EngineEntry, EngineTable
from slime.cluster.gpu_memory import EngineMemory, GpuMemoryOwner, MemoryHolder
from slime.engines.api import EngineError

ALL = {CACHE, GRAPHS, WEIGHTS}


class GPU:
    """Keeps account of who holds what, and refuses what would not fit."""

    def __init__(self, **flags: bool) -> None:
        self.engine, self.trainer = set(ALL), {"weights", "rest"}
        self.log: list[str] = []
        self.turns = GpuMemoryOwner(
            self.release, self.resume, self.sleep, self.wake,
            offload_train=flags.get("train", True), offload_rollout=flags.get("rollout", True),
            offload_weights=flags.get("weights", True),
        )  # fmt: skip
        self.kept: set[str] = set() if flags.get("weights", True) else {WEIGHTS}

    def release(self, tags: Sequence[str]) -> None:
        """What there is of it: the table sees to that."""
        self.log.append("release " + " ".join(sorted(self.engine & set(tags))))
        self.engine -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        self.log.append("resume " + " ".join(sorted(set(tags) - self.engine)))
        self.engine |= set(tags)
        assert "rest" not in self.trainer, "engines take memory that the trainer still holds"
        if CACHE in tags:
            assert not self.trainer

    def sleep(self, keep_weights: bool) -> dict[str, float]:
        self.trainer = {"weights"} & self.trainer if keep_weights else set()
        self.log.append("sleep but for weights" if keep_weights else "sleep")
        return {} if keep_weights else {"perf/trainer_asleep_gb": 1.0}

    def wake(self) -> dict[str, float]:
        assert self.engine == self.kept, "the trainer wakes while engines hold memory"
        self.trainer = {"weights", "rest"}
        self.log.append("wake")
        return {}


def test_one_step_in_order() -> None:
    gpu = GPU()
    gpu.trainer = set()  # it is not there yet
    gpu.turns.release_for_launch()
    gpu.trainer = {"weights", "rest"}
    gpu.turns.onload_weights()
    gpu.turns.onload_engines()
    gpu.turns.onload_trainer()
    gpu.turns.onload_trainer()  # to save
    assert gpu.log == [
        "release cuda_graph kv_cache weights",
        "sleep but for weights",
        "resume weights",
        "sleep",
        "resume cuda_graph kv_cache",
        "release cuda_graph kv_cache weights",
        "wake",
    ]
    metrics = gpu.turns.metrics()
    assert metrics["perf/trainer_asleep_gb"] == 1.0 and metrics["perf/wake_time"] >= 0
    assert gpu.turns.metrics() == {}


VERBS = st.lists(
    st.sampled_from(["generate", "evaluate", "train", "train and push", "save"]), max_size=12
)


@given(VERBS, st.booleans())
def test_any_order_of_phases_fits(verbs: list[str], offload_weights: bool) -> None:
    gpu = GPU(weights=offload_weights)
    gpu.trainer = set()
    gpu.turns.release_for_launch()
    gpu.trainer = {"weights", "rest"}
    for verb in verbs:  # the account itself asserts
        if verb in ("generate", "evaluate"):
            gpu.turns.onload_engines()
            assert gpu.engine == ALL and not gpu.trainer
        else:
            gpu.turns.onload_trainer()
            assert gpu.engine == gpu.kept and gpu.trainer == {"weights", "rest"}
        if verb == "train and push":
            gpu.turns.onload_weights()
            gpu.turns.onload_weights()  # tried again after a failure
            assert gpu.engine == {WEIGHTS} and gpu.trainer == {"weights"}


@pytest.mark.parametrize("side", ["train", "rollout", "nobody"])
def test_one_side_alone(side: str) -> None:
    log: list[str] = []

    def note(verb: str) -> Any:
        return lambda *given: log.append(verb) or {}  # type: ignore[func-returns-value]

    sides = {"offload_train": side == "train", "offload_rollout": side == "rollout"}
    turns = GpuMemoryOwner(note("release"), note("resume"), note("sleep"), note("wake"), **sides)
    for verb in (
        turns.release_for_launch,
        turns.onload_weights,
        turns.onload_engines,
        turns.onload_trainer,
    ):
        verb()
    assert (
        set(log)
        == {"train": {"sleep", "wake"}, "rollout": {"release", "resume"}, "nobody": set()}[side]
    )
    assert turns.is_shared is (side != "nobody") and turns.holder is MemoryHolder.TRAINER


@pytest.mark.parametrize("rollout", [True, False])
def test_whether_engines_lacked_something_is_told_also_when_it_was_tried_again(
    rollout: bool,
) -> None:
    """An engine that died of taking its memory back: the others have theirs by then, and are
    checked all the same."""
    tried: list[int] = []

    def resume(tags: Sequence[str]) -> None:
        tried.append(1)
        if len(tried) == 1:
            raise EngineError("http://engine-0/0", "connection reset")

    turns = GpuMemoryOwner(
        lambda tags: None,
        resume,
        lambda keep: {},
        dict,
        offload_train=True,
        offload_rollout=rollout,
    )
    turns.release_for_launch()
    if rollout:
        with pytest.raises(EngineError):
            turns.onload_engines()
    assert turns.onload_engines() is rollout and turns.onload_engines() is False


# -- engines that die ------------------------------------------------------------------------------


class Fleet:
    """Engines that must not be asked twice, like SGLang's. ``dying``: the URL of the one that its
    next request ends."""

    def __init__(self) -> None:
        self.table = EngineTable(
            [EngineEntry(number, (f"engine-{number}",)) for number in range(3)]
        )
        for number in range(3):
            self.table.mark_launched(number, [f"http://engine-{number}/0"])
        self.held = {engine.url: set(ALL) for engine in self.table.policy}
        self.paused: set[str] = set()
        self.busy = False
        self.dying: str | None = None
        self.memory = EngineMemory(self.table, lambda engines: self, self.explain_failures)  # type: ignore[arg-type, return-value]

    @contextmanager
    def explain_failures(self, what: str) -> Iterator[None]:
        yield

    def flush_cache(self, timeout: float, urls: Sequence[str]) -> None:
        assert all(CACHE in self.held[url] or WEIGHTS in self.held[url] for url in urls)
        if self.busy and not self.paused:
            raise EngineError(urls[0], "busy", 400)

    def post_to(
        self, path: str, bodies: Mapping[str, dict[str, Any]], timeout: float
    ) -> dict[str, dict[str, Any] | EngineError]:
        outcomes: dict[str, dict[str, Any] | EngineError] = {}
        for url, body in bodies.items():
            assert url in self.held, "a dead one is asked"
            if url == self.dying:
                outcomes[url] = EngineError(url, "connection reset")
                continue
            if "memory_occupation" in path:
                tags = set(body["tags"])
                asked_twice = tags & self.held[url] if "resume" in path else tags - self.held[url]
                assert tags and not asked_twice, f"{path} {asked_twice} twice"
                self.held[url] = (
                    self.held[url] | tags if "resume" in path else self.held[url] - tags
                )
            else:
                self.paused = (
                    self.paused | {url} if path == "/pause_generation" else self.paused - {url}
                )
            outcomes[url] = {}
        return outcomes

    def lose(self) -> None:
        """The one that was to die is dead, and known to be."""
        [engine] = [engine for engine in self.table.policy if engine.url == self.dying]
        self.dying = None
        del self.held[engine.url]
        self.paused.discard(engine.url)
        self.table.mark_lost(engine.number, "was killed")

    def restart_dead(self) -> None:
        """With the ports that they had before."""
        assert not any(self.held.values()), "they start beside others' memory"
        for engine in self.table.away:
            url = f"http://engine-{engine.number}/0"
            self.held[url] = set(ALL)
            self.table.mark_started_again(engine.number, {})
            self.table.mark_came_up(engine.number, [url])
        self.table.rejoin()


#: Of each turn: which engine dies of its first request, if it has that many, whether a rollout that
#: was given up is still under way, and what is done after a death.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2]), st.booleans(), st.sampled_from(["repeat", "restart"])
    ),
    max_size=20,
)


@given(EVENTS)
def test_who_survives_the_death_of_another_is_not_asked_twice(
    events: list[tuple[int | None, bool, str]],
) -> None:
    fleet = Fleet()
    trainer_sleeps = [False]

    def sleep(keep_weights: bool) -> dict[str, float]:
        trainer_sleeps[0] = True
        return {}

    def wake() -> dict[str, float]:
        assert not any(fleet.held.values()), "the trainer wakes beside engines"
        trainer_sleeps[0] = False
        return {}

    memory = fleet.memory
    turns = GpuMemoryOwner(
        memory.release, memory.resume, sleep, wake, offload_train=True, offload_rollout=True
    )
    turns.release_for_launch()
    order = [
        (turns.onload_weights, {WEIGHTS}),
        (turns.onload_engines, ALL),
        (turns.onload_trainer, set[str]()),
    ]
    for number, (victim, busy, then) in enumerate(events):
        verb, held = order[number % 3]
        fleet.busy = busy
        urls = sorted(fleet.held)
        fleet.dying = urls[victim] if victim is not None and victim < len(urls) else None
        try:
            verb()
        except EngineError:
            fleet.lose()
            if then == "restart":
                with turns.offload_all():
                    fleet.restart_dead()
                    assert trainer_sleeps[0]
                assert not trainer_sleeps[0] and not any(fleet.held.values())
            verb()
        assert all(tags == held for tags in fleet.held.values())
        assert trainer_sleeps[0] is (verb != turns.onload_trainer)
        assert verb != turns.onload_engines or not fleet.paused, "engines that were paused go on"


def test_engines_that_were_paused_beside_a_dead_one_go_on_later() -> None:
    fleet = Fleet()
    fleet.busy, fleet.dying = True, "http://engine-0/0"
    with pytest.raises(EngineError, match="connection reset"):
        fleet.memory.release([CACHE])
    assert len(fleet.paused) == 2
    fleet.lose()
    fleet.memory.release([CACHE])
    fleet.memory.resume([CACHE])
    assert not fleet.paused and all(CACHE in held for held in fleet.held.values())


def test_a_model_that_judges_gives_and_takes_all_at_once() -> None:
    table = EngineTable(
        [
            EngineEntry(0, ("engine-0",)),
            EngineEntry(1, ("engine-1",), is_policy=False, can_restart=False),
        ]
    )
    fleet = Fleet()
    fleet.table = table
    for number in (0, 1):
        table.mark_launched(number, [f"http://engine-{number}/0"])
    del fleet.held["http://engine-2/0"]
    memory = EngineMemory(table, lambda engines: fleet, fleet.explain_failures)  # type: ignore[arg-type, return-value]
    judge = "http://engine-1/0"
    memory.release([CACHE, WEIGHTS, GRAPHS])
    assert not any(fleet.held.values())
    memory.resume([WEIGHTS])
    assert fleet.held == {"http://engine-0/0": {WEIGHTS}, judge: set()}
    memory.resume([CACHE, GRAPHS])
    assert all(held == ALL for held in fleet.held.values())
