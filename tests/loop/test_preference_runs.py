"""Whole runs on preferences: they learn, remember what the reference model has scored, and a reward
model becomes a reward."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from benchmarks.toy_models import DIGIT
from slime.__main__ import main
from slime.rollout.debug_data import load_samples
from tests.support.runs import Run

#: A pair prefers the answer with `DIGIT`.
OTHERS = [str(digit) for digit in range(10) if str(digit) != DIGIT]


def write_pairs(path: Path, numbers: range) -> Path:
    rows = [
        {
            "prompt": f"{i // 10}+{i % 10}=",
            "chosen": f"{DIGIT}{OTHERS[i % 9]}{DIGIT}",
            "rejected": f"{OTHERS[i % 9]}{OTHERS[(i + 1) % 9]}",
        }
        for i in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(pairs: Path, loss: str, epochs: int) -> list[object]:
    return [
        *("--loss-type", "preference_loss", "--preference-loss", loss, "--prompt-data", pairs),
        *("--rollout-batch-size", 16, "--num-epoch", epochs, "--lr", "2e-3"),
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", range(48))


def test_dpo_learns_and_scores_the_reference_once(run: Run, pairs: Path) -> None:
    name = "dpo"
    held_out = write_pairs(pairs.parent / "held-out.jsonl", range(60, 100))
    evaluated = ("--eval-preference-data", held_out, "--eval-interval", 3)
    result = run(name, *flags(pairs, "dpo", 2), "--save-interval", 3, *evaluated)
    losses = result.series("train/preference_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6)
    assert result.series("train/reward_margin")[0] == 0.0
    # the answers of an epoch are known in the next one (one batch is read ahead of training), also
    # after a resume
    known = result.series("rollout/reference_known")
    assert (known[:3], known[4:]) == ([0.0] * 3, [1.0] * 2)
    [kept] = (result.path / "reference_log_probs").iterdir()
    size = kept.stat().st_size
    scored = result.series("eval/preferences/preference_loss")
    assert scored[0] == pytest.approx(math.log(2.0), abs=1e-6) and len(scored) == 3
    assert scored[-1] < scored[1] < scored[0]
    assert result.series("eval/preferences/reward_accuracy")[-1] >= 0.9
    assert not (set(result.rows[0]) & {"rollout/advantages", "eval/preferences/loss"})
    again = run(name, *flags(pairs, "dpo", 4), "--load", result.path / "checkpoints")
    assert again.series("rollout/reference_known")[6:] == [1.0] * 6
    assert kept.stat().st_size == size
    assert sum(again.series("train/reward_accuracy")[-3:]) / 3 >= 0.9
    assert again.series("train/preference_loss")[-1] < 0.5 * losses[0]


def test_a_reward_model_learns_and_becomes_a_reward(
    run: Run, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("reward", *flags(pairs, "reward_model", 6))
    losses = result.series("train/preference_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6)
    assert sum(result.series("train/reward_accuracy")[-3:]) / 3 >= 0.9
    exported = tmp_path / "exported"
    assert main(["export", str(result.path), "--to", str(exported)]) == 0

    # it prefers what its pairs prefer, asked by hand
    row = {"prompt": "1+2=", "good": f"{DIGIT}{OTHERS[0]}{DIGIT}", "bad": f"{OTHERS[0]}{OTHERS[1]}"}
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    ask = ["reward", "--rm-type", "reward_model", "--rm-path", str(exported), "--input-key"]
    ask += ["prompt", "--prompt-data", str(data), "--response-key"]
    capsys.readouterr()
    rewards = []
    for answer in ("good", "bad"):
        assert main([*ask, answer]) == 0
        [mean] = re.findall(r"mean (-?[0-9.]+)", capsys.readouterr().out)
        rewards.append(float(mean))
    assert rewards[0] > rewards[1] + 1.0

    # and in a run, where it scores the tokens of each sample
    trained = run(
        "pleasing",
        *("--rm-type", "reward_model", "--rm-path", exported, "--colocate"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "--num-rollout", 1),
        *("--rollout-max-response-len", 4, "--save-debug-rollout-data"),
        str(tmp_path / "{rollout_id}.pt"),
    )
    samples = load_samples(tmp_path / "0.pt")
    classifier = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    for sample in samples:
        score = classifier(torch.tensor([sample.tokens])).logits.item()
        assert sample.reward == pytest.approx(score, abs=1e-5)
    assert len({sample.reward for sample in samples}) > 4 and trained.series("train/grad_norm")[0]
