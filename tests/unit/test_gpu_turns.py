"""Trainer and engines take turns with GPU memory: nobody takes before the other has given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime.cluster.engine_group import EngineGroup
from slime.cluster.engine_memory import EngineMemory
from slime.cluster.hand_over import CACHE, GRAPHS, WEIGHTS, HandOver

from slime.engines.api import EngineError
from slime.errors import RunFailed

ALL = {CACHE, GRAPHS, WEIGHTS}


class GPU:
    """Keeps account of who holds what, and refuses what would not fit."""

    def __init__(self, **flags: bool) -> None:
        self.engine, self.trainer = set(ALL), {"weights", "rest"}
        self.log: list[str] = []
        self.turns = HandOver(
            self, self.call, offload_train=flags.get("train", True), offload_rollout=flags.get("rollout", True)
        )

    def release_memory(self, tags: list[str]) -> None:
        assert set(tags) <= self.engine, f"{tags} are released twice"
        self.engine -= set(tags)
        self.log.append("release " + " ".join(sorted(tags)))

    def resume_memory(self, tags: list[str]) -> None:
        assert not set(tags) & self.engine, f"{tags} are there already"
        self.engine |= set(tags)
        self.log.append("resume " + " ".join(sorted(tags)))
        assert "rest" not in self.trainer, "engines take memory that the trainer still holds"
        if CACHE in tags:
            assert not self.trainer

    def call(self, method: str, *args: Any, what: str) -> list[dict[str, float]]:
        if method == "wake":
            assert not self.engine, "the trainer wakes while engines hold memory"
            self.trainer = {"weights", "rest"}
        else:
            self.trainer = {"weights"} & self.trainer if args[0] else set()
        self.log.append(method if method == "wake" or not args[0] else "sleep but for weights")
        return [{"perf/trainer_asleep_gb": 1.0}, {}]


def test_one_step_in_order() -> None:
    gpu = GPU()
    gpu.trainer = set()  # it is not there yet
    gpu.turns.before_trainer()
    gpu.trainer = {"weights", "rest"}
    gpu.turns.to_push()
    gpu.turns.to_engines()
    gpu.turns.to_trainer()
    gpu.turns.to_trainer()  # to save
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


VERBS = st.lists(st.sampled_from(["generate", "evaluate", "train", "train and push", "save"]), max_size=12)


@settings(deadline=None)
@given(VERBS)
def test_any_order_of_phases_fits(verbs: list[str]) -> None:
    gpu = GPU()
    gpu.trainer = set()
    gpu.turns.before_trainer()
    gpu.trainer = {"weights", "rest"}
    for verb in verbs:  # the account itself asserts
        if verb in ("generate", "evaluate"):
            gpu.turns.to_engines()
            assert gpu.engine == ALL and not gpu.trainer
        else:
            gpu.turns.to_trainer()
            assert not gpu.engine and gpu.trainer == {"weights", "rest"}
        if verb == "train and push":
            gpu.turns.to_push()
            gpu.turns.to_push()  # tried again after a failure
            assert gpu.engine == {WEIGHTS} and gpu.trainer == {"weights"}


@pytest.mark.parametrize("side", ["train", "rollout"])
def test_one_side_alone(side: str) -> None:
    gpu = GPU(**{"train": side == "train", "rollout": side == "rollout"})
    gpu.release_memory, gpu.resume_memory = (
        (lambda tags: gpu.log.append("release")),
        (lambda tags: gpu.log.append("resume")),
    )  # type: ignore[method-assign]
    gpu.engine = set()
    gpu.turns.before_trainer()
    for verb in (gpu.turns.to_push, gpu.turns.to_engines, gpu.turns.to_trainer):
        verb()
    moved = {"wake", "sleep", "sleep but for weights"} & set(gpu.log), {"release", "resume"} & set(gpu.log)
    assert bool(moved[0]) is (side == "train") and bool(moved[1]) is (side == "rollout")


# -- engines that die ------------------------------------------------------------------------------------------------


class Fleet:
    """Engines that must not be asked twice, like SGLang's. ``dying``: the URL of the one that its next request ends."""

    def __init__(self) -> None:
        self.held = {f"http://engine-{number}/0": set(ALL) for number in range(3)}
        self.dying: str | None = None
        self.memory = EngineMemory()

    @property
    def urls(self) -> Sequence[str]:
        return tuple(self.held)

    def post_to(
        self, path: str, bodies: Mapping[str, dict[str, Any]], timeout: float
    ) -> dict[str, dict[str, Any] | EngineError]:
        outcomes: dict[str, dict[str, Any] | EngineError] = {}
        for url, body in bodies.items():
            tags = set(body["tags"])
            if url == self.dying:
                outcomes[url] = EngineError(url, "connection reset")
                continue
            assert tags and (not tags & self.held[url] if "resume" in path else tags <= self.held[url]), "asked twice"
            self.held[url] = self.held[url] | tags if "resume" in path else self.held[url] - tags
            outcomes[url] = {}
        return outcomes

    def release_memory(self, tags: list[str]) -> None:
        self.memory.release(self, tags)

    def resume_memory(self, tags: list[str]) -> None:
        self.memory.resume(self, tags)

    def lose(self) -> str:
        """The one that was to die is dead, and taken out."""
        url, self.dying = self.dying, None
        assert url is not None
        del self.held[url]
        self.memory.forget(url)
        return url

    def start(self, urls: Sequence[str]) -> None:
        """With the ports that they had before."""
        assert not any(self.held.values()), "they start beside others' memory"
        self.held |= {url: set(ALL) for url in urls}


