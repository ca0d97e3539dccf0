"""The report: what of a run is in it, self-contained, closed to hostile text, robust to whatever a
run folder lacks.

How it looks in a browser: test_report_browser.py.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import itertools
import json
import logging
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.watched_runs import make_run
from slime.cli.report import main
from slime.config import make_config
from slime.errors import UserError
from slime.files import read_object
from slime.observe.alarms import find_alarms
from slime.observe.catalog import phases, plain_name, thin
from slime.observe.run_data import Stage, flags_with_origins, merge_rows, read_run
from slime.observe.run_folder import RunFolder
from slime.page import report_contents as contents
from slime.page.page_files import PAGE, one_file
from slime.page.report import ReportSink, write_comparison, write_report
from slime.page.report_contents import most_telling_first, packed, spread
from slime.page.rows import reward_of
from tests.support.metrics_page import documented_names
from tests.support.run_folders import held

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028"


def step_row(step: int, stage: str | None = None, **metrics: float | None) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + step, "stage": stage, **metrics}


def write_run(
    folder: Path, rows: list[dict[str, Any]], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def write_samples(
    folder: Path, records: list[dict[str, Any]], name: str = "rollout_000000"
) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / f"{name}.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records)
    )


@pytest.mark.parametrize("name", sorted(documented_names()))
def test_every_documented_metric_has_a_plain_name(name: str) -> None:
    metric = name.replace("<>", "x")
    if not metric.startswith(
        ("train/", "rollout/", "eval/", "perf/", "alarm/", "multi_turn/", "passrate/")
    ):
        return
    title, _ = plain_name(metric)
    assert title[0].isupper() and not re.search(r"[_/]|\s\s|^\s|\s$", title), title


def test_plain_names_and_units() -> None:
    for metric, named in {
        "perf/engines_idle_ratio": ("Engine idle time", "share of the step"),
        "perf/save_model_time": ("Save model time", "s"),
        "perf/trainer_memory_gb": ("Trainer memory", "GB"),
        "rollout/response_len/max": ("Response length, max", "tokens"),
        "eval/a-b": ("Evaluation: a-b", "reward"),
        "eval/a-b-pass@2": ("Evaluation: a-b, pass@2", "share"),
        "train/ppo_kl": ("PPO KL", "nats"),
        "my/own_metric": ("my/own_metric", ""),
        "x": ("x", ""),
    }.items():
        assert plain_name(metric) == named


@given(st.text())
def test_metrics_of_any_name_have_a_title(name: str) -> None:
    for metric in (name, f"eval/{name}", f"train/{name}"):
        title, unit = plain_name(metric)
        assert isinstance(unit, str) and (title.strip() or not name.strip())


def full_rows(count: int = 40) -> list[dict[str, Any]]:
    rows = [step_row(0, **{"eval/arith": 0.3})]
    for i in range(1, count + 1):
        rows.append(
            step_row(
                i,
                **{
                    "rollout/raw_reward": i / count,
                    "rollout/response_len/mean": 10.0 + i,
                    "rollout/response_len/min": 1.0,
                    "rollout/response_len/max": 60.0,
                    "train/entropy_loss": 1.0,
                    "train/kl_loss": 0.001 * i,
                    "train/train_rollout_logprob_abs_diff": 0.003,
                    "train/grad_norm": 0.5,
                    "perf/step_time": 3.0,
                    "perf/rollout_time": 2.0,
                    "perf/actor_train_time": 0.8,
                    "perf/tokens_per_gpu_per_sec": 1000.0,
                    "rollout/engine_load/0": 90.0,
                    "rollout/engine_load/1": 100.0,
                },
            )
        )
    rows[-1]["eval/arith"] = 0.9
    return rows


class _Page(html.parser.HTMLParser):
    """Collects elements and text, and checks that elements close in order."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "circle", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def data_of(path: Path) -> Any:
    """What a report has in it for its page."""
    found = re.search(
        r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', path.read_text()
    )
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def stage_of(path: Path) -> Any:
    """Of a run that has one stage."""
    (stage,) = data_of(path)["stages"].values()
    return stage


