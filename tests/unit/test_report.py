"""The report: complete, self-contained, safe against hostile text, and robust to whatever a run folder lacks."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import logging
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slime.observe.report.charts import BOTTOM, DIGIT, HEIGHT, Chart, Series, points_json, smooth, svg, thin, ticks
from slime.observe.report.compare import comparison_charts
from slime.observe.report.page import script_json
from slime.observe.report.samples import group_html, groups_by_contrast

from slime.cli.report import main
from slime.config import make_config
from slime.errors import UserError
from slime.files import read_object
from slime.observe.alarms import find_alarms
from slime.observe.catalog import charts_of
from slime.observe.report import ReportSink, write_comparison, write_report
from slime.observe.run_data import Stage, flags_with_origins, merge_rows, read_run
from slime.observe.run_folder import RunFolder

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028"


def step_row(step: int, stage: str | None = None, **metrics: float | None) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + step, "stage": stage, **metrics}


def write_run(folder: Path, rows: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def write_samples(folder: Path, records: list[dict[str, Any]], name: str = "rollout_000000") -> None:
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


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

    VOID = frozenset({"meta", "img", "br", "line", "circle", "path"})

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


def test_a_full_run_shows_every_chart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", full_rows(), {"flags": {"lr": 1e-5}, "origins": {"lr": "flag"}})
    text = "".join(parsed(write_report(folder)).text)
    for title in (
        "Reward", "Evaluation", "Response length", "Entropy", "KL to the reference", "Train–rollout difference",
        "Gradient norm", "Time per step", "Tokens per second", "engine 0", "Set by the user (1)",
    ):  # fmt: skip
        assert title in text, title
    assert "0.9" in text and "from 0.3" in text, "evaluation first and last"


def test_the_file_needs_no_network_and_allows_no_foreign_script(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", full_rows())
    content = write_report(folder).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", content)
    assert "@import" not in content and "url(" not in content and "fetch(" not in content
    scripts = re.findall(r"<script>(.*?)</script>", content, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in content and "default-src 'none'" in content


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
    (folder / "config.json").write_text(json.dumps({"flags": {HOSTILE: HOSTILE}, "origins": {HOSTILE: HOSTILE}}))
    stages = {"": {"state": HOSTILE, "host": HOSTILE, "started": 1.0}}
    (folder / "run.json").write_text(json.dumps({"name": HOSTILE, "stages": stages}))
    segment = {"text": HOSTILE, "trained": True, "version": HOSTILE}
    record = {
        "group": HOSTILE, "index": 0, "prompt": [{"role": HOSTILE, "content": HOSTILE}], "response": HOSTILE,
        "label": HOSTILE, "reward": 1.0, "status": HOSTILE, "response_length": HOSTILE, "dataset": HOSTILE,
        "segments": [segment, {**segment, "trained": False, "version": 2}],
    }  # fmt: skip
    write_samples(folder, [record, {**record, "reward": 0.0, "segments": None}])
    write_samples(folder, [record], "eval_000000")
    (folder / "crash" / "t").mkdir(parents=True)
    (folder / "crash" / "t" / "crash.json").write_text(json.dumps({"error": HOSTILE, "message": HOSTILE}))
    page = parsed(write_report(folder))
    assert page.tags.count("script") == 2, "the points and our script, nothing else"
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert any(HOSTILE.strip() in text for text in page.text)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_script_json_reads_back_and_cannot_leave_its_element(text: str) -> None:
    dumped = script_json({"x": text + "</script><!--"})
    assert "<" not in dumped and "\u2028" not in dumped
    assert json.loads(dumped) == {"x": text + "</script><!--"}


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "x",
        full_rows(2),
        {"observe": {"wandb_key": "s3cret-value"}, "cluster": {"train_env_vars": {"WANDB_API_KEY": "s3cret-value"}}},
    )
    assert "s3cret-value" not in write_report(folder).read_text()


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"step": 1, "ti',
        '{"step": 1}\n{"step": 2, "rollout/raw_reward": null, "nonfinite": ["rollout/raw_reward"]}\n',
        '{"step": 1, "rollout/raw_reward": 1.0}\n',
        '{"step": 1, "perf/step_time": 2.0, "perf/rollout_time": 1.0}\n',
        '{"step": 1, "perf/step_time": 0.0, "train/loss": 5}\n{"step": 2, "perf/step_time": null}\n',
        '{"no_step": 1}\n[1, 2]\nnull\n{"step": "x"}\n{"step": 3, "train/loss": "text", "rollout/x": [1]}\n',
    ],
)
def test_scarce_or_broken_metrics_still_give_a_report(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "x", [])
    (folder / "metrics.jsonl").write_text(content)
    write_samples(folder, [{"group": 0}, {"reward": None}, {"reward": {"a": "text"}}])
    parsed(write_report(folder))


def test_unreadable_json_files_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", full_rows(3))
    (folder / "config.json").write_text('{"flags": {')
    (folder / "run.json").write_text("{")
    parsed(write_report(folder))


def test_stages_get_their_own_part_newest_first(tmp_path: Path) -> None:
    rows = [step_row(i, "sft", **{"train/loss": 3.0 / (i + 1)}) for i in range(5)]
    rows += [step_row(i, "grpo", **{"rollout/raw_reward": 0.1 * i}) for i in range(5)]
    folder = write_run(tmp_path / "demo", rows)
    (folder / "config.json").unlink()
    for name in ("sft", "grpo"):
        (folder / f"config.{name}.json").write_text("{}")
    stages = {"sft": {"state": "finished", "started": 1.0, "ended": 2.0}, "grpo": {"state": "finished", "started": 3.0}}
    (folder / "run.json").write_text(json.dumps({"name": "demo", "stages": stages}))
    content = write_report(folder).read_text()
    assert 0 < content.index('id="stage-grpo"') < content.index('id="stage-sft"')
    assert [stage.name for stage in read_run(folder).stages] == ["sft", "grpo"]


def test_a_supervised_stage_shows_its_loss_and_no_rewards(tmp_path: Path) -> None:
    rows = [step_row(i, **{"train/loss": 1.0 / i, "rollout/raw_reward": 0.0}) for i in (1, 2, 3)]
    folder = write_run(tmp_path / "x", rows, {"algorithm": {"loss_type": "sft_loss"}})
    text = parsed(write_report(folder)).text
    assert "Loss" in text and "Reward" not in text


def titles_of(rows: list[dict[str, Any]]) -> set[str]:
    return {chart.title for charts in charts_of(Stage("", rows=rows)).values() for chart in charts}


def test_what_is_0_by_construction_gets_no_chart() -> None:
    """One update per rollout in lock step: no KL within it, nothing clipped or stale, and a loss that is rounding."""
    names = {
        "train/ppo_kl": "KL within the step", "train/pg_clipfrac": "Clipped tokens", "train/loss": "Loss",
        "rollout/staleness/max": "Staleness",
    }  # fmt: skip
    still = {name: 3e-9 if name == "train/loss" else 0.0 for name in names}
    assert not titles_of([step_row(i, **still) for i in range(5)]) & set(names.values())
    moving = [step_row(0, **still), step_row(1, **dict.fromkeys(names, 0.1))]
    assert titles_of(moving) >= set(names.values())
    assert titles_of([step_row(1, **{"train/grad_norm": 0.0})]) == {"Gradient norm"}, (
        "which says that nothing is learned"
    )


def test_charts_with_several_lines() -> None:
    """The age of samples, and who waits; a line that is missing is left out."""
    ages = {"rollout/staleness/max": 2.0, "rollout/staleness/mean": 1.0}
    waits = {"perf/trainer_wait_ratio": 0.25, "perf/engines_idle_ratio": 0.5}
    stage = Stage("", rows=[step_row(1, **ages, **waits)])
    charts = {chart.title: chart for charts in charts_of(stage).values() for chart in charts}
    assert [(line.name, line.points) for line in charts["Staleness"].series] == [
        ("oldest sample", [(1, 2.0)]), ("mean", [(1, 1.0)]),
    ]  # fmt: skip
    assert [line.points for line in charts["Waiting"].series] == [[(1, 0.25)], [(1, 0.5)]]
    compared = comparison_charts({"a": stage, "b": stage})
    titles = [chart.title for charts in compared.values() for chart in charts]
    assert "Staleness: mean" in titles and all(len(c.series) == 2 for charts in compared.values() for c in charts)


def test_launch_and_evaluation_are_no_part_of_a_step(tmp_path: Path) -> None:
    rows = full_rows(3)
    rows[0] |= {"perf/launch_time": 95.0, "perf/evaluate_time": 264.0, "perf/eval_time": 263.0}
    rows[1] |= {"perf/launch_time": 10.0, "perf/evaluate_time": 264.0}
    charts = {chart.title: chart for chart in charts_of(Stage("", rows=rows))["Speed"]}
    assert [series.name for series in charts["Time per step"].series] == ["rollout", "actor_train", "other"]
    assert max(y or 0 for series in charts["Time per step"].series for _, y in series.points) <= 3.0
    assert [y for _, y in charts["Evaluation time"].series[0].points] == [264.0, 264.0]
    folder = write_run(tmp_path / "x", rows)
    assert "launch 1:45" in "".join(parsed(write_report(folder)).text)


def live_run(folder: Path) -> RunFolder:
    write_run(folder, full_rows(2))
    stages = {"": {"state": "running", "started": 1000.0}}
    (folder / "run.json").write_text(json.dumps({"name": "x", "stages": stages}))
    return RunFolder(folder)


def test_the_page_of_a_run_that_goes_on_loads_itself_anew(tmp_path: Path) -> None:
    run = live_run(tmp_path / "x")
    lock = run.lock()
    assert '<html lang="en" data-live>' in write_report(run.path).read_text()
    os.close(lock)
    assert '<html lang="en">' in write_report(run.path).read_text()


@settings(deadline=None, max_examples=30)
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
        patch.setattr("slime.observe.report.write_report", write)
        sink = ReportSink(RunFolder(tmp_path_factory.getbasetemp()), clock=lambda: now)
        for number in range(200):
            sink.log(number, {})
            now += step
    assert written[0] == 0.0
    gaps = [after - before for before, after in itertools.pairwise(written)]
    assert all(max(10.0, 100 * cost) <= gap <= max(10.0, 100 * cost) + cost + step + 1e-6 for gap in gaps)


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = live_run(tmp_path / "x")
    ReportSink(run).log(1, {})
    assert run.report_path.is_file()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slime.observe.report.write_report", full)
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    ReportSink(run).log(2, {})
    assert "No space left" in caplog.text


def test_rows_of_one_step_become_one() -> None:
    rows = [step_row(2, a=1.0), step_row(1, a=0.0), step_row(2, b=2.0, a=3.0)]
    assert [(row["step"], row["a"], row.get("b")) for row in merge_rows(rows)] == [(1, 0.0, None), (2, 3.0, 2.0)]


def test_a_run_that_was_killed_is_not_called_running(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x", full_rows(3))
    (folder / "run.json").write_text(json.dumps({"name": "x", "stages": {"": {"state": "running", "started": 1000.0}}}))
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


# -- several runs ---------------------------------------------------------------------------------------------


def compared(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: other learning rates, other evaluation sets, one shorter; hostile names."""
    one = {"megatron": {"lr": 1e-5, "seed": 1}, "observe": {"run_name": "one", "wandb_key": "s3cret-value"}}
    two = {"megatron": {"lr": 1e-6, "seed": 1}, "observe": {"run_name": "two", "wandb_key": "s3cret-other"}}
    rows = full_rows(10)
    rows[-1] = {name: value for name, value in rows[-1].items() if name != "eval/arith"} | {"eval/other": 0.1}
    return (
        write_run(tmp_path / "outputs" / "one", full_rows(40), one),
        write_run(tmp_path / "outputs" / "t<b>wo", rows, two),
    )


