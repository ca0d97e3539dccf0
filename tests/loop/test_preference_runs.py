"""Whole runs on preferences: they learn, remember what the reference model has scored, and a reward
model becomes a reward."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.toy_models import DIGIT
from tests.support.runs import Run

#: A pair prefers the answer with `DIGIT`.
OTHERS = [str(digit) for digit in range(10) if str(digit) != DIGIT]


def write_pairs(path: Path, count: int) -> Path:
    rows = [
        {
            "prompt": f"{i // 10}+{i % 10}=",
            "chosen": f"{DIGIT}{OTHERS[i % 9]}{DIGIT}",
            "rejected": f"{OTHERS[i % 9]}{OTHERS[(i + 1) % 9]}",
        }
        for i in range(count)
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
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 48)


def test_dpo_learns_and_scores_the_reference_once(run: Run, pairs: Path) -> None:
    name = "dpo"
    result = run(name, *flags(pairs, "dpo", 2), "--save-interval", 3)
    losses = result.series("train/preference_loss")
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6)
    assert result.series("train/reward_margin")[0] == 0.0
    # the answers of an epoch are known in the next one (one batch is read ahead of training), also
    # after a resume
    known = result.series("rollout/reference_known")
    assert (known[:3], known[4:]) == ([0.0] * 3, [1.0] * 2)
    [kept] = (result.path / "reference_log_probs").iterdir()
    size = kept.stat().st_size
    again = run(name, *flags(pairs, "dpo", 4), "--load", result.path / "checkpoints")
    assert again.series("rollout/reference_known")[6:] == [1.0] * 6
    assert kept.stat().st_size == size
    assert sum(again.series("train/reward_accuracy")[-3:]) / 3 >= 0.9
    assert again.series("train/preference_loss")[-1] < 0.5 * losses[0]