def test_a_full_run_is_in_the_file(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "demo", full_rows(), {"flags": {"lr": 1e-5}, "origins": {"lr": "flag"}}
    )
    data = data_of(write_report(folder))
    (run,), (stage,) = data["runs"]["runs"], data["stages"].values()
    assert (run["name"], run["step"]) == ("demo", 40), "an evaluation before training is no step"
    assert (
        stage["series"]["eval/arith"] == [[0, 40], [0.3, 0.9]]
        and len(stage["series"]["train/grad_norm"][0]) == 40
    )
    assert stage["settings"] == [{"flag": "lr", "value": "0.00001", "origin": "flag"}]
    assert stage["engines"]["loads"] == {"0": 90, "1": 100}
    assert [layer["name"] for layer in stage["phases"]] == ["generate", "train", "other"]


def test_the_file_needs_no_network_and_allows_no_foreign_script(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", full_rows())
    content = write_report(folder).read_text()
    assert (
        not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", content)
        and '<link rel="stylesheet"' not in content
    )
    assert "@import" not in content and "url(" not in content
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', content)
    assert (
        policy is not None
        and policy[1].startswith("default-src 'none';")
        and "unsafe" not in policy[1]
    )
    for directive, element in (("script-src", '<script type="module">'), ("style-src", "<style>")):
        (text,) = re.findall(f"{element}(.*?)</{element[1:6]}", content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy[1]
    assert not re.search(r'^(import|export)\b|from "/', content, re.MULTILINE), (
        "no module is asked for"
    )


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [
        step_row(
            1,
            HOSTILE,
            **{
                "rollout/raw_reward": 0.1,
                HOSTILE: 1.0,
                f"eval/{HOSTILE}": 0.5,
                f"perf/{HOSTILE}_time": 1.0,
                "perf/step_time": 2.0,
            },
        )
    ]
    folder = write_run(tmp_path / "x", rows)
    (folder / "config.json").write_text(
        json.dumps({"flags": {HOSTILE: HOSTILE}, "origins": {HOSTILE: HOSTILE}})
    )
    stages = {"": {"state": HOSTILE, "host": HOSTILE, "started": 1.0}}
    (folder / "run.json").write_text(json.dumps({"name": HOSTILE, "stages": stages}))
    segment = {"text": HOSTILE, "trained": True, "version": HOSTILE}
    record = {
        "group": HOSTILE,
        "index": 0,
        "prompt": [{"role": HOSTILE, "content": HOSTILE}],
        "response": HOSTILE,
        "label": HOSTILE,
        "reward": 1.0,
        "status": HOSTILE,
        "response_length": HOSTILE,
        "dataset": HOSTILE,
        "segments": [segment, {**segment, "trained": False, "version": 2}],
    }
    write_samples(folder, [record, {**record, "reward": 0.0, "segments": None}])
    write_samples(folder, [record], "eval_000000")
    (folder / "crash" / "t").mkdir(parents=True)
    (folder / "crash" / "t" / "crash.json").write_text(
        json.dumps({"error": HOSTILE, "message": HOSTILE})
    )
    page = parsed(write_report(folder))
    assert page.tags.count("script") == 2, "the data and our script, nothing else"
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    stages = data_of(folder / "report.html")["stages"].values()
    assert {row["record"]["response"] for stage in stages for row in stage["samples"]} == {HOSTILE}


def test_all_files_of_the_page_are_in_the_one_file() -> None:
    names = [file.name for file in Path(str(PAGE)).iterdir()]
    page = one_file("x", "", b"")
    assert {name.removesuffix(".js") for name in names if name.endswith(".js")} == set(
        re.findall(r"const \$(\w+) = \(\(\) =>", page)
    )
    for name in names:
        if name.endswith(".css"):
            assert PAGE.joinpath(name).read_text() in page


@given(st.text(st.characters(codec="utf-8")))
def test_what_a_model_wrote_reads_back_and_cannot_leave_its_element(text: str) -> None:
    page = one_file("x", "", packed({"x": text + HOSTILE}))
    inside = page.partition('id="data">')[2].partition("</body>")[0]
    assert inside.count("<") == 1 and inside.endswith("</script>")
    assert json.loads(gzip.decompress(base64.b64decode(inside[: -len("</script>")]))) == {
        "x": text + HOSTILE
    }


def test_half_characters_are_told_and_break_nothing(tmp_path: Path) -> None:
    """A lone surrogate, as a cut answer of a model may have: JSON's escape of it is read by nobody
    else."""
    folder = write_run(tmp_path / "x", full_rows(2))
    (folder / "samples").mkdir()
    (folder / "samples" / "rollout_000000.jsonl").write_text(
        '{"response": "\\ud83d"}\n{"response": "whole"}\n'
    )
    assert [row["record"]["response"] for row in stage_of(write_report(folder))["samples"]][
        -1
    ] == "whole"


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "x",
        full_rows(2),
        {
            "observe": {"wandb_key": "s3cret-value"},
            "cluster": {"train_env_vars": {"WANDB_API_KEY": "s3cret-value"}},
        },
    )
    assert "s3cret-value" not in json.dumps(data_of(write_report(folder)))


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"step": 1, "ti',
        '{"step": 1}\n{"step": 2, "rollout/raw_reward": null, "nonfinite": '
        '["rollout/raw_reward"]}\n',
        '{"step": 1, "rollout/raw_reward": 1.0}\n',
        '{"step": 1, "perf/step_time": 2.0, "perf/rollout_time": 1.0}\n',
        '{"step": 1, "perf/step_time": 0.0, "train/loss": 5}\n{"step": 2, "perf/step_time": '
        "null}\n",
        '{"no_step": 1}\n[1, 2]\nnull\n{"step": "x"}\n{"step": 3, "train/loss": "text", '
        '"rollout/x": [1]}\n',
    ],
)
def test_scarce_or_broken_metrics_still_give_a_report(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "x", [])
    (folder / "metrics.jsonl").write_text(content)
    write_samples(folder, [{"group": 0}, {"reward": None}, {"reward": {"a": "text"}}])
    parsed(write_report(folder))
    assert len(stage_of(folder / "report.html")["samples"]) == 3