def test_runs_are_compared_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = compared(tmp_path)
    assert main(list(map(str, folders))) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "outputs" / "comparison.html"
    page = parsed(path)
    text = "".join(page.text)
    for part in ("one vs t<b>wo", "Reward", "Time per step", "Evaluation: arith", "Evaluation: other", "arith 0.9"):
        assert part in text, part
    settings = text[text.index("Settings that differ") :]
    assert "lr" in settings and "1e-6" in settings
    assert not any(word in settings for word in ("seed", "run_name", "s3cret"))
    assert page.tags.count("script") == 2


def test_a_metric_has_a_line_per_run_that_has_it(tmp_path: Path) -> None:
    stages = {folder.name: read_run(folder).stages[-1] for folder in compared(tmp_path)}
    charts = {chart.title: chart for charts in comparison_charts(stages).values() for chart in charts}
    assert [series.name for series in charts["Reward"].series] == ["one", "t<b>wo"]
    assert len({series.color for series in charts["Reward"].series}) == 2
    assert [len(series.points) for series in charts["Reward"].series] == [40, 10]
    assert [series.name for series in charts["Evaluation: other"].series] == ["t<b>wo"]
    assert charts["Time per step"].series[0].points[0] == (1, 3.0) and not charts["Time per step"].stacked
    for chart in charts.values():
        ElementTree.fromstring(svg(chart))


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "demo", full_rows(3)) for parent in ("a", "b")]
    text = "".join(parsed(write_comparison(folders, tmp_path / "out.html")).text)
    assert str(folders[0]) in text and str(folders[1]) in text and "The settings are the same." in text


