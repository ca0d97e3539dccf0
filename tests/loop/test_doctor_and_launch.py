"""`slime doctor --round`: the real command, cut small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.__main__ import main
from tests.support.processes import World


def test_a_round_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World.create(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of this process alone
    flags = world.flags("examined", "--save", world.outputs / "kept", "--num-rollout", 100)
    assert main(["doctor", "--round", "--json", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    (found,) = (check for check in told["checks"] if check["name"] == "round")
    assert (
        found["state"] == "ok"
        and "all weights arrived; log-probs differ by 0.0000" in found["said"]
    )
    assert not world.outputs.exists() and not list(tmp_path.glob("slime-doctor-*"))
