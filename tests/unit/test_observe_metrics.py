"""Metrics reduce to the same number however they were split up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.observe.metrics import (
    MetricAccumulator,
    distribution,
    last,
    maximum,
    mean,
    merge,
    minimum,
    reduce,
    total,
)
from slime.observe.phases import PhaseTimer, now

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(numbers, st.integers(1, 50)), min_size=1, max_size=20), st.randoms())
def test_any_split_and_order_gives_the_reduction_of_the_whole(
    parts: list[tuple[float, int]], rng: random.Random
) -> None:
    entries = [
        {"mean": mean(v, w), "sum": total(v), "max": maximum(v), "min": minimum(v), "last": last(v, at=i)}
        for i, (v, w) in enumerate(parts)
    ]
    whole = sum(v * w for v, w in parts) / sum(w for _, w in parts)
    while len(entries) > 1:  # merge random pairs: any tree of any order
        rng.shuffle(entries)
        entries.append(merge(entries.pop(), entries.pop()))
    result = reduce(entries[0])
    values = [v for v, _ in parts]
    assert math.isclose(result["mean"], whole, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(result["sum"], math.fsum(values), rel_tol=1e-9, abs_tol=1e-6)
    assert (result["max"], result["min"], result["last"]) == (max(values), min(values), values[-1])


def test_a_name_may_be_missing_in_some_parts() -> None:
    assert reduce(merge({"a": mean(1.0)}, {"b": total(2.0)}, {"a": mean(3.0)})) == {"a": 2.0, "b": 2.0}


def test_one_name_means_one_thing() -> None:
    with pytest.raises(AssertionError, match="mean metric with a sum"):
        merge({"a": mean(1.0)}, {"a": total(1.0)})


def test_accumulator_starts_anew_after_pop() -> None:
    metrics = MetricAccumulator()
    metrics.add("x", mean(1.0, weight=3))
    metrics.update({"x": mean(5.0, weight=1)})
    assert metrics.pop() == {"x": 2.0}
    assert metrics.pop() == {}


def test_mean_of_nothing_is_zero() -> None:
    assert reduce({"x": mean(0.0, weight=0)}) == {"x": 0.0}


def test_distribution() -> None:
    assert distribution("rollout/response_len", [1, 2, 6]) == {
        "rollout/response_len/mean": 3,
        "rollout/response_len/median": 2,
        "rollout/response_len/max": 6,
        "rollout/response_len/min": 1,
    }
    assert distribution("x", []) == {}


def test_phases_nest_and_add_up() -> None:
    changes: list[str | None] = []
    timer = PhaseTimer(on_change=changes.append)
    before = now()
    with timer.phase("train"):
        for _ in range(2):
            with timer.phase("log_probs"):
                pass
    metrics, events = timer.pop_metrics(), timer.pop_events()
    assert set(metrics) == {"perf/train_time", "perf/log_probs_time"}
    assert metrics["perf/train_time"] >= metrics["perf/log_probs_time"] >= 0
    assert [(e.name, e.depth) for e in events] == [("log_probs", 1), ("log_probs", 1), ("train", 0)]
    outer = events[-1]
    assert all(outer.start <= e.start and e.start + e.duration <= outer.start + outer.duration for e in events)
    assert before <= outer.start <= now()
    assert changes == ["train", "log_probs", "train", "log_probs", "train", None]
    assert timer.pop_metrics() == {} and timer.pop_events() == []


def test_a_failing_phase_is_closed() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError), timer.phase("rollout"):
        raise ValueError
    assert timer.open_phase is None and "perf/rollout_time" in timer.pop_metrics()
