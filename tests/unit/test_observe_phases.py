"""Phases: nested, added up, closed when they fail."""

from __future__ import annotations

import pytest

from slime.observe.phases import PhaseTimer, now


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
    assert all(
        outer.start <= e.start and e.start + e.duration <= outer.start + outer.duration
        for e in events
    )
    assert before <= outer.start <= now()
    assert changes == ["train", "log_probs", "train", "log_probs", "train", None]
    assert timer.pop_metrics() == {} and timer.pop_events() == []


def test_a_failing_phase_is_closed() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError), timer.phase("rollout"):
        raise ValueError
    assert timer.open_phase is None and "perf/rollout_time" in timer.pop_metrics()