def test_unreadable_json_files_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", full_rows(3))
    (folder / "config.json").write_text('{"flags": {')
    (folder / "run.json").write_text("{")
    parsed(write_report(folder))


def test_stages_are_there_newest_first(tmp_path: Path) -> None:
    rows = [step_row(i, "sft", **{"train/loss": 3.0 / (i + 1)}) for i in range(5)]
    rows += [step_row(i, "grpo", **{"rollout/raw_reward": 0.1 * i}) for i in range(5)]
    folder = write_run(tmp_path / "demo", rows)
    (folder / "config.json").unlink()
    for name in ("sft", "grpo"):
        (folder / f"config.{name}.json").write_text("{}")
    stages = {
        "sft": {"state": "finished", "started": 1.0, "ended": 2.0},
        "grpo": {"state": "finished", "started": 3.0},
    }
    (folder / "run.json").write_text(json.dumps({"name": "demo", "stages": stages}))
    runs = data_of(write_report(folder))["runs"]
    assert [run["name"] for run in runs["runs"]] == ["demo/grpo", "demo/sft"] and runs[
        "shown"
    ] == "0.grpo"
    assert [stage.name for stage in read_run(folder).stages] == ["sft", "grpo"]


def test_launch_and_evaluation_are_no_part_of_a_step() -> None:
    rows = full_rows(3)
    rows[1] |= {"perf/launch_time": 10.0, "perf/evaluate_time": 264.0}
    layers = phases(Stage("", rows=rows))
    assert [layer["name"] for layer in layers] == ["generate", "train", "other"]
    assert max(seconds for layer in layers for _, seconds in layer["points"]) <= 3.0


def live_run(folder: Path) -> RunFolder:
    write_run(folder, full_rows(2))
    stages = {"": {"state": "running", "started": 1000.0}}
    (folder / "run.json").write_text(json.dumps({"name": "x", "stages": stages}))
    return RunFolder(folder)


