"""With ``--deterministic-rollout`` a seed is a run: the same tokens, rewards and metrics, however
it is served."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runs import Run, RunResult

ROLLOUTS = 3


@pytest.fixture(scope="module")
def once(unbroken: RunResult) -> RunResult:
    return unbroken


@pytest.fixture(scope="module")
def again(first_half: RunResult) -> RunResult:
    return first_half


@pytest.fixture(scope="module")
def two_at_a_time(run: Run, deterministic: Any) -> RunResult:
    """Two requests in flight instead of all: other batches in every step of the engine, other
    finishing orders."""
    flags = ["--sglang-server-concurrency", 2]
    return run(
        "two-at-a-time",
        *deterministic("two-at-a-time"),
        *flags,
        "--colocate",
        "--num-rollout",
        ROLLOUTS,
    )


@pytest.mark.parametrize("rollout_id", range(ROLLOUTS))
def test_same_seed_same_samples(once: RunResult, again: RunResult, rollout_id: int) -> None:
    assert again.tokens(rollout_id) == once.tokens(rollout_id)


def test_same_seed_same_metrics(once: RunResult, again: RunResult) -> None:
    assert len(again.steps()) == ROLLOUTS
    for step, row in again.steps().items():
        assert row == once.steps()[step]


@pytest.mark.full  # the engine's part of it is in tests/unit/test_embedded_scheduler.py
@pytest.mark.parametrize("rollout_id", range(ROLLOUTS))
def test_batching_changes_no_sample(
    once: RunResult, two_at_a_time: RunResult, rollout_id: int
) -> None:
    assert two_at_a_time.tokens(rollout_id) == once.tokens(rollout_id)


@pytest.mark.full
def test_batching_changes_no_metric(once: RunResult, two_at_a_time: RunResult) -> None:
    assert len(two_at_a_time.steps()) == ROLLOUTS
    for step, row in two_at_a_time.steps().items():
        assert row == once.steps()[step]


def test_samples_are_not_all_alike(once: RunResult) -> None:
    """What the comparisons above rest on: seeds differ between samples and between rollouts."""
    responses = [tuple(s.tokens[-s.response_length :]) for i in range(6) for s in once.samples(i)]
    assert len(set(responses)) > len(responses) / 2
