"""`slime resume`: which run it means, and what it refuses before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.__main__ import main
from slime.checkpoints.load_plan import config_for_resume
from slime.config import Config, make_config
from slime.config.hidden import with_secrets
from slime.errors import UserError
from slime.observe.run_folder import newest_stage
from slime.run.session import Session
from slime.run.stopping import StopSignals
from tests.support.checkpoint_dirs import complete


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def write_run(
    outputs: Path, state: str = "failed", stage: str | None = None, save: str | None = "{run}/ckpt"
) -> Path:
    config = make_config(
        output_dir="outputs", run_name="sums", stage=stage, save=save, num_rollout=4
    )
    folder = outputs / "sums"
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / (f"config.{stage}.json" if stage else "config.json"))
    summary = folder / "run.json"
    stages = json.loads(summary.read_text())["stages"] if summary.exists() else {}
    stages[stage or ""] = {"state": state, "started": float(len(stages) + 1)}
    summary.write_text(json.dumps({"name": "sums", "stages": stages}))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["resume", *words]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_resumed(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run folder" in refused(capsys, "nowhere")
    folder = write_run(outputs, "finished")
    told = refused(capsys, str(folder))
    save = newest_stage(folder).config().checkpoint.save
    assert "sums is finished" in told and save and f"--load {save}\n" in told
    write_run(outputs, save=None)
    assert "it saves no checkpoints" in refused(capsys, str(folder))
    assert "has no stage grpo" in refused(capsys, str(folder), "--stage", "grpo")


def test_the_newest_stage_is_meant(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(outputs, "failed", "sft")
    write_run(outputs, "finished", "grpo")
    assert "(stage grpo) is finished" in refused(capsys, str(folder))


def test_a_run_that_was_moved(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = outputs / "others"
    write_run(outputs).rename(moved)
    told = refused(capsys, str(moved))
    assert "others was moved" in told and "outputs/sums" in told


def test_what_said_where_the_first_launch_began_counts_no_more(tmp_path: Path) -> None:
    given = {
        "save": str(tmp_path / "own"),
        "load": str(tmp_path / "other"),
        "ckpt_step": 7,
        "finetune": True,
    }
    config = make_config(num_rollout=4, start_rollout_id=3, **given)
    assert config_for_resume(config) == config, "before the first checkpoint it begins there again"
    complete(tmp_path / "own", 5)
    (tmp_path / "own" / "latest_checkpointed_iteration.txt").write_text("5")
    again = config_for_resume(config)
    flags = again.checkpoint
    assert (flags.load, flags.ckpt_step, flags.finetune) == (flags.save, None, False)
    assert again.rollout.start_rollout_id is None
    with pytest.raises(UserError, match="saves no checkpoints"):
        config_for_resume(make_config(num_rollout=4))


@pytest.mark.parametrize(("load", "stays"), [("other", True), ("own", False)])
def test_the_journal_of_a_run_that_has_no_checkpoint_yet(
    outputs: Path, load: str, stays: bool
) -> None:
    """--ckpt-step says where in another run this one began; only of its own checkpoints it says to
    go back."""
    config = make_config(
        output_dir="outputs",
        run_name="sums",
        load=load,
        ckpt_step=3,
        save="own",
        rollout_batch_size=1,
        num_rollout=4,
    )
    session = Session(config_for_resume(config), StopSignals(), resuming=False)
    session.close()
    record = session.run.journal / "rollout_000000.log"
    record.parent.mkdir()
    record.touch()
    session = Session(config_for_resume(config), StopSignals(), resuming=True)
    session.close()
    assert record.exists() == stays


def secretive(outputs: Path, **more: Any) -> Path:
    given = {
        "output_dir": "outputs",
        "run_name": "sums",
        "save": "{run}/ckpt",
        "num_rollout": 4,
        "use_wandb": True,
    }
    given |= {"rm_url": "https://me:hunter22@judge/v1", "wandb_key": "abcdefgh"}
    config = make_config(
        **given, train_env_vars={"MY_TOKEN": "tok-1", "NCCL_DEBUG": "INFO"}, **more
    )
    config = replace(
        config, extra={"judge": {"api_key": "key-2", "name": "j"}, "label_key": "answer"}
    )
    folder = outputs / "sums"
    folder.mkdir(parents=True)
    config.save(folder / "config.json")
    (folder / "run.json").write_text(
        json.dumps({"name": "sums", "stages": {"": {"state": "failed", "started": 1.0}}})
    )
    return folder


ALL = {
    "MY_TOKEN": "t",
    "JUDGE_API_KEY": "j",
    "WANDB_API_KEY": "w",
    "SLIME_RM_URL": "https://me:x@judge/v1",
}


def test_all_secrets_that_are_missing_are_named_at_once(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    folder = secretive(outputs)
    text = (folder / "config.json").read_text()
    assert not [secret for secret in ("hunter22", "tok-1", "key-2", "abcdefgh") if secret in text]
    before = {path.name for path in folder.iterdir()}
    told = refused(capsys, str(folder))
    assert (
        all(f"{name} (" in told for name in ALL)
        and {path.name for path in folder.iterdir()} == before
    )
    monkeypatch.setenv("MY_TOKEN", "t")
    assert "MY_TOKEN" not in refused(capsys, str(folder), "--rm-url", "https://judge")
    told = refused(capsys, str(folder), "--lr", "1")
    save = newest_stage(folder).config().checkpoint.save
    assert "takes no --lr of this run" in told and f"--load {save or 'set to its --save'}" in told


def test_secrets_come_from_the_environment_and_from_flags(outputs: Path) -> None:
    config = Config.load(secretive(outputs) / "config.json")
    found = with_secrets(config, ["--wandb-key", "again"], ALL, "")
    assert found.cluster.train_env_vars == {"MY_TOKEN": "t", "NCCL_DEBUG": "INFO"}
    assert (found.observe.wandb_key, found.reward.rm_url) == ("again", "https://me:x@judge/v1")
    assert found.extra == {"judge": {"api_key": "j", "name": "j"}, "label_key": "answer"}
    file = outputs / "hooks.yaml"
    file.write_text("judge: {api_key: from-file}")
    environ = {name: value for name, value in ALL.items() if name != "JUDGE_API_KEY"}
    assert (
        with_secrets(config, ["--custom-config-path", str(file)], environ, "").extra["judge"][
            "api_key"
        ]
        == "from-file"
    )


def test_a_run_without_secrets_needs_none() -> None:
    config = make_config(num_rollout=4, input_key="question", label_key="answer")
    assert with_secrets(config, [], {}, "") == config