def test_the_page_of_a_run_that_goes_on_loads_itself_anew(tmp_path: Path) -> None:
    run = live_run(tmp_path / "x")
    lock = held(run)
    assert '<html lang="en" data-live>' in write_report(run.path).read_text()
    lock.close()
    assert '<html lang="en">' in write_report(run.path).read_text()


@settings(max_examples=30)
@given(cost=st.floats(0.0, 5.0), step=st.floats(0.5, 60.0))
def test_the_report_of_a_run_that_goes_on_costs_less_than_a_hundredth_of_it(
    cost: float, step: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However long it takes to write; and it is no older than a step after its next turn."""
    now, written = 0.0, []

    def write(*args: Any) -> None:
        nonlocal now
        written.append(now)
        now += cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.page.report.write_report", write)
        sink = ReportSink(RunFolder(tmp_path_factory.getbasetemp()), clock=lambda: now)
        for number in range(200):
            sink.log(number, {})
            sink.close()  # waits for the thread, whose time passes meanwhile
            now += step
    assert written[0] == 0.0
    gaps = [after - before for before, after in itertools.pairwise(written)]
    assert all(
        max(10.0, 100 * cost) <= gap <= max(10.0, 100 * cost) + cost + step + 1e-6 for gap in gaps
    )


def test_a_step_does_not_wait_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, may_end = threading.Event(), threading.Event()
    written = []

    def write(*args: Any) -> None:
        written.append(args)
        begins.set()
        may_end.wait()

    monkeypatch.setattr("slime.page.report.write_report", write)
    sink = ReportSink(RunFolder(tmp_path), clock=lambda: 0.0)
    for step in range(3):
        sink.log(step, {})
        begins.wait()
    may_end.set()
    sink.close()
    assert len(written) == 1


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = live_run(tmp_path / "x")

    def log(step: int) -> None:
        sink = ReportSink(run)
        sink.log(step, {})
        sink.close()

    log(1)
    assert run.report_path.is_file()

    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    for problem in (OSError(28, "No space left on device"), TypeError("what nobody foresaw")):

        def fails(*args: Any, problem: Exception = problem) -> None:
            raise problem

        monkeypatch.setattr("slime.page.report.write_report", fails)
        log(2)
    assert "No space left" in caplog.text and "TypeError: what nobody foresaw" in caplog.text


def test_a_folder_whose_name_is_no_unicode(tmp_path: Path) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"run\xff"), full_rows(2))
    assert (
        data_of(write_report(folder, tmp_path / "out.html"))["runs"]["runs"][0]["name"]
        == "run\udcff"
    )


def test_rows_of_one_step_become_one() -> None:
    rows = [step_row(2, a=1.0), step_row(1, a=0.0), step_row(2, b=2.0, a=3.0)]
    assert [(row["step"], row["a"], row.get("b")) for row in merge_rows(rows)] == [
        (1, 0.0, None),
        (2, 3.0, 2.0),
    ]


def test_a_run_that_was_killed_is_not_called_running(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", full_rows(3))
    (folder / "run.json").write_text(
        json.dumps({"name": "x", "stages": {"": {"state": "running", "started": 1000.0}}})
    )
    (stage,) = read_run(folder).stages
    assert stage.summary["state"] == "interrupted" and stage.summary["ended"] == 1003.0


def test_no_run_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        write_report(tmp_path / "none")
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)
    assert os.listdir(tmp_path) == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "x", full_rows(3))
    assert main([str(folder), "--output", str(tmp_path / "out.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


# -- several runs ----------------------------------------------------------------------------------


def compared(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: other learning rates, other evaluation sets, one shorter; hostile names."""
    one = {
        "megatron": {"lr": 1e-5, "seed": 1},
        "observe": {"run_name": "one", "wandb_key": "s3cret-value"},
    }
    two = {
        "megatron": {"lr": 1e-6, "seed": 1},
        "observe": {"run_name": "two", "wandb_key": "s3cret-other"},
    }
    rows = full_rows(10)
    rows[-1] = {name: value for name, value in rows[-1].items() if name != "eval/arith"} | {
        "eval/other": 0.1
    }
    return (
        write_run(tmp_path / "outputs" / "one", full_rows(40), one),
        write_run(tmp_path / "outputs" / "t<b>wo", rows, two),
    )


def test_runs_are_compared_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = compared(tmp_path)
    assert main(list(map(str, folders))) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "outputs" / "comparison.html"
    assert parsed(path).tags.count("script") == 2
    data = data_of(path)
    assert data["runs"]["shown"] == "0.,1." and {run["name"] for run in data["runs"]["runs"]} == {
        "one",
        "t<b>wo",
    }
    assert len(data["stages"]["0."]["series"]["train/grad_norm"][0]) == 40
    assert len(data["stages"]["1."]["series"]["train/grad_norm"][0]) == 10
    assert data["differences"] == {
        "runs": ["0.", "1."],
        "flags": [{"flag": "lr", "values": ["0.00001", "1e-6"]}],
    }
    assert "s3cret" not in json.dumps(data)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "demo", full_rows(3)) for parent in ("a", "b")]
    data = data_of(write_comparison(folders, tmp_path / "out.html"))
    assert {run["name"] for run in data["runs"]["runs"]} == set(map(str, folders)) and not data[
        "differences"
    ]["flags"]


