"""Pushes in the midst of generation: nothing waits for a rollout to end, and every token says whose it is."""

from __future__ import annotations

import pytest

from tests.support.runs import GRPO, Run, RunResult

NUM_ROLLOUT = 10
#: Answers as long as the model has positions, of which a push comes upon some.
LONG = ("--rollout-max-context-len", 64, "--rollout-max-response-len", 56)


@pytest.fixture(scope="module")
def in_flight(run: Run) -> RunResult:
    name = "in-flight"
    path = run.outputs / name / "dumps" / "{rollout_id}.pt"  # type: ignore[attr-defined]
    flags = ["--update-weights-in-flight", "--async-buffer-size", 2, "--num-rollout", NUM_ROLLOUT]
    flags += ["--save-debug-rollout-data", path, "--use-tis", "--lr", "1e-4"]
    return run(name, *GRPO, *LONG, *flags, driver="train_async")


def test_answers_go_on_with_the_new_weights(in_flight: RunResult) -> None:
    assert sum(in_flight.series("rollout/continued_requests")) > 0
    assert not in_flight.series("perf/generation_wait_time")
    samples = [sample for rollout_id in range(NUM_ROLLOUT) for sample in in_flight.samples(rollout_id)]
    assert len(samples) == NUM_ROLLOUT * 16
    several = [sample for sample in samples if len({span.weight_version for span in sample.token_spans}) > 1]
    assert several
    for sample in samples:
        versions = [int(span.weight_version) for span in sample.token_spans]
        assert versions == sorted(versions)
        assert [span.start for span in sample.token_spans] == [0, *(span.end for span in sample.token_spans[:-1])]
        assert len(sample.rollout_log_probs) == sample.response_length == sample.token_spans[-1].end


def test_no_sample_is_older_than_the_bound(in_flight: RunResult) -> None:
    """Two rollouts ahead, a push after each."""
    assert max(in_flight.series("rollout/staleness/max")) <= 2