# -- samples ---------------------------------------------------------------------------------------------


def test_groups_that_differ_most_come_first_best_beside_worst() -> None:
    records = [
        {"group": g, "index": i, "reward": r}
        for g, rs in enumerate([[0, 0], [0, 1], [0.2, 0.8]])
        for i, r in enumerate(rs)
    ]
    chosen = groups_by_contrast(records, None)
    assert [group[0]["group"] for group in chosen] == [1, 2, 0]
    assert [record["reward"] for record in chosen[0]] == [1, 0]
    text = group_html(chosen[0], None)
    assert text.index("best") < text.index("worst")
    assert "all alike" in group_html(chosen[2], None)


def test_dict_rewards_use_the_reward_key() -> None:
    records = [{"group": 0, "reward": {"length": 9, "score": s}} for s in (0.0, 1.0)]
    (group,) = groups_by_contrast(records, "score")
    assert group[0]["reward"]["score"] == 1.0


def test_untrained_pieces_and_weight_versions_are_marked() -> None:
    pieces = [{"text": "call", "trained": True, "version": 3}, {"text": "tool says", "trained": False, "version": None},
              {"text": "so", "trained": True, "version": 4}]  # fmt: skip
    text = group_html([{"group": 0, "reward": 1.0, "segments": pieces}], None)
    assert '<span class="untrained" title="not trained on (loss mask 0)">tool says</span>' in text
    assert '<sup class="version">v3</sup>' in text and '<sup class="version">v4</sup>' in text