# -- samples ---------------------------------------------------------------------------------------


def rewarded(rewards: list[float | None]) -> list[dict[str, Any]]:
    return [{"reward": reward} for reward in rewards]


def test_groups_that_differ_most_come_first_then_the_best_and_the_worst_in_turns() -> None:
    groups = [
        rewarded(r) for r in ([0, 0], [0.5, 0.5], [0, 1], [None], [0.2, 0.8], [1, 1], [0.9, 0.9])
    ]
    ordered = [[row["reward"] for row in group] for group in most_telling_first(groups)]
    assert ordered == [[0, 1], [0.2, 0.8], [1, 1], [0, 0], [0.9, 0.9], [0.5, 0.5], [None]]


def test_dict_rewards_use_the_reward_key() -> None:
    assert [reward_of({"reward": {"length": 9, "score": s}}, "score") for s in (0.0, 1.0)] == [
        0.0,
        1.0,
    ]
    assert (
        reward_of({"reward": {"text": "x", "length": 9}}) == 9.0
        and reward_of({"reward": "x"}) is None
    )


def test_a_small_run_is_there_as_a_whole(tmp_path: Path) -> None:
    stage = stage_of(write_report(make_run(tmp_path / "run", rollouts=12)))
    assert len(stage["samples"]) == 12 * 16 + 3 and stage["steps"]["note"] == ""
    assert len({row["id"] for row in stage["samples"]}) == 12 * 16 + 3
    assert [entry["step"] for entry in stage["steps"]["steps"]] == [*range(13)]
    assert stage["timeline"]["steps"] == [1, 7, 12] and "3 of 12 steps" in stage["timeline"]["note"]


