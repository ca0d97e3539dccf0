"""Whole runs that train adapters: only adapters are pushed, and every token says which
version made it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.directory import ADAPTER, MANIFEST, check_complete
from slime.checkpoints.peft_files import WEIGHTS, read_adapter
from slime.checkpoints.run_models import has_weights, newest_model
from slime.cli import export
from slime.cli.model_source import chosen_model
from tests.support.runs import GRPO, Run, RunResult

ROLLOUTS = 3
LORA = ("--lora-rank", 4, "--lr", "1e-2")


def log(result: RunResult, process: str) -> str:
    return (result.path / "logs" / f"{process}.log").read_text()


@pytest.fixture(scope="module")
def adapted(run: Run, deterministic: Any) -> RunResult:
    flags = [*deterministic("adapted"), *LORA, "--colocate", "--num-rollout", ROLLOUTS]
    return run("adapted", *flags)


def test_adapters_alone_are_pushed(adapted: RunResult) -> None:
    """One push at the launch, and one after each step."""
    trainer = log(adapted, "trainer-0")
    assert re.findall(r"adapter (policy-\d+): ", trainer) == [
        f"policy-{number}" for number in range(1, ROLLOUTS + 2)
    ]
    assert (
        len(re.findall(r"the engines' base is the trainer's: \d+ weights compared", trainer)) == 1
    )
    assert "weights version" not in trainer and "weights go to" not in trainer
    assert adapted.series("perf/weight_version") == [2, 3, 4]
    sent = adapted.series("perf/update_weights/sent_tensors")
    assert sent == adapted.series("perf/update_weights/loaded_tensors")
    assert sent == adapted.series("perf/update_weights/checked_tensors")


def test_every_sample_says_which_adapter_made_it(adapted: RunResult) -> None:
    for rollout_id in range(ROLLOUTS):
        for sample in adapted.samples(rollout_id):
            [span] = sample.token_spans
            assert (span.start, span.end) == (0, sample.response_length)
            assert span.weight_version == rollout_id + 1
            assert sample.weight_versions == [str(rollout_id + 1)]


def test_engines_compute_what_the_trainer_does(adapted: RunResult) -> None:
    for name in ("train/canary_logprob_abs_diff_max", "train/train_rollout_logprob_abs_diff_max"):
        values = adapted.series(name)
        assert len(values) == ROLLOUTS and all(value < 1e-4 for value in values), (name, values)
    effects = adapted.series("train/canary_adapter_abs_diff")
    assert all(effect > 1e-4 for effect in effects) and len(set(effects)) == ROLLOUTS


@pytest.fixture(scope="module")
def in_flight(run: Run, adapted: RunResult) -> RunResult:
    """A run that begins with the adapter of another."""
    path = run.outputs / "adapted-in-flight" / "dumps" / "{rollout_id}.pt"  # type: ignore[attr-defined]
    flags = ["--update-weights-in-flight", "--async-buffer-size", 2, "--num-rollout", 5]
    flags += ["--rollout-max-context-len", 64, "--rollout-max-response-len", 56, "--use-tis"]
    flags += ["--save-debug-rollout-data", path]
    flags += ["--lora-adapter-path", newest_model(adapted.path).path]
    return run("adapted-in-flight", *GRPO, *LORA, *flags, driver="train_async")


@pytest.mark.slow
def test_answers_in_flight_go_on_with_the_new_adapter(in_flight: RunResult) -> None:
    assert sum(in_flight.series("rollout/continued_requests")) > 0
    several = 0
    for rollout_id in range(5):
        for sample in in_flight.samples(rollout_id):
            versions = [int(span.weight_version) for span in sample.token_spans]
            assert versions == sorted(versions)
            assert sample.response_length == sample.token_spans[-1].end
            several += len(set(versions)) > 1
    assert several


def test_the_run_leaves_the_adapter_as_peft_writes_it(adapted: RunResult, tmp_path: Path) -> None:
    newest = newest_model(adapted.path)
    assert (newest.kind, newest.is_exported) == ("adapter", True)
    checkpoint = adapted.path / "checkpoints" / "iter_0000002"
    check_complete(checkpoint)
    assert f"{ADAPTER}/{WEIGHTS}" in (checkpoint / MANIFEST).read_text()
    exported, kept = (read_adapter(path) for path in (newest.path, checkpoint / ADAPTER))
    assert exported.names() == kept.names()
    assert all(torch.equal(tensor, kept[name][:]) for name, tensor in exported.items())
    assert any(bool(tensor.any()) for name, tensor in exported.items() if "lora_B" in name)
    chosen = chosen_model(str(adapted.path))
    assert chosen.adapter == newest.path and has_weights(chosen.directory)
    assert export.main([str(adapted.path), "--merge", "--to", str(tmp_path / "merged")]) == 0
    assert has_weights(tmp_path / "merged")
    assert "reinforcement learning" in (tmp_path / "merged" / "README.md").read_text()
