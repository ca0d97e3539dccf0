"""Trainer and engines take turns with GPU memory: nobody takes before the other has given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.cluster.hand_over import CACHE, GRAPHS, WEIGHTS, HandOver

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
