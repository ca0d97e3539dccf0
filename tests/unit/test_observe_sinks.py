"""Metrics reach every sink, survive crashes and resumes, and stay readable while the run goes
on."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.config import Config, make_config
from slime.errors import UserError
from slime.observe import phases as phases_module
from slime.observe import sinks as sinks_module
from slime.observe.alarms import Alarm
from slime.observe.console import (
    ConsoleSink,
    column_values,
    duration,
    eval_scores,
    phase_seconds,
    sparkline,
    trend,
)
from slime.observe.jsonl_sink import JsonlSink
from slime.observe.run_data import read_run, rows_by_stage
from slime.observe.run_folder import RunFolder
from slime.observe.sinks import Sinks
from tests.support.run_folders import create_run


@pytest.fixture(autouse=True)
def no_forced_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which rich takes every file for a terminal."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def config_for(directory: Path, **flags: Any) -> Config:
    defaults = {
        "run_name": "run",
        "rollout_batch_size": 4,
        "num_rollout": 4,
        "prompt_data": "d",
        "hf_checkpoint": "m",
    }
    return make_config(output_dir=str(directory), **{**defaults, **flags})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def test_one_object_per_step_with_step_time_and_stage(tmp_path: Path) -> None:
    config = config_for(tmp_path, stage="grpo")
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        sinks.begin(0, 2)
        sinks.log(0, {"eval/arithmetic": 0.25})
        for step in (1, 2):
            with sinks.phase("rollout"):
                pass
            with sinks.phase("train"):
                pass
            sinks.log(step, {"rollout/raw_reward": step / 2, "train/loss": 0.5})
            assert rows_of(run)[-1]["step"] == step, "readable at once"
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["stage"] == "grpo" and row["time"] > 0 for row in rows)
    assert "perf/step_time" not in rows[0] and rows[0]["eval/arithmetic"] == 0.25
    assert {"perf/rollout_time", "perf/train_time", "perf/step_time"} <= rows[1].keys()
    assert run.state() == "finished"


def test_the_trainers_share_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the step without its evaluation: 1 s for a rollout, 2 s for generation to end, 3 s for
    another; of 12."""
    seconds = 0.0
    for asks in (sinks_module, phases_module):
        monkeypatch.setattr(asks, "now", lambda: seconds)
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        for name, took in {
            "train_wait": 1, "train": 6, "generation_wait": 2, "evaluation_wait": 3, "evaluate": 20
        }.items():  # fmt: skip
            with sinks.phase(name):
                seconds += took
        sinks.log(1, {"train/loss": 1.0})
        sinks.log(1, {"eval/a": 1.0})
    first, second = rows_of(run)
    assert (first["perf/step_time"], first["perf/trainer_wait_ratio"]) == (12.0, 0.5)
    assert "perf/trainer_wait_ratio" not in second


def test_the_share_of_a_step_in_which_images_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    for asks in (sinks_module, phases_module):
        monkeypatch.setattr(asks, "now", lambda: seconds)
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        for metrics in (
            {"perf/images/trainer_time": 0.5, "perf/images/rollout_time": 1.5},
            {"perf/images/trainer_time": 0.5},  # supervised
            {},
        ):
            seconds += 8
            sinks.log(1, {"train/loss": 1.0, **metrics})
    shares = [row.get("perf/images/step_ratio") for row in rows_of(run)]
    assert shares == [0.25, 0.0625, None]


