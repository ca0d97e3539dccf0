"""Which model of a run is the newest, and where a path leads that people give."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slime.checkpoints.run_models import newest_model
from slime.cli.model_source import model_directory, model_name
from slime.errors import UserError
from tests.support.checkpoint_dirs import complete


def run_folder(tmp_path: Path, stage: str = "", **checkpoint: Any) -> Path:
    folder = tmp_path / "outputs" / "sums"
    folder.mkdir(parents=True, exist_ok=True)
    flags = {"hf_checkpoint": "models/base", "save": None, "save_hf": None} | checkpoint
    config = {
        "checkpoint": flags,
        "observe": {"output_dir": "outputs", "run_name": "sums"},
        "origins": {},
    }
    (folder / (f"config.{stage}.json" if stage else "config.json")).write_text(json.dumps(config))
    return folder


def export(path: Path, time: float) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "model.safetensors").write_bytes(b"")
    os.utime(path / "model.safetensors", (time, time))
    return path


def checkpoint(root: Path, iteration: int, time: float) -> Path:
    path = complete(root, iteration)
    os.utime(path / ".metadata", (time, time))
    return path


def test_an_export_in_the_run_folder_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    export(folder / "exports" / "3", time=100)
    newest = export(folder / "model", time=200)
    export(folder / ".model.partial", time=300)
    assert newest_model(folder).path == newest


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    "name", ["{rollout_id}", "step-{rollout_id:06d}", "{rollout_id:#x}", "{{{rollout_id}}}"]
)
def test_relative_places_count_from_where_the_run_was_started(
    name: str, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if here else "/")
    folder = run_folder(tmp_path, save_hf=f"exports/{name}", save="ck")
    export(tmp_path / "exports" / name.format(rollout_id=9), time=300)
    newest = export(tmp_path / "exports" / name.format(rollout_id=10), time=100)
    export(tmp_path / "exports" / "other", time=400)
    assert newest_model(folder).path.resolve() == newest


def test_a_checkpoint_counts_where_it_is_of_a_later_rollout_than_every_export(
    tmp_path: Path,
) -> None:
    folder = run_folder(
        tmp_path, save=str(tmp_path / "ck"), save_hf=str(tmp_path / "hf" / "{rollout_id}")
    )
    with pytest.raises(UserError, match="has left no model"):
        newest_model(folder)
    first = checkpoint(tmp_path / "ck", 4, time=100)
    assert newest_model(folder).path == first
    # --async-save: the checkpoint is whole a little later
    same = export(tmp_path / "hf" / "4", time=90)
    assert newest_model(folder).path == same
    later = checkpoint(tmp_path / "ck", 7, time=200)
    assert newest_model(folder).path == later
    (later / "data.distcp").unlink()
    assert newest_model(folder).path == same


def test_of_several_stages_the_last_that_wrote_a_model_counts(tmp_path: Path) -> None:
    run_folder(tmp_path, "sft", save_hf=str(tmp_path / "sft" / "{rollout_id}"))
    folder = run_folder(tmp_path, "rl", save=str(tmp_path / "rl"))
    sft = export(tmp_path / "sft" / "50", time=100)
    assert newest_model(folder).path == sft
    checkpoint(tmp_path / "rl", 2, time=200)
    assert newest_model(folder).path == tmp_path / "rl" / "iter_0000002"


def test_what_people_may_pass_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path)
    model = export(folder / "model", time=100)
    assert model_directory(str(folder)) == model and model_directory(str(model)) == model
    assert model_name("outputs/sums/") == "sums" and model_name("org/name") == "name"
    converted = checkpoint(folder / "checkpoints", 3, time=50)
    export(converted / "hf", time=60)  # converted before
    for path in (folder / "checkpoints", converted):
        assert model_directory(str(path)) == converted / "hf"
    # what a checkpoint was converted to is not newer than the checkpoint
    assert newest_model(folder).path == model


def test_what_is_no_model_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for path, said in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "notes.txt", "is a file"),
        (tmp_path, "holds no model"),
        (run_folder(tmp_path), "has left no model"),
    ):
        with pytest.raises(UserError, match=said):
            model_directory(str(path))
    lonely = checkpoint(tmp_path / "elsewhere" / "ck", 1, time=10)
    with pytest.raises(UserError, match="Megatron checkpoint without config") as error:
        model_directory(str(lonely.parent))
    assert "--hf-checkpoint" in error.value.fix
