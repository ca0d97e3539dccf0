"""Which learning rates a launch warns of."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config import make_config
from slime.diagnosis.check import CheckFindings
from slime.run import preflight
from tests.support.hf_configs import PUBLISHED
from tests.support.processes import ROOT

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}
RECIPES = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if "\nlr:" in path.read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories with nothing but a config.json."""
    whole = PUBLISHED["Qwen/Qwen3-4B"]["config"]
    found = {}
    for name, config in (("4B", whole), ("toy", whole | SMALL)):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def warnings(folder: Path, caplog: pytest.LogCaptureFixture, **flags: Any) -> list[str]:
    config = make_config(hf_checkpoint=str(folder), rollout_batch_size=4, num_rollout=1, **flags)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "slime"):
        preflight.warn_of_high_learning_rate(config)
    return caplog.messages


@pytest.mark.parametrize(
    ("model", "flags", "told"),
    [
        ("4B", {"lr": 1e-6}, ""),
        ("4B", {"lr": 1e-4}, ""),
        ("4B", {"lr": 1e-3}, "--lr 0.001 is far above what is usual with Adam (5e-7 to 1e-5)"),
        ("4B", {"lr": 1e-3, "loss_type": "sft_loss"}, ""),
        ("4B", {"lr": 1e-2, "loss_type": "sft_loss"}, "--lr 0.01 is far above"),
        ("4B", {"lr": 1e-3, "lora_rank": 8}, ""),
        ("4B", {"lr": 0.1, "lora_rank": 8}, "(1e-5 to 2e-4)"),
        ("4B", {"lr": 0.1, "optimizer": "sgd"}, ""),
        ("4B", {"lr": 1e-6, "critic_lr": 0.1, "advantage_estimator": "ppo"}, "--critic-lr 0.1"),
        ("toy", {"lr": 4e-3}, ""),
        ("toy", {"lr": 0.1}, "--lr 0.1 is far above"),
    ],
)
def test_learning_rates_far_above_the_usual_ones_are_told(
    model: str,
    flags: dict[str, Any],
    told: str,
    folders: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    fresh_log: None,
) -> None:
    said = warnings(folders[model], caplog, **flags)
    assert [told in line for line in said] == [True] * bool(told)


def test_the_doctor_calls_it_a_warning_of_a_flag(folders: dict[str, Path]) -> None:
    config = make_config(
        hf_checkpoint=str(folders["4B"]), rollout_batch_size=4, num_rollout=1, lr=0.1
    )
    findings = CheckFindings("transformer-engine")
    findings.attempt(preflight.warn_of_high_learning_rate, config)
    (found,) = findings.all
    assert found.trouble.name == "flag-warning" and not found.is_fatal


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_recipe_is_warned_of(
    recipe: Path, folders: dict[str, Path], caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    read = yaml.safe_load(recipe.read_text())
    given = {name.replace("-", "_"): value for name, value in read.items()}
    flags = {name: given[name] for name in ("lr", "loss_type", "lora_rank") if name in given}
    assert flags["lr"] and not warnings(folders["4B"], caplog, **flags)