def test_every_second_of_a_step_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part says what it has worked, the rest of what the driver waited for it is told
    apart."""
    seconds = 0.0
    for asks in (sinks_module, phases_module):
        monkeypatch.setattr(asks, "now", lambda: seconds)
    run = create_run(config := config_for(tmp_path))
    worked = {
        "rollout": 4.0,
        "data_preprocess": 0.5,
        "train": 2.75,
        "actor_train": 2.5,
        "update_weights": 0.25,
    }
    with Sinks(config, run, quiet()) as sinks:
        for name, took in {"rollout": 6, "train": 3, "update_weights": 2}.items():
            with sinks.phase(name):
                seconds += took
        sinks.log(
            1, {"train/loss": 1.0, **{f"perf/{name}_time": value for name, value in worked.items()}}
        )
    [row] = rows_of(run)
    assert (
        row["perf/step_time"] == 11.0 and row["perf/handover_time"] == 11.0 - 4.0 - 0.5 - 2.5 - 0.25
    )
    assert sum(phase_seconds(row).values()) == row["perf/step_time"]


def test_a_step_that_is_done_again_has_no_time_of_the_one_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    for asks in (sinks_module, phases_module):
        monkeypatch.setattr(asks, "now", lambda: seconds)
    run = create_run(config := config_for(tmp_path))
    with Sinks(config, run, quiet()) as sinks:
        sinks._log_seconds = 7.0  # of the step before, which is done again, too
        with suppress(RuntimeError), sinks.phase("train"):
            seconds += 30
            raise RuntimeError("a rank died")
        with sinks.phase("launch"):
            seconds += 8
        sinks.begin(0, 4, 8.0)
        for name, took in {"rollout": 2, "train": 3}.items():
            with sinks.phase(name):
                seconds += took
        sinks.log(1, {"train/loss": 1.0})
    [row] = rows_of(run)
    assert row["perf/step_time"] == 5.0 == sum(phase_seconds(row).values())
    assert (row["perf/train_time"], row["perf/launch_time"]) == (3.0, 8.0)


def test_nan_and_infinity_become_null_with_their_names(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        sinks.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 0.1})
    (row,) = rows_of(run)
    assert row["train/loss"] is None and row["train/grad_norm"] is None and row["train/lr"] == 0.1
    assert row["nonfinite"] == ["train/loss", "train/grad_norm"]


def test_a_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    sft = config_for(tmp_path, stage="sft")
    with Sinks(sft, create_run(sft), quiet()) as sinks:
        sinks.log(5, {"train/loss": 1.0})
    config = config_for(tmp_path, stage="grpo")
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        for step in range(4):
            sinks.log(step, {"train/loss": 1.0 + step})
    run = create_run(config, resuming=True)
    with Sinks(config, run, quiet()) as sinks:
        sinks.begin(2, 4)  # the checkpoint was made after two rollouts
        sinks.log(3, {"train/loss": 30.0})
    rows = rows_of(run)
    assert [(row["stage"], row["step"]) for row in rows] == [
        ("sft", 5),
        ("grpo", 0),
        ("grpo", 1),
        ("grpo", 2),
        ("grpo", 3),
    ]
    assert rows[-1]["train/loss"] == 30.0
    (lost,) = (run.path / "history").glob("metrics.*.jsonl")
    assert [json.loads(line)["train/loss"] for line in lost.read_text().splitlines()] == [4.0]
    curves = EventAccumulator(str(run.tensorboard))
    curves.Reload()
    assert [(e.step, e.value) for e in curves.Scalars("train/loss")] == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
        (3, 30.0),
    ]


def test_a_step_whose_process_was_killed_behind_its_checkpoint_is_logged_from_there(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        sinks.log(1, {"train/loss": 1.0})
        sinks.log(2, {"eval/a": 0.5})
    for _ in range(2):  # the second time it is there
        run = create_run(config, resuming=True)
        with Sinks(config, run, quiet()) as sinks:
            sinks.begin(2, 4, saved={"train/loss": 2.0})
    assert [(row["step"], row["train/loss"]) for row in rows_of(run) if "train/loss" in row] == [
        (1, 1.0),
        (2, 2.0),
    ]


def test_an_evaluation_that_was_beside_later_steps_is_of_its_own(tmp_path: Path) -> None:
    """In every sink, and for whoever goes on; times of phases stay with the step that is under
    way."""
    config, console = config_for(tmp_path), quiet()
    run = create_run(config)
    with Sinks(config, run, console) as sinks:
        sinks.begin(0, 4)
        for step in (1, 2, 3):
            with sinks.phase("train"):
                pass
            if step == 3:
                sinks.log_late(1, {"eval/a": 0.75, "eval/b": math.nan, "perf/eval_time": 9.0})
            sinks.log(step, {"rollout/raw_reward": 0.5, "train/loss": 1.0})
    logged = rows_of(run)
    assert [row["step"] for row in logged] == [1, 2, 1, 3]
    assert not any("train" in name for name in logged[2]) and "perf/train_time" in logged[3]
    assert logged[3]["alarm/nonfinite"] == 1.0 and "alarm/nonfinite" not in logged[2]
    assert any(
        line.startswith("run  step 1/4  held-out: a 0.750, b nan") for line in shown(console)
    )
    merged = rows_by_stage(logged)[""]
    assert [(row["step"], row.get("eval/a"), row["train/loss"]) for row in merged] == [
        (1, 0.75, 1.0), (2, None, 1.0), (3, None, 1.0),
    ]  # fmt: skip
    assert merged[0]["nonfinite"] == ["eval/b"]
    for start, kept in ((1, [1, 2, 1]), (0, [])):  # from a checkpoint behind it, and from none
        run = create_run(config, resuming=True)
        with Sinks(config, run, quiet()) as sinks:
            sinks.begin(start + (start > 0), 4)
        assert [row["step"] for row in rows_of(run)] == kept
        curves = EventAccumulator(str(run.tensorboard))
        curves.Reload()
        assert [e.step for e in curves.Scalars("eval/a")] == [1][: len(kept)]
        assert [e.step for e in curves.Scalars("train/loss")] == [1, 2][: len(kept)]


def test_a_fresh_begin_drops_what_an_attempt_without_checkpoint_logged(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        sinks.log(0, {"eval/a": 0.1})
        sinks.log(1, {"train/loss": 1.0})
    with Sinks(config, create_run(config, resuming=True), quiet()) as sinks:
        sinks.begin(0, 4)
        sinks.log(0, {"eval/a": 0.2})
    assert [(row["step"], row["eval/a"]) for row in rows_of(run)] == [(0, 0.2)]


@pytest.mark.parametrize("was_saved", [True, False])
def test_a_resume_without_a_checkpoint_says_what_is_trained_again(
    tmp_path: Path,
    was_saved: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    config = config_for(tmp_path)
    with Sinks(config, create_run(config), quiet()) as sinks:
        sinks.begin(0, 4)
        metrics = {"train/loss": 1.0} | ({"perf/save_model_time": 0.1} if was_saved else {})
        for step in (1, 2):
            sinks.log(step, metrics)
    assert "starts over" not in caplog.text
    with Sinks(config, create_run(config, resuming=True), quiet()) as sinks:
        sinks.begin(0, 4)
    assert "the run starts over" in caplog.text and "trains steps 1 to 2 again" in caplog.text
    assert ("no checkpoint any more" in caplog.text) == was_saved


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "9", "stage": null}',
        '{"step": 1.5, "stage": null}',
        '{"step": true, "stage": null}',
        '{"step": 1, "stage": ["a"]}',
        '{"stage": null, "train/loss": 1.0}',
        '{"step": 0, "stage": null, "train/loss": {"a": 1}, "rollout/raw_reward": "high"}',
        "[1]",
    ],
)
def test_what_no_run_wrote_into_its_metrics_is_left_out(tmp_path: Path, line: str) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    written = [json.dumps({"step": n, "stage": None, "train/loss": 1.0}) for n in (1, 2)]
    run.metrics_path.write_text("\n".join([*written, line]) + "\n")
    with Sinks(config, create_run(config, resuming=True), quiet()) as sinks:
        sinks.begin(1, 4)
        sinks.log(2, {"train/loss": 3.0})
    known = [row for row in read_run(run.path).stages[0].rows if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in known] == [(1, 1.0), (2, 3.0)]


def test_a_line_cut_by_a_crash_is_removed_before_the_next_is_written(tmp_path: Path) -> None:
    run = create_run(config_for(tmp_path))
    run.metrics_path.write_text('{"step": 0}\n{"step": 1, "train/lo')
    sink = JsonlSink(run)
    sink.log(1, {"train/loss": 2.0})
    sink.close()
    assert [row["step"] for row in rows_of(run)] == [0, 1]


class Incomparable(dict[str, Any]):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("rows are compared with each other, which is quadratic")

    __hash__ = None  # type: ignore[assignment]


def test_a_rewind_parts_the_lines_without_comparing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(config_for(tmp_path))
    sink = JsonlSink(run)
    rows = [Incomparable(step=step, stage=run.stage) for step in range(4)]
    other = Incomparable(step=9, stage="another")
    monkeypatch.setattr("slime.observe.jsonl_sink.read_metrics", lambda path: [*rows, other])
    sink.rewind(2)
    sink.close()
    assert [row["step"] for row in rows_of(run)] == [0, 1, 9]
    (lost,) = (run.path / "history").glob("metrics.*.jsonl")
    assert [json.loads(line)["step"] for line in lost.read_text().splitlines()] == [2, 3]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(config_for(tmp_path))
    sink = JsonlSink(run)
    sink.log(1, {"train/loss": 2.0})
    real_write, calls = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(UserError, match="cannot write step 2") as error:
            sink.log(2, {"train/loss": 3.0})
    assert "No space left" in error.value.why
    assert [row["step"] for row in rows_of(run)] == [1]
    sink.log(3, {"train/loss": 3.0})
    assert [row["step"] for row in rows_of(run)] == [1, 3]
    sink.close()


def test_a_full_disk_at_the_end_does_not_hide_why_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(config_for(tmp_path))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "set_state", full)
    with pytest.raises(KeyError, match="the reason"), Sinks(config_for(tmp_path), run, quiet()):
        raise KeyError("the reason")


class DeadSink:
    """A tracker whose service has died."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise ConnectionResetError("Connection lost")

    def rewind(self, next_step: int) -> None:
        raise ConnectionResetError("Connection lost")

    def close(self) -> None:
        raise ConnectionResetError("Connection lost")