def test_configuration_files_are_read_as_config_writes_them(tmp_path: Path) -> None:
    config = make_config(rollout_batch_size=4, num_rollout=10, prompt_data="d", hf_checkpoint="models/tiny", lr=1e-5)
    config.save(tmp_path / "config.json")
    flags = {name: (value, origin) for name, value, origin in flags_with_origins(read_object(tmp_path / "config.json"))}
    assert flags["rollout_batch_size"] == (4, config.origins["rollout_batch_size"])
    assert flags["lr"] == (1e-5, config.origins["lr"])
    assert "origins" not in flags
    folder = write_run(tmp_path / "run", full_rows(3))
    config.save(folder / "config.json")
    text = "".join(parsed(write_report(folder)).text)
    assert "tiny · GRPO · 4 prompts × 1 samples" in text and "Set by the user" in text


# -- charts ----------------------------------------------------------------------------------------------

values = st.one_of(st.none(), st.floats(-1e12, 1e12), st.just(0.0), st.floats(-1e-9, 1e-9))


@settings(deadline=None, max_examples=150)
@given(st.lists(values, min_size=1, max_size=80), st.booleans())
def test_charts_are_well_formed_and_inside_their_frame(ys: list[float | None], stacked: bool) -> None:
    points = [(float(i), None if y is None else abs(y) if stacked else y) for i, y in enumerate(ys)]
    chart = Chart(HOSTILE, [Series("a", points), Series("b", points, 2)], stacked=stacked)
    drawing = svg(chart)
    root = ElementTree.fromstring(drawing)
    for path in root.iter("path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", "")):
            assert 30 <= float(x) <= 440 and -1 <= float(y) <= 190
    assert "nan" not in drawing and "inf" not in drawing
    json.dumps(points_json(chart), allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.floats(-1e12, 1e12) | st.floats(-1e-7, 1e-7), min_size=2, max_size=9))
