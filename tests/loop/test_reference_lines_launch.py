"""Each command line of the reference system's scripts, examples and tests whose features exist
trains a step at toy size, on the embedded engine."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack

import pytest

from tests.support.external_engine import external_engine
from tests.support.reference_lines import LINES, REFUSED
from tests.support.toy_lines import Files, Launch, launches

pytestmark = pytest.mark.full

LAUNCHES = launches(line for line in LINES if line["name"] not in REFUSED)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lines"))


def test_every_line_that_is_not_refused_is_launched() -> None:
    launched = [name for launch in LAUNCHES for name in launch.names]
    assert sorted(launched) == sorted({line["name"] for line in LINES} - set(REFUSED))


@pytest.mark.parametrize("launch", [pytest.param(one, id=one.names[0]) for one in LAUNCHES])
def test_a_line_trains_a_step(
    launch: Launch, files: Files, ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.cli import train

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = files.folder / launch.names[0]
    with ExitStack() as servers:
        teacher = ""
        if launch.has("--rm-url"):
            engine = external_engine(files.teacher(launch), files.folder / "teacher.log", key={})
            teacher = f"{servers.enter_context(engine).url}/generate"
        train.main(files.words(launch, folder, teacher), launch.entry)
    if launch.has("--debug-rollout-only"):
        assert (folder / "rollout_0.pt").is_file()
        return
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    [*_, trained] = [row for row in rows if "train/grad_norm" in row]
    assert math.isfinite(trained["train/loss"])
    assert 0 < trained["train/grad_norm"] < math.inf