def test_a_tracker_that_dies_and_a_trace_that_is_damaged_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    sinks = Sinks(config, run, quiet(), more=[DeadSink()])
    sinks.begin(0, 4)
    run.trace.mkdir()
    (run.trace / "rollout_000000.json").write_text('{"traceEvents": [')
    with sinks.phase("rollout"):
        pass
    sinks.log(1, {"train/loss": 1.0})
    sinks.log_late(1, {"eval/a": 0.5})
    sinks.close("finished")
    assert [row["step"] for row in rows_of(run)] == [1, 1] and run.state() == "finished"
    for said in ("step 1 is not in Dead: Conn", "in its trace", "Dead was not closed properly"):
        assert said in caplog.text


@pytest.mark.parametrize("goes", ["removed", "moved", "replaced"])
def test_steps_are_logged_though_the_file_goes_during_the_run(
    tmp_path: Path, goes: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = create_run(config_for(tmp_path))
    sink = JsonlSink(run)
    sink.log(1, {"train/loss": 2.0})
    moved = tmp_path / "elsewhere"
    run.path.rename(moved)
    if goes == "removed":
        (moved / "metrics.jsonl").unlink()
    elif goes == "replaced":  # an editor, or rsync
        run.path.mkdir()
        run.metrics_path.write_bytes((moved / "metrics.jsonl").read_bytes())
    sink.log(2, {"train/loss": 3.0})
    sink.log(3, {"train/loss": 3.0})
    sink.close()
    assert [row["step"] for row in rows_of(run)] == ([1] if goes == "replaced" else []) + [2, 3]
    assert caplog.text.count("steps from 2 on are in a new one") == 1
    assert ("elsewhere" in caplog.text) == (goes != "removed") or "(deleted)" in caplog.text


def test_tensorboard_reads_every_scalar_without_torch(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    run = create_run(config)
    with Sinks(config, run, quiet()) as sinks:
        for step in (1, 2):
            sinks.log(step, {"rollout/raw_reward": step / 4, "train/loss": -step})
            curves = EventAccumulator(str(run.tensorboard))
            curves.Reload()
            assert len(curves.Scalars("train/loss")) == step, "grows while the run goes on"
    assert [(e.step, e.value) for e in curves.Scalars("rollout/raw_reward")] == [
        (1, 0.25),
        (2, 0.5),
    ]


def test_tensorboard_can_be_turned_off_and_named(tmp_path: Path) -> None:
    off = config_for(tmp_path, run_name="off", use_tensorboard=False)
    run = create_run(off)
    Sinks(off, run, quiet()).close()
    assert not run.tensorboard.exists()
    named = config_for(tmp_path, run_name="named", tb_project_name="math", tb_experiment_name="one")
    run = create_run(named)
    Sinks(named, run, quiet()).close()
    assert list((run.tensorboard / "math" / "one").iterdir())


def test_a_run_that_is_closed_early_is_stopped_and_one_that_raises_is_failed(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path, run_name="a")
    run = create_run(config)
    sinks = Sinks(config, run, quiet())
    with pytest.raises(ValueError), sinks.phase("rollout"):
        raise ValueError
    assert sinks.open_phase == "rollout", "known when the crash is written"
    sinks.close()
    sinks.close("finished")
    assert run.state() == "stopped"
    config = config_for(tmp_path, run_name="b")
    run = create_run(config)
    with pytest.raises(RuntimeError), Sinks(config, run, quiet()):
        raise RuntimeError
    assert run.state() == "failed"


def test_wandb_offline_run_continues_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = config_for(
        tmp_path, use_wandb=True, wandb_mode="offline", use_tensorboard=False, wandb_group="g"
    )
    run = create_run(config)
    for resuming in (False, True):
        with Sinks(config, run, quiet()) as sinks:
            sinks.log(int(resuming) + 1, {"train/loss": 1.0})
    folders = list((run.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    kept_id = (run.path / ".wandb-id").read_text()
    assert all(f"-{kept_id}" in folder.name for folder in folders), (
        "both parts of the run have one id"
    )
    assert all(list(folder.glob("*.wandb")) for folder in folders)


def test_use_wandb_without_wandb_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = config_for(tmp_path, use_wandb=True)
    with pytest.raises(UserError, match="needs the package wandb") as error:
        Sinks(config, create_run(config), quiet())
    assert "slime-rl[wandb]" in error.value.fix


# -- console ---------------------------------------------------------------------------------------

STEP = {
    "rollout/raw_reward": 0.625,
    "rollout/response_len/mean": 11.25,
    "train/loss": 0.0131,
    "perf/step_time": 3.4,
    "perf/rollout_time": 2.1,
    "perf/train_time": 1.2,
    "perf/actor_train_time": 0.9,
    "perf/log_probs_time": 0.3,
    "perf/tokens_per_gpu_per_sec": 1240.4,
}


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def rendered(sink: ConsoleSink, width: int = 100) -> str:
    plain = Console(file=io.StringIO(), width=width)
    plain.print(sink.render())
    return "\n".join(shown(plain))


def recorded() -> list[tuple[int, dict[str, float]]]:
    """The second stage of a `make demo`: an evaluation, 40 steps of GRPO, an evaluation."""
    path = Path(__file__).parents[2] / "docs" / "measurements" / "demo.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row.pop("step"), row) for row in rows]


def test_plain_line_per_step_when_not_a_terminal() -> None:
    console = quiet()
    sink = ConsoleSink("demo/grpo", 60, console)
    sink.begin(0, 60, 12.0)
    sink.log(
        12,
        {
            **STEP,
            "eval/arithmetic": 0.71,
            "eval/arithmetic-pass@4": 0.9,
            "perf/evaluate_time": 20.0,
        },
    )
    sink.close()
    ready, line, evaluation = shown(console)
    assert "demo/grpo  ready after 12.0 s" in ready
    for part in (
        "demo/grpo  step 12/60",
        "reward 0.625",
        "length 11.2",
        "1,240 tok/s",
        "3.4 s, 62 % generate",
    ):
        assert part in line, line
    assert evaluation == "demo/grpo  step 12/60  held-out: arithmetic 0.710  20.0 s"
    assert not any("pass@4" in text or "\x1b" in text for text in shown(console))


def test_lines_of_a_recorded_run() -> None:
    """Short, and without what is 0 by construction."""
    console = quiet()
    sink = ConsoleSink("demo/grpo", 40, console)
    for step, metrics in recorded():
        sink.log(step, metrics)
    lines = shown(console)
    assert len(lines) == 42 and max(map(len, lines)) <= 130
    assert not any(word in line for line in lines for word in ("loss", " kl", "KL"))
    assert all("entropy" in line for line in lines[1:-1]) and "reward 0.457  entropy" in lines[1]
    assert "held-out: arithmetic 0.897 (first 0.463)" in lines[-1] and "eta" not in lines[-2]


def test_parts_of_a_step_are_no_more_than_the_step() -> None:
    for step, metrics in recorded():
        if step:
            assert sum(phase_seconds(metrics).values()) <= metrics["perf/step_time"]
    first = {
        "perf/launch_time": 10.2,
        "perf/evaluate_time": 26.7,
        "perf/eval_time": 26.6,
        "perf/step_time": 17.6,
    }
    assert phase_seconds({**first, "perf/rollout_time": 17.0}) == {"rollout": 17.0}


def test_time_to_go_counts_evaluations() -> None:
    sink = ConsoleSink("x", 12, quiet())
    sink.log(0, {"eval/a": 0.5, "perf/evaluate_time": 1000.0})
    for step in range(1, 11):
        evaluated = {"perf/evaluate_time": 20.0, "eval/a": 0.5} if step % 5 == 0 else {}
        sink.log(step, {"rollout/raw_reward": 0.0, "perf/step_time": 3.0, **evaluated})
    assert sink.eta() == pytest.approx(2 * (3.0 + 40.0 / 10))


@pytest.mark.parametrize("variable", [{"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}, {}])
def test_a_pipe_gets_plain_lines_whatever_the_environment_says(
    variable: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sink = ConsoleSink("x", 4)
    sink.log(1, STEP)
    sink.close()
    said = sys.stderr.getvalue()
    assert "step 1/4" in said and "\x1b" not in said and said.count("step 1/4") == 1


def test_live_table_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    now = 0.0
    sink = ConsoleSink("demo/grpo", 60, console, clock=lambda: now)
    sink.log(0, {"eval/arithmetic": 0.3})
    sink.log(12, {**STEP, "eval/arithmetic": 0.71})
    sink.phase_changed("rollout")
    sink.progress({"done": 17, "target": 64, "tokens": 2000})
    now = 4.0
    text = rendered(sink)
    for part in (
        "demo/grpo",
        "step 12/60",
        "eta 2:43",
        "generating 17/64 prompts, 2,000 tokens, 4.0 s",
        "0.625",
        "arithmetic 0.710 (first 0.300)",
        "generate 2.1 s",
    ):
        assert part in text, text
    sink.close()
    assert "generating" not in rendered(sink), "what stays on the screen has nothing under way"


def test_a_late_evaluation_stands_in_the_row_of_its_step() -> None:
    sink = ConsoleSink("x", 60, quiet())
    for step in (11, 12, 13):
        sink.log(step, STEP)
    sink.log(12, {"eval/arithmetic": 0.71})
    rows = [
        line.split()
        for line in rendered(sink).splitlines()
        if line.strip()[:2] in ("11", "12", "13")
    ]
    assert ["0.710" in row for row in rows] == [False, True, False]
    sink.log(3, {"eval/arithmetic": 0.6})  # which is not shown any more
    assert "arithmetic 0.600 (first 0.710)" in rendered(sink)


@pytest.mark.parametrize("width", [80, 100])
def test_the_live_table_of_a_recorded_run(width: int) -> None:
    sink = ConsoleSink("demo/grpo", 40, quiet())
    for step, metrics in recorded():
        sink.log(step, metrics)
    text = rendered(sink, width)
    titles = next(line for line in text.splitlines() if "entropy" in line)
    assert titles.split() == [
        "step",
        "reward",
        "held-out",
        "entropy",
        "length",
        "Δ",
        "log-prob",
        "tok/s",
        "time",
    ]
    last = next(line for line in text.splitlines() if line.strip().startswith("40 "))
    assert last.split()[:4] == ["40", "0.941", "0.897", "0.162"]
    assert "0.457 → 0.941" in text and "▁" in text and "…" not in text
    assert len([line for line in text.splitlines() if line.strip()[:2].isdigit()]) == 8, (
        "the last steps"
    )


def test_a_supervised_stage_shows_its_loss() -> None:
    console = quiet()
    sink = ConsoleSink("x", 2, console, supervised=True)
    sink.log(
        1,
        {
            "train/loss": 2.4,
            "train/grad_norm": 1.5,
            "rollout/raw_reward": 0.0,
            "perf/actor_train_tok_per_s": 9.0,
        },
    )
    assert shown(console) == ["x  step 1/2  loss 2.4000  grad norm 1.500  9 tok/s"]
    assert "reward" not in rendered(sink)


def test_a_long_phase_says_in_a_plain_log_how_far_it_is() -> None:
    console, now = quiet(), 0.0
    sink = ConsoleSink("x", 9, console, clock=lambda: now)
    for phase in (
        "evaluate",
        "rollout",
    ):  # the evaluation before training is step 0, as in its own line
        sink.phase_changed(phase)
        started = now
        while now < started + 1000.0:
            sink.progress({"done": (now - started) // 10, "target": 100, "tokens": 7})
            now += 0.5
    lines = shown(console)
    assert lines[0] == "x  step 0/9  evaluating 3/100 prompts, 7 tokens, 30.0 s"
    assert lines[1] == "x  step 0/9  evaluating 6/100 prompts, 7 tokens, 1:00"
    assert [line.rsplit(", ", 1)[1] for line in lines] == [
        "30.0 s",
        "1:00",
        "2:00",
        "4:00",
        "8:00",
        "13:00",
    ] * 2
    assert "step 1/9  generating 3/100" in lines[6]
    for phase in ("train", "evaluate"):
        sink.phase_changed(phase)
    now += 31.0
    sink.progress({"done": 1, "target": 2})
    assert "step 1/9  evaluating 1/2" in shown(console)[-1], "of the step that was just trained"
    sink.log(1, STEP)
    sink.phase_changed("evaluate")
    now += 31.0
    sink.progress({"done": 1, "target": 2})
    assert "step 1/9  evaluating 1/2" in shown(console)[-1], (
        "of the weights that a checkpoint brought"
    )


def test_what_has_no_counters_prints_nothing() -> None:
    console, now = quiet(), 0.0
    sink = ConsoleSink("x", 9, console, clock=lambda: now)
    sink.phase_changed("train_wait")
    now = 100.0
    sink.progress({})
    assert shown(console) == []


ALARM = Alarm(
    "No group teaches anything",
    "all rewards of a prompt are [equal]",
    "harder prompts",
    "no_contrast",
)


def test_an_alarm_is_told_when_it_comes_and_stays_in_the_table_until_it_goes() -> None:
    console = quiet()
    sink = ConsoleSink("x", 9, console)
    sink.log(3, STEP)
    sink.alarm(ALARM)
    assert shown(console)[1:] == [
        "x  step 3/9  warning: No group teaches anything: all rewards of a prompt are [equal]",
        "    try: harder prompts",
    ]
    sink.log(4, STEP)
    assert (
        "step 3  warning: No group teaches anything: all rewards of a prompt are [equal]"
        in rendered(sink)
    )
    sink.log(5, {**STEP, "alarm/no_contrast": 1.0, "alarm/truncation": 0.0})
    assert "step 3  warning: " in rendered(sink)
    sink.log(6, {**STEP, "alarm/no_contrast": 0.0})
    assert "warning" not in rendered(sink)
    sink.alarm(ALARM)
    assert "step 6  warning: " in rendered(sink), "it has come back"
    other = Alarm("Many responses are truncated", "90 % of them", "raise the limit", "truncation")
    assert sink.closing_lines([ALARM, other]) == [
        "warning since step 6: No group teaches anything (explained above)",
        "warning: Many responses are truncated: 90 % of them",
        "  try: raise the limit",
    ]
    sink.close()
    assert "warning" not in rendered(sink), "the closing lines tell it"
    coloured = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    ConsoleSink("x", 9, coloured).alarm(ALARM)
    assert "\x1b[1;31mwarning" in "\n".join(shown(coloured))


@pytest.mark.parametrize(
    ("values", "arrow"),
    [
        ([0.5] * 3, ""),
        ([0.5] * 4, "→"),
        ([0.1, 0.2, 0.3, 0.4], "↑"),
        ([1, 1, 0, 0], "↓"),
        ([0, 1] * 5, "→"),
    ],
)
def test_trend(values: list[float], arrow: str) -> None:
    assert trend(values) == arrow


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0, 0.5]) == "▁▅█▅"
    assert sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    long = sparkline([i / 1000 for i in range(1000)], width=8)
    assert long == "▁▂▃▄▅▆▇█"


def test_hostile_text_is_no_markup() -> None:
    console = quiet()
    sink = ConsoleSink("[bold]x[/nonsense]", 1, console)
    sink.begin(0, 1, 0.0)
    sink.log(1, STEP)
    sink.render()
    assert isinstance(console.file, io.StringIO) and "[bold]x[/nonsense]" in console.file.getvalue()


def test_times_are_split_without_counting_twice() -> None:
    assert list(phase_seconds(STEP)) == ["rollout", "actor_train", "log_probs"]
    assert list(phase_seconds({"perf/train_time": 1.0, "perf/step_time": 2.0})) == ["train"]
    ahead = {
        "perf/rollout_time": 9.0,
        "perf/train_wait_time": 2.0,
        "perf/actor_train_time": 7.0,
        "perf/train_time": 8.0,
    }
    assert list(phase_seconds(ahead)) == ["actor_train", "train_wait"], (
        "generation ahead of training is hidden behind it"
    )


def test_column_preferences_and_scores() -> None:
    assert column_values({"rollout/rewards": 1.0})["reward"] == "1.000"
    dashes = {
        "eval/aime-2024": 0.5,
        "eval/aime-2024-truncated_ratio": 0.1,
        "eval/aime-2024-pass@8": 0.7,
    }
    assert eval_scores(dashes) == {"aime-2024": 0.5}
    assert eval_scores(
        {"eval/a": 1.0, "eval/a/response_len/mean": 3.0, "eval/a-pass@2": 1.0, "train/loss": 1.0}
    ) == {"a": 1.0}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.034, "0.03 s"), (12.34, "12.3 s"), (163, "2:43"), (3763, "1:02:43")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_wandb_run_that_is_asked_for_is_resumed_also_by_a_folder_that_had_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.observe.wandb_sink import WandbSink

    fake = MagicMock()
    fake.Settings = SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = create_run(config_for(tmp_path, use_wandb=True))
    ids = []
    for asked in (None, "theirs", None):
        WandbSink(config_for(tmp_path, use_wandb=True, wandb_run_id=asked), run)
        ids.append(fake.init.call_args.kwargs["id"])
    assert ids[0] != "theirs" and ids[1:] == ["theirs", "theirs"]


@pytest.mark.parametrize("key", [{}, {"wandb_key": "k"}])
def test_a_wandb_server_is_taken_wherever_the_key_comes_from(
    key: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.observe.wandb_sink import WandbSink

    fake, asked = MagicMock(), "https://wandb.example"
    fake.Settings = SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = config_for(tmp_path, use_wandb=True, wandb_host=asked, **key)
    WandbSink(config, create_run(config))
    settings = fake.init.call_args.kwargs["settings"]
    assert settings.base_url == asked
    assert getattr(settings, "api_key", None) == key.get("wandb_key")
    assert not fake.login.called, "it would write the key to ~/.netrc"