@example([5e-9, -1.5e-8])
@example([2.9985, 3.0016])
def test_labels_of_the_axis_are_inside_the_frame_minus_signs_included(ys: list[float]) -> None:
    """As wide as the widest common font makes them; the plot begins behind them, and the script knows where."""
    root = ElementTree.fromstring(svg(Chart("a", [Series("a", [(float(i), y) for i, y in enumerate(ys)])])))
    labels = [tick for tick in root.iter("text") if float(tick.get("y", 0)) < HEIGHT - BOTTOM + 4]
    left = float(root.get("data-left", "nan"))
    assert len({label.text for label in labels}) == len(labels) >= 2
    for label in labels:
        right = float(label.get("x", "nan"))
        assert label.get("text-anchor") == "end" and right <= left
        assert right - DIGIT * len(label.text or "") >= 0
    assert {float(line.get("x1", 0)) for line in root.iter("line") if line.get("class") == "grid"} == {left}


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_cover_the_range_with_few_round_numbers(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert 2 <= len(marks) <= 12
    tolerance = 1e-6 * max(1.0, abs(low), span)
    assert marks[0] <= low + tolerance and marks[-1] >= low + span - tolerance
    assert all(b > a for a, b in itertools.pairwise(marks))


def test_thinning_keeps_spikes_and_ends() -> None:
    points: list[tuple[float, float | None]] = [(float(i), 0.0) for i in range(10_000)]
    points[1234] = (1234.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 700 and kept[-1] == points[-1] and (1234.0, 99.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert len(smooth(points)) == len(points)


# -- alarms ----------------------------------------------------------------------------------------------


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
        ("rollout/truncated_ratio", [0.1, 0.6, 0.7], "Many responses are truncated"),
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
    assert titles([step_row(1, **{**old, "rollout/staleness/max": 0.0})]) == ["Trainer and engine disagree"]


def test_uneven_engines_slow_data_and_nan() -> None:
    uneven = [step_row(1, **{f"rollout/engine_load/{i}": n for i, n in enumerate([100.0, 5.0, 5.0, 5.0])})]
    assert titles(uneven) == ["The engines are not loaded evenly"]
    assert titles([step_row(1, **{"perf/data_wait_time": 2.0, "perf/step_time": 10.0})]) == ["Data loading is slow"]
    bad = {**step_row(3, **{"train/loss": None}), "nonfinite": ["train/loss"]}
    (alarm,) = find_alarms([bad, {**bad, "step": 7}])
    assert "train/loss (first at step 3)" in alarm.detail


def test_series_of_a_stage() -> None:
    stage = Stage("", rows=[step_row(1, a=1.0), step_row(2, b=2.0), step_row(3, a=None)])
    assert stage.series("a") == [(1, 1.0), (3, None)]
    assert stage.keys() == ["a", "b"]