def test_of_a_large_run_whole_groups_are_kept_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first rollout to the last, those whose rewards differ most, and both kinds of
    evaluation answers."""
    run = make_run(tmp_path / "run", rollouts=30, groups=8, size=4)
    held_out = [
        {"group": i, "dataset": name, "reward": float(i == 7), "response": f"{name} {i}"}
        for name in ("sums", "words")
        for i in range(40)
    ]
    write_samples(run, held_out, "eval_000029")
    monkeypatch.setattr(contents, "SAMPLE_BYTES", 200_000)
    stage = stage_of(write_report(run))
    rollouts = [row for row in stage["samples"] if row["kind"] == "rollout"]
    numbers = sorted({row["step"] for row in rollouts})
    assert len(numbers) == 8 and (numbers[0], numbers[-1]) == (1, 30)
    assert sum(row["length"] for row in stage["samples"]) <= 200_000
    groups: dict[int, list[Any]] = {}
    for row in rollouts:
        groups.setdefault(row["grp"], []).append(row)
    assert all(
        len(group) == 4 and abs(sum(row["above"] for row in group)) < 1e-9
        for group in groups.values()
    )
    assert all(len({row["reward"] for row in group}) == 2 for group in groups.values()), (
        "there are enough that differ"
    )
    answers = [row for row in stage["samples"] if row["kind"] == "eval" and row["step"] == 30]
    assert {(row["dataset"], row["reward"]) for row in answers} >= {
        ("sums", 1),
        ("sums", 0),
        ("words", 1),
        ("words", 0),
    }
    note = stage["steps"]["note"]
    assert note.startswith(
        f"This file contains {len(stage['samples'])} samples from 8 of 30 steps and 2 of 2 "
        "evaluations"
    )
    assert f"slime watch {run}" in note


def test_what_training_knew_of_the_tokens_is_with_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", full_rows(2))
    tokens = {"text": ["a", "b"], "log_probs": [-1.0, -2.0]}
    records = [
        {"index": i, "prompt_length": 3, "response_length": 2, "response": "ab", "tokens": tokens}
        for i in (5, 6)
    ]
    write_samples(run, records)
    known = {
        "index": 5,
        "total_length": 5,
        "response_length": 2,
        "advantages": -0.5,
        "log_prob_diffs": [0.25, None],
    }
    write_samples(run, [known, {"index": [5], "advantages": 1}], "trained_000000")
    first, second = stage_of(write_report(run))["samples"]
    assert first["record"]["tokens"] == tokens | {
        "advantages": [-0.5, -0.5],
        "log_prob_diffs": [0.25, None],
    }
    assert second["record"]["tokens"] == tokens


def test_of_a_group_that_is_too_large_best_and_worst_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", full_rows(2))
    records = [
        {
            "group": 0,
            "index": i,
            "reward": i / 8,
            "response": "x" * 5000,
            "tokens": {"text": ["x"], "log_probs": [0]},
        }
        for i in range(8)
    ]
    write_samples(run, records)
    monkeypatch.setattr(contents, "SAMPLE_BYTES", 9000)
    samples = stage_of(write_report(run))["samples"]
    assert [row["record"]["index"] for row in samples] == [7, 0] and "tokens" not in samples[0][
        "record"
    ]
    assert samples[0]["above"] == pytest.approx(7 / 8 - 3.5 / 8), "against its whole group"


@given(st.integers(0, 60), st.integers(2, 9))
def test_a_spread_has_both_ends_and_no_item_twice(length: int, count: int) -> None:
    items = spread(range(length), count)
    assert items == sorted(set(items)) and len(items) == min(length, count)
    assert not length or (items[0], items[-1]) == (0, length - 1)


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=1)
    (tmp_path / "secret.jsonl").write_text('{"response": "s3cret"}\n')
    (run / "samples" / "rollout_000009.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert "s3cret" not in json.dumps(data_of(write_report(run)))


def test_configuration_files_are_read_as_config_writes_them(tmp_path: Path) -> None:
    config = make_config(
        rollout_batch_size=4, num_rollout=10, prompt_data="d", hf_checkpoint="models/tiny", lr=1e-5
    )
    config.save(tmp_path / "config.json")
    flags = {
        name: (value, origin)
        for name, value, origin in flags_with_origins(read_object(tmp_path / "config.json"))
    }
    assert flags["rollout_batch_size"] == (4, config.origins["rollout_batch_size"])
    assert flags["lr"] == (1e-5, config.origins["lr"])
    assert "origins" not in flags
    folder = write_run(tmp_path / "run", full_rows(3))
    config.save(folder / "config.json")
    page = write_report(folder)
    assert data_of(page)["runs"]["runs"][0]["facts"][:3] == [
        "tiny",
        "GRPO",
        "4 prompts × 1 samples",
    ]
    assert "tiny · GRPO · 4 prompts × 1 samples" in page.read_text(), (
        "in words, for who has no script"
    )


# -- charts ----------------------------------------------------------------------------------------


def test_thinning_keeps_spikes_and_ends() -> None:
    points: list[tuple[float, float | None]] = [(float(i), 0.0) for i in range(10_000)]
    points[1234] = (1234.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 700 and kept[-1] == points[-1] and (1234.0, 99.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_a_long_run_has_few_points_of_few_digits(tmp_path: Path) -> None:
    rows = [step_row(i, **{"train/loss": None if i == 7 else 1 / 3}) for i in range(5000)]
    steps, losses = stage_of(write_report(write_run(tmp_path / "x", rows)))["series"]["train/loss"]
    assert len(steps) <= 602 and steps[-1] == 4999 and set(losses) <= {0.3333333, None}


# -- alarms ----------------------------------------------------------------------------------------


def rows_with(key: str, series: list[float]) -> list[dict[str, Any]]:
    return [step_row(i, **{key: value}) for i, value in enumerate(series)]


def titles(rows: list[dict[str, Any]]) -> list[str]:
    return [alarm.title for alarm in find_alarms(rows)]


def test_a_healthy_run_raises_no_alarm() -> None:
    assert titles(full_rows(60)) == []
    assert titles([]) == []


RISE_AND_FALL = [0.2 + 0.6 * math.sin(math.pi * i / 49) for i in range(50)]


@pytest.mark.parametrize(
    ("key", "series", "title"),
    [
        ("rollout/raw_reward", RISE_AND_FALL, "The reward has collapsed"),
        ("train/entropy_loss", [math.exp(-i / 8) for i in range(50)], "The entropy has collapsed"),
        (
            "train/train_rollout_logprob_abs_diff",
            [0.01 + 0.002 * i for i in range(50)],
            "Trainer and engine drift apart",
        ),
        ("train/train_rollout_logprob_abs_diff", [0.5], "Trainer and engine disagree"),
        (
            "rollout/truncated_ratio",
            [0.1, 0.6, 0.7] + [0.6, 0.7] * 7,
            "Many responses are truncated",
        ),
        ("train/grad_norm", [0.5] * 20 + [40.0], "A gradient spike"),
    ],
)
def test_patterns_that_raise_an_alarm(key: str, series: list[float], title: str) -> None:
    assert titles(rows_with(key, series)) == [title]


@pytest.mark.parametrize(
    ("key", "series"),
    [
        ("rollout/raw_reward", [0.1 + i / 60 for i in range(50)]),
        ("rollout/raw_reward", [0.5 + 0.01 * (-1) ** i for i in range(50)]),
        ("rollout/raw_reward", [0.8, 0.1]),
        ("train/entropy_loss", [1.0 - i / 100 for i in range(50)]),
        ("train/train_rollout_logprob_abs_diff", [0.004 + 0.001 * (i % 2) for i in range(50)]),
        ("train/grad_norm", [0.5, 3.0]),
    ],
)
def test_ordinary_curves_raise_none(key: str, series: list[float]) -> None:
    assert titles(rows_with(key, series)) == []


def test_what_was_learnt_since_older_weights_made_a_sample_is_no_disagreement() -> None:
    old = {"train/train_rollout_logprob_abs_diff": 0.5, "rollout/staleness/max": 1.0}
    assert titles([step_row(1, **old)]) == []
    assert titles([step_row(1, **{**old, "rollout/staleness/max": 0.0})]) == [
        "Trainer and engine disagree"
    ]


def test_uneven_engines_slow_data_and_nan() -> None:
    uneven = [
        step_row(1, **{f"rollout/engine_load/{i}": n for i, n in enumerate([100.0, 5.0, 5.0, 5.0])})
    ] * 5
    assert titles(uneven) == ["The engines are not loaded evenly"]
    assert titles([step_row(1, **{"perf/data_wait_time": 2.0, "perf/step_time": 10.0})] * 5) == [
        "Data loading is slow"
    ]
    bad = {**step_row(3, **{"train/loss": None}), "nonfinite": ["train/loss"]}
    (alarm,) = find_alarms([bad, {**bad, "step": 7}])
    assert "train/loss (first at step 3)" in alarm.detail


def test_series_of_a_stage() -> None:
    stage = Stage("", rows=[step_row(1, a=1.0), step_row(2, b=2.0), step_row(3, a=None)])
    assert stage.series("a") == [(1, 1.0), (3, None)]
    assert stage.keys() == ["a", "b"]
