"""``--load`` = ``--save``: a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run, RunResult


@pytest.fixture(scope="module")
def resumed(
    run: Run, first_half: RunResult, deterministic: Any, resumable: Any, outputs: Path
) -> RunResult:
    """The second launch, with the same flags but for the goal; also exports every rollout's
    weights."""
    flags = ["--colocate", "--num-rollout", 6, "--save-interval", 1, "--save-retain", 1]
    flags += ["--save-hf", outputs / "exports" / "{rollout_id}"]
    return run("resumed", *deterministic("resumed"), *resumable("resumed"), *flags)


@pytest.fixture(scope="module")
def from_second(
    run: Run, unbroken: RunResult, deterministic: Any, resumable: Any, outputs: Path
) -> RunResult:
    """A copy of the unbroken run, taken up again after its second rollout and led to the fourth."""
    shutil.copytree(unbroken.path, outputs / "from-second")
    flags = ["--colocate", "--num-rollout", 4, "--ckpt-step", 1]
    return run("from-second", *deterministic("from-second"), *resumable("from-second"), *flags)


def iterations(checkpoints: Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("iter_")) for entry in checkpoints.glob("iter_*"))


def latest(checkpoints: Path) -> str:
    return (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip()


def test_first_launch_starts_fresh(first_half: RunResult, unbroken: RunResult) -> None:
    assert [row["step"] for row in first_half.rows] == [1, 2, 3]
    assert first_half.rows[0]["rollout/raw_reward"] == unbroken.rows[0]["rollout/raw_reward"]


@pytest.mark.parametrize("rollout_id", range(6))
def test_same_samples_as_unbroken(resumed: RunResult, unbroken: RunResult, rollout_id: int) -> None:
    mine, theirs = resumed.samples(rollout_id), unbroken.samples(rollout_id)
    assert [(s.prompt, s.label, s.group_index) for s in mine] == [
        (s.prompt, s.label, s.group_index) for s in theirs
    ]
    assert resumed.tokens(rollout_id) == unbroken.tokens(rollout_id)
    assert [s.weight_versions for s in mine] == [s.weight_versions for s in theirs]


def test_same_metrics_as_unbroken(resumed: RunResult, unbroken: RunResult) -> None:
    """Loss and gradient norm among them: weights, moments and schedule go on where they were."""
    assert resumed.steps() == unbroken.steps()


def test_every_step_is_logged_once(resumed: RunResult) -> None:
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.full  # --ckpt-step: `ahead_resumed`, and tests/unit/test_checkpoint_dir.py
def test_resuming_an_earlier_checkpoint(from_second: RunResult, unbroken: RunResult) -> None:
    assert [row["step"] for row in from_second.rows] == [1, 2, 3, 4]
    assert {3, 4} <= from_second.steps().keys()
    for step, row in from_second.steps().items():
        assert row == unbroken.steps()[step]
    assert latest(from_second.path / "checkpoints") == "3"


def test_checkpoints_by_interval_and_at_the_end(unbroken: RunResult) -> None:
    assert iterations(unbroken.path / "checkpoints") == [1, 3, 5]
    assert latest(unbroken.path / "checkpoints") == "5"


def test_retention(first_half: RunResult, resumed: RunResult, outputs: Path) -> None:
    assert iterations(outputs / "checkpoints-of-first-half") == [2]
    assert iterations(resumed.path / "checkpoints") == [5]


def test_export_is_the_trained_model(resumed: RunResult, outputs: Path) -> None:
    """transformers reads the weights exported after rollout 4 and gives the log-probs of rollout
    5's tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = outputs / "exports" / "4"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder).encode("3+4=", add_special_tokens=False)
    means = []
    for sample in resumed.samples(5):
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[
                0, -sample.response_length - 1 : -1
            ]
        response = torch.tensor(sample.tokens[-sample.response_length :])
        log_probs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(
            log_probs, torch.tensor(sample.rollout_log_probs), atol=1e-5, rtol=0
        )
        means.append(log_probs.mean().item())
    trainers = resumed.steps()[6]["rollout/log_probs"]
    assert sum(means) / len(means) == pytest.approx(trainers, abs=1e-5)


# -- one batch ahead -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ahead(run: Run, deterministic: Any, resumable: Any) -> RunResult:
    """Saved after rollout 2, while rollout 3 is being generated."""
    flags = ["--num-rollout", 6, "--save-interval", 3]
    return run("ahead", *deterministic("ahead"), *resumable("ahead"), *flags, driver="train_async")


@pytest.fixture(scope="module")
def ahead_resumed(
    run: Run, ahead: RunResult, deterministic: Any, resumable: Any, outputs: Path
) -> RunResult:
    """A copy of that run, taken up at that checkpoint."""
    shutil.copytree(ahead.path, outputs / "ahead-resumed")
    shutil.rmtree(outputs / "ahead-resumed" / "dumps")
    flags = ["--num-rollout", 6, "--ckpt-step", 2]
    name = "ahead-resumed"
    return run(name, *deterministic(name), *resumable(name), *flags, driver="train_async")


def test_no_prompt_is_skipped_or_used_twice(ahead: RunResult, ahead_resumed: RunResult) -> None:
    """The position that is saved is what training consumed, not what was drawn."""
    assert sorted(entry.name for entry in (ahead_resumed.path / "dumps").iterdir()) == [
        "3.pt",
        "4.pt",
        "5.pt",
    ]
    for rollout_id in (3, 4, 5):
        before, after = ahead.samples(rollout_id), ahead_resumed.samples(rollout_id)
        assert [(s.index, s.prompt) for s in after] == [(s.index, s.prompt) for s in before]
    trained = [s.index for i in range(6) for s in (ahead if i < 3 else ahead_resumed).samples(i)]
    assert trained == list(range(6 * 16))


def test_staleness_after_a_resume(ahead: RunResult, ahead_resumed: RunResult) -> None:
    assert [row["step"] for row in ahead_resumed.rows] == [1, 2, 3, 4, 5, 6]
    assert ahead.series("rollout/staleness/max") == [0, 1, 1, 1, 1, 1]
    # the first batch after a launch is generated with the newest weights
    assert ahead_resumed.series("rollout/staleness/max") == [0, 1, 1, 0, 1, 1]
    assert ahead_resumed.series("rollout/weight_version/min") == [1, 1, 2, 4, 4, 5]


# -- a data source of the user's own ---------------------------------------------------------------


@pytest.mark.full
def test_a_users_source_resumes_where_training_was(
    run: Run, outputs: Path, deterministic: Any
) -> None:
    """Its `save` is called with the checkpoint after rollout 1, while rollout 2, drawn already, is
    being generated."""
    source = ["--data-source-path", "tests.support.toy.SumSource"]
    first, second = (
        outputs / "own-source" / "checkpoints",
        outputs / "own-source-resumed" / "checkpoints",
    )
    flags = [
        *deterministic("own-source"),
        *source,
        "--num-rollout",
        3,
        "--save-interval",
        2,
        "--save",
        first,
    ]
    before = run("own-source", *flags, driver="train_async")
    assert sorted(path.name for path in (first / "rollout").iterdir()) == ["sums_1", "sums_2"]
    flags = [*deterministic("own-source-resumed"), *source, "--num-rollout", 3, "--save", second]
    after = run(
        "own-source-resumed", *flags, "--load", first, "--ckpt-step", 1, driver="train_async"
    )
    assert [row["step"] for row in after.rows] == [3]
    assert [(s.index, s.prompt) for s in after.samples(2)] == [
        (s.index, s.prompt) for s in before.samples(2)
    ]
    assert [s.index for s in after.samples(2)] == list(range(32, 48))
