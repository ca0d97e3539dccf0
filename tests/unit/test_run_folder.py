"""The run folder: who may write where, and what a crash leaves behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, make_config
from slime.errors import UserError
from slime.observe.run_folder import FolderTaken, RunFolder
from tests.support.run_folders import create_run, held


def config_for(
    directory: Path, name: str = "first", stage: str | None = None, **flags: object
) -> Config:
    return make_config(
        output_dir=str(directory),
        run_name=name,
        stage=stage,
        rollout_batch_size=4,
        num_rollout=10,
        prompt_data="data.jsonl",
        hf_checkpoint="model",
        **flags,
    )


def test_layout_without_and_with_a_stage(tmp_path: Path) -> None:
    plain = create_run(config_for(tmp_path))
    assert plain.path == tmp_path / "first"
    assert plain.config_path == plain.path / "config.json"
    assert plain.samples == plain.path / "samples"
    assert json.loads(plain.config_path.read_text())
    sft = create_run(config_for(tmp_path, "both", "sft"))
    rl = create_run(config_for(tmp_path, "both", "rl"))
    assert sft.path == rl.path
    assert sft.config_path.name == "config.sft.json" and rl.config_path.name == "config.rl.json"
    assert sft.metrics_path == rl.metrics_path, "one metrics.jsonl for the whole run"
    assert sft.samples != rl.samples and sft.model != rl.model


def test_an_existing_run_is_refused_unless_resumed(tmp_path: Path) -> None:
    create_run(config_for(tmp_path))
    with pytest.raises(UserError, match="exists already") as error:
        create_run(config_for(tmp_path))
    assert "--run-name" in error.value.fix
    resumed = create_run(config_for(tmp_path), resuming=True)
    assert resumed.state() == "running"
    assert list((resumed.path / "history").glob("config.*.json")), (
        "the settings of the first part are kept"
    )


def test_what_never_came_up_makes_room_for_the_corrected_try(tmp_path: Path) -> None:
    first = create_run(config_for(tmp_path))
    first.write_crash(UserError("no key 'question'"))
    second = create_run(config_for(tmp_path))
    assert second.state() == "running"
    second.set_state("launched")
    second.set_state("failed")
    with pytest.raises(UserError, match="exists already"):
        create_run(config_for(tmp_path))


def test_resuming_a_run_whose_folder_is_gone_makes_a_new_one(tmp_path: Path) -> None:
    assert create_run(config_for(tmp_path), resuming=True).config_path.exists()


def test_a_stage_is_claimed_once(tmp_path: Path) -> None:
    create_run(config_for(tmp_path, stage="sft"))
    with pytest.raises(UserError, match="already has stage 'sft'"):
        create_run(config_for(tmp_path, stage="sft"))
    create_run(config_for(tmp_path, stage="rl"))


def test_a_foreign_folder_is_not_taken_over_by_a_stage(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run folder"):
        create_run(config_for(tmp_path, stage="sft"))


def test_unwritable_output_directory_is_a_user_error_and_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with pytest.raises(UserError, match="cannot write to the folder") as error:
        create_run(config_for(blocked))
    assert "--output-dir" in error.value.fix
    assert blocked.read_text() == "no directory"


def test_two_live_processes_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with (
        create_run(config_for(tmp_path)).lock(),
        pytest.raises(UserError, match="another process") as error,
    ):
        create_run(config_for(tmp_path), resuming=True)
    assert "pid" in error.value.why


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


LAUNCHES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["first", "second"]),
        "stage": st.sampled_from([None, "sft", "rl"]),
        "save": st.sampled_from([None, "kept", "first/checkpoints"]),
        "resuming": st.booleans(),
        "ends": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(launches=st.lists(LAUNCHES, min_size=2, max_size=8))
def test_a_launch_that_is_refused_changes_nothing(
    launches: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever other runs go on or have ended, and no two of them write into one folder at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.deadlines.RUN_FOLDER_LOCK", 0.0)  # each holder keeps its lock
        claim_in_turn(launches, tmp_path_factory.mktemp("runs"))


def claim_in_turn(launches: list[dict[str, Any]], folder: Path) -> None:
    going: list[tuple[set[Path], ExitStack]] = []
    for number, launch in enumerate(launches):
        save = folder / launch["save"] if launch["save"] else None
        config = config_for(
            folder, launch["name"], launch["stage"], lr=float(number + 1), save=save and str(save)
        )
        wanted = {folder / launch["name"], *([save] if save else [])}
        before = contents(folder)
        try:
            run, locks = RunFolder.claim(config, resuming=launch["resuming"])
        except UserError as error:
            assert contents(folder).items() >= before.items(), error
            assert {name for name in contents(folder) if name not in before} <= {
                str((path / ".lock").relative_to(folder)) for path in wanted
            }
            continue
        assert not any(wanted & others for others, _ in going)
        assert Config.load(run.config_path).flat().lr == number + 1
        run.set_state("launched")
        if launch["ends"]:
            run.set_state("finished")
            locks.close()
        else:
            going.append((wanted, locks))
    for _, locks in going:
        locks.close()


@pytest.mark.parametrize("goes", ["run", "run/kept", None])
def test_what_is_removed_during_a_run_is_made_and_locked_again(
    goes: str | None, tmp_path: Path
) -> None:
    config = config_for(tmp_path, "run", save=str(tmp_path / "run" / "kept"))
    run, locks = RunFolder.claim(config)
    with locks:
        if goes:
            (tmp_path / goes).rename(tmp_path / "moved")
        assert run.reclaim(config, locks) == (goes == "run")
        assert run.config() == config and run.state() == "running"
        for other in ({"name": "run"}, {"name": "other", "save": config.checkpoint.save}):
            with pytest.raises(UserError, match="another process is writing to"):
                RunFolder.claim(config_for(tmp_path, **other), resuming=True)
        assert not run.reclaim(config, locks)


@pytest.mark.parametrize("name", ["", "kept"])
def test_a_folder_that_another_run_has_made_again_is_left_to_it(name: str, tmp_path: Path) -> None:
    config = config_for(tmp_path, "run", save=str(tmp_path / "kept"))
    run, locks = RunFolder.claim(config)
    with locks:
        folder = tmp_path / name if name else run.path
        (folder / ".lock").write_text("pid 1 on another host\n")
        with pytest.raises(FolderTaken, match="is another run's now"):
            run.reclaim(config, locks)


def test_a_run_keeps_its_folder_without_locks_and_under_another_name_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("pid 1 on another host\n")

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    for way in (no_locks, fcntl.flock):
        monkeypatch.setattr(fcntl, "flock", way)
        run, locks = RunFolder.claim(config, resuming=way is not no_locks)
        with locks:
            monkeypatch.setattr(platform, "node", lambda: "renamed")
            assert not run.reclaim(config, locks)


def test_a_look_at_the_lock_refuses_no_launch(tmp_path: Path) -> None:
    run = create_run(config_for(tmp_path))
    with (run.path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        held(run).close()


def test_states_of_stages(tmp_path: Path) -> None:
    sft = create_run(config_for(tmp_path, stage="sft"))
    sft.set_state("finished")
    rl = create_run(config_for(tmp_path, stage="rl"))
    assert (sft.state(), rl.state()) == ("finished", "running")
    assert rl.read_summary()["stages"]["sft"]["ended"] is not None


def test_a_crash_leaves_traceback_configuration_and_last_metrics(tmp_path: Path) -> None:
    run = create_run(config_for(tmp_path))
    run.metrics_path.write_text(
        "".join(json.dumps({"step": i}) + "\n" for i in range(30)) + '{"step": 30, "cut'
    )
    try:
        raise UserError(
            "engine 3 died", why="out of memory", fix="--sglang-mem-fraction-static 0.6"
        )
    except UserError as error:
        folder = run.write_crash(error, note="rollout")
    assert folder is not None
    assert "engine 3 died" in (folder / "traceback.txt").read_text()
    crash = json.loads((folder / "crash.json").read_text())
    assert (
        crash["error"] == "UserError"
        and crash["note"] == "rollout"
        and "torch" in crash["packages"]
    )
    last = [json.loads(line) for line in (folder / "last_metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in last] == list(range(10, 30))
    assert (folder / "config.json").read_bytes() == run.config_path.read_bytes()
    assert run.state() == "failed"


def test_a_crash_keeps_the_ends_of_the_logs(tmp_path: Path) -> None:
    """The next launch writes on in the same files."""
    run = create_run(config_for(tmp_path))
    (run.logs / "engine-0.log").write_text("short\n")
    (run.logs / "trainer-0.log").write_text(
        "".join(f"line {number}\n" for number in range(100_000))
    )
    folder = run.write_crash(RuntimeError("x"))
    assert folder is not None
    assert (folder / "logs" / "engine-0.log").read_text() == "short\n"
    kept = (folder / "logs" / "trainer-0.log").read_text()
    assert (
        60_000 < len(kept) <= 1 << 16 and kept.startswith("line ") and kept.endswith("line 99999\n")
    )


def test_keys_on_the_command_line_reach_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "train.py", "--wandb-key", "s3cret", "--wandb-key=s3cret",
        "--train-env-vars", '{"HF_TOKEN": "s3cret"}', "--lr", "1"
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    run = create_run(config_for(tmp_path, use_wandb=True, wandb_key="s3cret"))
    run.write_crash(RuntimeError("x"))
    assert run.read_summary()["stages"][""]["argv"][-2:] == ["--lr", "1"]
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"s3cret" in path.read_bytes()] == []


def test_a_crash_is_told_whatever_lies_among_the_logs(tmp_path: Path) -> None:
    run = create_run(config_for(tmp_path))
    (run.logs / "gone.log").symlink_to(tmp_path / "nowhere")
    os.mkfifo(run.logs / "pipe.log")
    (run.logs / "driver.log").write_text("the last words\n")
    folder = run.write_crash(RuntimeError("x"))
    assert folder is not None and [path.name for path in (folder / "logs").iterdir()] == [
        "driver.log"
    ]


def test_a_crash_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    run = create_run(config_for(tmp_path))
    run.crash.write_text("in the way")
    assert run.write_crash(RuntimeError("the real one")) is None
