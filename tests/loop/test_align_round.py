"""`slime align` on a fresh round: the real command, with a cause in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.__main__ import main
from tests.support.processes import World


@pytest.mark.full  # each cause alone: tests/unit/test_align.py
def test_a_round_whose_engine_is_not_told_the_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World.create(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of this process alone
    flags = world.flags("aligned", "--rollout-temperature", 0.5, "--rollout-max-response-len", 16)
    wrong = ["--custom-generate-function-path", "tests.support.toy.at_temperature_one"]
    assert main(["align", "--json", *flags, *wrong]) == 1
    told = json.loads(capsys.readouterr().out)
    best = told["causes"][0]
    assert best["name"] == "align-temperature" and best["tries"][0]["side"] == "engine"
    assert best["tries"][0]["what"].startswith(
        "log-probs are at temperature 1 instead of --rollout-temperature 0.5"
    )
    assert best["tries"][0]["share"] > 0.99 and told["from_reference"]["trainer"] < 1e-5
    (weights,) = (cause for cause in told["causes"] if cause["name"] == "align-weights")
    assert weights["tries"][0]["what"].startswith("all weights arrived")
    assert told["parts"]["first"] is None and len(told["parts"]["apart"]) == 12
    assert not world.outputs.exists() and not list(tmp_path.glob("slime-align-*"))
