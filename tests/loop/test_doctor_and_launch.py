"""`slime doctor --round`: the real command, cut small."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from slime.__main__ import main
from tests.support.forks import fork_or_start
from tests.support.processes import World


def begin(command: list[str], *, stdout: IO[bytes], **_: Any) -> Any:
    """The round's driver as a fork."""
    with open(os.devnull, "rb") as nothing:
        stdio = nothing.fileno(), stdout.fileno(), stdout.fileno()
        return fork_or_start(command, stdio, os.environ)


def test_a_round_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World.create(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of this process alone
    forks = SimpleNamespace(**{**vars(subprocess), "Popen": begin})
    monkeypatch.setattr("slime.diagnosis.one_round.subprocess", forks)
    flags = world.flags("examined", "--save", world.outputs / "kept", "--num-rollout", 100)
    assert main(["doctor", "--round", "--json", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    (found,) = (check for check in told["checks"] if check["name"] == "round")
    assert (
        found["state"] == "ok"
        and "all weights arrived; log-probs differ by 0.0000" in found["said"]
    )
    assert not world.outputs.exists() and not list(tmp_path.glob("slime-doctor-*"))
