"""The comparisons with other systems compose their settings and read their metrics without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import peer_trl, peer_verl, trl_side
from benchmarks.gpu.report import BudgetSpent

SMALL = ["--prompts", "4", "--samples", "4", "--trl-samples", "8", "--new-tokens", "32"]

# a stand-in for TRL's Python: it writes three steps, or ends with an error
STAND_IN = """#!/bin/sh
exec {python} - "$3" <<'EOF'
import json, sys
settings = json.load(open(sys.argv[1]))
if settings["config"]["seed"]:
    sys.exit("no such seed")
with open(settings["metrics"], "w") as file:
    for step, seconds in enumerate([9.0, 2.0, 4.0]):
        row = dict(seconds=dict(step=seconds, train=seconds / 2), length=32, memory_gb=step)
        file.write(json.dumps(dict(row, ended=100.0 + 5 * step)) + chr(10))
EOF
"""


def composed(*words: str, correct: bool = True) -> dict[str, Any]:
    return peer_trl.configuration(peer_trl.parse_args([*SMALL, *words]), Path("out"), correct)


def test_trl_does_one_optimizer_step_per_rollout_of_fixed_lengths() -> None:
    config = composed("--trl-memory", "0.5", "--steps", "6")
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 16
    assert (config["num_generations"], config["max_completion_length"]) == (4, 32)
    assert config["generation_kwargs"]["ignore_eos"] is True
    assert config["vllm_max_model_length"] >= peer_verl.PROMPT_TOKENS + 32
    assert (config["vllm_mode"], config["vllm_enable_sleep_mode"]) == ("colocate", True)
    assert (config["vllm_gpu_memory_utilization"], config["max_steps"]) == (0.5, 6)
    assert (config["beta"], config["gradient_checkpointing"]) == (0.0, False)
    assert config["vllm_importance_sampling_correction"] is True
    assert composed(correct=False)["vllm_importance_sampling_correction"] is False


def test_trl_casts_float32_weights_for_products_and_leaves_others() -> None:
    kept, cast = composed("--trl-dtype", "bfloat16"), composed()
    assert (cast["model_init_kwargs"]["dtype"], cast["bf16"]) == ("float32", True)
    assert (kept["model_init_kwargs"]["dtype"], kept["bf16"]) == ("bfloat16", False)


def test_more_arguments_of_trl_come_last() -> None:
    assert composed("--trl-more", '{"use_cpu": true, "seed": 7}')["seed"] == 7


def test_samples_that_do_not_fill_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 × 4 = 16 samples.*--trl-samples 5"):
        composed("--trl-samples", "5")


def test_seconds_of_trl_by_phase_add_up() -> None:
    found = {"prepare": 6.0, "generate": 3.0, "push": 0.5, "old_log_probs": 2.0}
    phases = trl_side.phases(found, 10.0)
    assert phases["step"] == sum(phases.values()) - phases["step"] == 10.0
    assert (phases["train"], phases["other"], phases["rewards"]) == (4.0, 0.5, 0.0)


def test_trls_clock_leaves_out_log_probs_for_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(trl_side, "seconds", found := trl_side.defaultdict(float))
    name = "GRPOTrainer._get_per_token_logps_and_entropies"
    with trl_side.Phase(name, report_to=[]), trl_side.Phase("GRPOTrainer.compute_loss"):
        pass
    assert not found
    with torch.no_grad(), trl_side.Phase(name):
        pass
    with trl_side.Phase("GRPOTrainer.vLLM.generate"):
        pass
    assert sorted(found) == ["generate", "old_log_probs"]


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return [*SMALL, "--trl-python", str(path), "--warm-up", "1"]


def test_a_case_of_trl_reports_medians_behind_the_warm_up(
    stand_in: list[str], tmp_path: Path
) -> None:
    args = peer_trl.parse_args(stand_in)
    row = peer_trl.measure_trl(args, tmp_path / "model", tmp_path / "trl", "trl")
    assert row["seconds"] == {"step": 3.0, "train": 1.5}
    assert row["samples_per_second"] == 16 / 3
    assert row["new_tokens_per_second"] == 16 * 32 / 3
    assert (row["wall_seconds"], row["memory_gb"]) == (5.0, 2)
    settings = json.loads((tmp_path / "trl" / "settings.json").read_text())
    assert len({len(text) for text in settings["prompts"]}) == 1
    slime = {"case": "slime", "samples_per_second": 8.0}
    goal = peer_verl.compare([slime, {"case": "trl", **row}], "trl")["goals"][0]
    assert (goal["measured"], goal["met"]) == (1.5, True)


def test_a_failure_of_trl_is_an_error(
    stand_in: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = peer_trl.parse_args([*stand_in, "--trl-more", '{"seed": 1}'])
    with pytest.raises(RuntimeError, match=r"trl_side\.py ended with exit status 1"):
        peer_trl.measure_trl(args, tmp_path / "model", tmp_path / "trl", "trl")
    assert "no such seed" in capsys.readouterr().err


@pytest.mark.parametrize("enough", [True, False])
def test_a_peer_is_ended_where_the_budget_ends(
    enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Cut(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise BudgetSpent("over")
            return super().wait(timeout)

    monkeypatch.setattr(peer_verl.subprocess, "Popen", Cut)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    if enough:
        peer_verl.run_peer(command, tmp_path, dict(os.environ), lambda: True)
    else:
        with pytest.raises(BudgetSpent):
            peer_verl.run_peer(command, tmp_path, dict(os.environ), lambda: False)
    assert started[0].wait(10)


def test_verls_settings_have_the_same_work(tmp_path: Path) -> None:
    args = peer_verl.parse_args(["--prompts", "4", "--samples", "4", "--new-tokens", "32"])
    words = peer_verl.overrides(args, tmp_path, tmp_path, tmp_path, bypass=True)
    assert "algorithm.rollout_correction.bypass_mode=True" in words
    assert "actor_rollout_ref.rollout.n=4" in words
    assert "data.max_response_length=32" in words
