"""Pushes in the midst of generation: nothing waits for a rollout to end, and every token says whose
it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.observe.run_data import merge_rows
from tests.support.runs import GRPO, Run, RunResult

NUM_ROLLOUT = 7
#: Answers as long as the model has positions, of which a push comes upon some.
LONG = ("--rollout-max-context-len", 64, "--rollout-max-response-len", 56)


@pytest.fixture(scope="module")
def in_flight(run: Run, data: Path) -> RunResult:
    """With an evaluation after every third rollout, and thus a push upon each of them."""
    name = "in-flight"
    path = run.outputs / name / "dumps" / "{rollout_id}.pt"  # type: ignore[attr-defined]
    flags = ["--update-weights-in-flight", "--async-buffer-size", 2, "--num-rollout", NUM_ROLLOUT]
    flags += ["--save-debug-rollout-data", path, "--use-tis", "--lr", "1e-4"]
    flags += ["--eval-prompt-data", "sums", f"{data}@[0:4]", "--eval-interval", 3]
    return run(name, *GRPO, *LONG, *flags, driver="train_async")


def test_answers_go_on_with_the_new_weights(in_flight: RunResult) -> None:
    assert sum(in_flight.series("rollout/continued_requests")) > 0
    assert not in_flight.series("perf/generation_wait_time")
    samples = [
        sample for rollout_id in range(NUM_ROLLOUT) for sample in in_flight.samples(rollout_id)
    ]
    assert len(samples) == NUM_ROLLOUT * 16
    several = [
        sample
        for sample in samples
        if len({span.weight_version for span in sample.token_spans}) > 1
    ]
    assert several
    for sample in samples:
        versions = [int(span.weight_version) for span in sample.token_spans]
        assert versions == sorted(versions)
        assert [span.start for span in sample.token_spans] == [
            0,
            *(span.end for span in sample.token_spans[:-1]),
        ]
        assert len(sample.rollout_log_probs) == sample.response_length == sample.token_spans[-1].end


def test_who_waits_for_whom_is_measured(in_flight: RunResult) -> None:
    for name in ("perf/trainer_wait_ratio", "perf/engines_idle_ratio"):
        shares = in_flight.series(name)
        assert len(shares) == NUM_ROLLOUT and all(0 <= share <= 1 for share in shares), (
            name,
            shares,
        )
        assert 0 < sum(shares) < NUM_ROLLOUT


def test_no_sample_is_older_than_the_bound(in_flight: RunResult) -> None:
    """Two rollouts ahead, a push after each."""
    assert max(in_flight.series("rollout/staleness/max")) <= 2


def test_evaluations_go_on_beside_training(in_flight: RunResult) -> None:
    """Each with answers of the weights of its step alone, although the next push is in flight."""
    rows = merge_rows(in_flight.rows)
    assert [row["step"] for row in rows] == list(range(NUM_ROLLOUT + 1))
    assert [row["step"] for row in rows if "eval/sums" in row] == [0, 3, 6, NUM_ROLLOUT]
    assert [row["step"] for row in rows if "perf/evaluation_wait_time" in row] == [
        1,
        4,
        NUM_ROLLOUT,
    ]
    assert [row["step"] for row in rows if "perf/evaluate_time" in row] == [NUM_ROLLOUT], (
        "there is nothing to be beside"
    )
    version = {row["step"]: row.get("perf/weight_version") for row in rows}
    files = {0: "start", **{step: f"{step - 1:06d}" for step in (3, 6, NUM_ROLLOUT)}}
    for step, name in files.items():
        lines = (in_flight.path / "samples" / f"eval_{name}.jsonl").read_text().splitlines()
        versions = {span[2] for line in lines for span in json.loads(line)["token_spans"]}
        assert len(lines) == 4 and versions == {version[step] if step else version[1] - 1}