#: Of each turn: which engine dies of its first request, if it has that many, and what is done then.
EVENTS = st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from(["repeat", "restart"])), max_size=20)


@settings(deadline=None)
@given(EVENTS)
def test_who_survives_the_death_of_another_is_not_asked_twice(events: list[tuple[int | None, str]]) -> None:
    fleet, lost = Fleet(), []
    trainer_sleeps = [False]

    def trainers(method: str, *_: Any, what: str) -> list[Any]:
        assert method == "sleep" or not any(fleet.held.values()), "the trainer wakes beside engines"
        trainer_sleeps[0] = method == "sleep"
        return []

    def release_fresh(tags: list[str]) -> None:
        fleet.memory.release(fleet, tags)
        lost.clear()

    turns = HandOver(fleet, trainers, offload_train=True, offload_rollout=True)
    turns.before_trainer()
    order = [(turns.to_push, {WEIGHTS}), (turns.to_engines, ALL), (turns.to_trainer, set[str]())]
    for number, (victim, then) in enumerate(events):
        verb, held = order[number % 3]
        fleet.dying = fleet.urls[victim] if victim is not None and victim < len(fleet.urls) else None
        try:
            verb()
        except EngineError:
            lost.append(fleet.lose())
            if then == "restart":
                with turns.restarting(release_fresh):
                    fleet.start(lost)
                assert not trainer_sleeps[0] and not any(fleet.held.values())
            verb()
        assert all(tags == held for tags in fleet.held.values())
        assert trainer_sleeps[0] is (verb != turns.to_trainer)


class GroupFleet(Fleet):
    """With what a group of engines asks besides."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[str] = set()

    def flush_cache(self, timeout: float) -> None:
        self._fail()

    def post(self, path: str, body: dict[str, Any], timeout: float) -> None:
        alive = {url for url in self.urls if url != self.dying}
        self.paused = self.paused | alive if path == "/pause_generation" else self.paused - alive
        self._fail()

    def _fail(self) -> None:
        if self.dying is not None:
            raise EngineError(self.dying, "connection reset")


def test_engines_that_were_paused_beside_a_dead_one_go_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, group = GroupFleet(), EngineGroup.__new__(EngineGroup)
    group._fleet, group._others, group._memory, group._paused = fleet, None, fleet.memory, False  # type: ignore[assignment]
    group.serving = dict(enumerate(fleet.urls))
    monkeypatch.setattr(group, "raise_if_dead", lambda *_: None)
    fleet.dying = fleet.urls[0]
    with pytest.raises(RunFailed, match="giving memory up"):
        group.release_memory([CACHE])
    assert len(fleet.paused) == 2
    fleet.lose()
    group.release_memory([CACHE])
    group.resume_memory([CACHE])
    assert not fleet.paused and all(CACHE in held for held in fleet.held.values())
