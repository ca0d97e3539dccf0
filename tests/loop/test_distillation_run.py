"""Whole runs that learn from a teacher, in an engine and in the trainer, without any reward
function."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.runs import Run, RunResult

GROUPS = Path(__file__).parents[1] / "support" / "teacher_groups.yaml"
PURE = (
    *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8),
    *("--num-steps-per-rollout", 1, "--num-rollout", 2, "--use-opd", "--deterministic-rollout"),
)


@pytest.fixture(scope="module")
def in_engine(run: Run) -> RunResult:
    """The teacher is the policy's first weights, which no push reaches."""
    flags = ["--opd-loss", "forward_kl", "--opd-top-k", 5, "--entropy-coef", 1.0]
    flags += ["--rollout-num-gpus", 2, "--sglang-config", GROUPS]
    return run("engine-teacher", *PURE, *flags)


def test_an_engine_scores_every_sample_at_its_place(in_engine: RunResult) -> None:
    """Of equal weights nothing is to be learned in the first step; then the policy moves away."""
    apart = in_engine.series("train/opd_loss")
    assert apart[0] == pytest.approx(0.0, abs=1e-6) and apart[1] > 1e-4
    sampled = in_engine.series("rollout/opd_reverse_kl")
    assert sampled[0] == pytest.approx(0.0, abs=1e-4) and abs(sampled[1]) > 1e-3
    assert in_engine.series("rollout/teacher_requests") == [16.0, 16.0]
    assert in_engine.series("rollout/teacher_canary_abs_diff")[1] < 1e-5
    assert all(0 <= idle < 1 for idle in in_engine.series("perf/teacher_idle_ratio"))
    assert in_engine.series("rollout/raw_reward") == [0.0, 0.0]


@pytest.fixture(scope="module")
def in_trainer(
    run: Run, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> RunResult:
    teacher = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(models["qwen3"], teacher)
    (file,) = teacher.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: value + 2.0 * value.float().std() * torch.randn(value.shape, generator=generator)
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    flags = ["--opd-teacher-load", f"far={teacher}", "--opd-loss", "reverse_kl", "--colocate"]
    return run("trainer-teacher", *PURE, *flags, "--num-rollout", 6, "--lr", "2e-3")


def test_a_teacher_in_the_trainer_teaches_all_the_vocabulary(in_trainer: RunResult) -> None:
    apart = in_trainer.series("train/opd_loss")
    assert apart[0] > 0.01 and apart[-1] < apart[0]
    assert "perf/teacher_log_probs_time" in in_trainer.rows[-1]
    log = (in_trainer.path / "logs" / "trainer-0.log").read_text()
    assert "teacher far from" in log and "mean log-prob of the canary" in log
