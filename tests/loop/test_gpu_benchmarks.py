"""The GPU benchmarks on tiny shapes: each script ends, leaves its numbers, and goes on after a case
that fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import long_run, ranks, run_all, setting
from benchmarks.gpu.report import Report, at_least, at_most
from slime.observe.run_data import Stage

ROOT = Path(__file__).parents[2]


def arguments(out: Path, budget: float = 60.0) -> argparse.Namespace:
    return argparse.Namespace(out=out, budget=budget)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_case_that_fails_leaves_its_error_and_the_next_one_runs(
    tmp_path: Path, capsys: Any
) -> None:
    report = Report("toy", arguments(tmp_path / "out.jsonl"))
    report.case("bad", lambda: {"seconds": 1 / 0})
    report.case(
        "good", lambda: {"goals": [at_least("speed", 3.0, 2.0), at_most("time", 3.0, 2.0, "s")]}
    )
    assert report.finish() == 1
    bad, good = rows_of(tmp_path / "out.jsonl")
    assert bad["error"] == "ZeroDivisionError: division by zero" and "goals" not in bad
    assert [goal["met"] for goal in good["goals"]] == [True, False]
    said = capsys.readouterr().out
    assert "| toy | good | speed | 3 | ≥ 2 | 1.50 |" in said
    assert "| toy | good | time | 3 s | ≤ 2 s | 1.50 (missed) |" in said
    assert "| toy | bad | error: ZeroDivisionError: division by zero | | | |" in said


def test_the_budget_ends_the_case_under_way_and_skips_the_others(tmp_path: Path) -> None:
    report = Report("toy", arguments(tmp_path / "out.jsonl", budget=1.1))
    report.case("slow", lambda: time.sleep(60))  # type: ignore[arg-type, return-value]
    report.case("late", lambda: {})
    slow, late = rows_of(tmp_path / "out.jsonl")
    assert "BudgetSpent" in slow["error"] and "skipped" in late


_ENDLESS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1]) / "run"
folder.mkdir()
with open(folder / "metrics.jsonl", "w") as file:
    for step in range({steps}):
        file.write(json.dumps({{"step": step, "perf/step_time": 1.5}}) + "\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.full), 2])
def test_steps_until_the_end_of_the_budget_are_kept(tmp_path: Path, steps: int) -> None:
    script = tmp_path / "endless.py"
    script.write_text(_ENDLESS.format(steps=steps))
    args = setting.new_run_parser("", prompts=1, samples=1, new_tokens=1, steps=9).parse_args(
        ["--budget", "6"]
    )
    report = Report("toy", args)

    def case() -> dict[str, Any]:
        return {
            "found": [
                row["perf/step_time"]
                for row in setting.run_training(str(script), args, tmp_path, tmp_path, []).rows
            ]
        }

    report.case("endless", case)
    [row] = report.rows
    assert (
        row["found"] == [1.5, 1.5] and "cut" in row if steps == 2 else "BudgetSpent" in row["error"]
    )


def failing_job(place: ranks.Place, answer: ranks.Answer) -> None:
    if place.rank == 0:
        answer("first")
        time.sleep(60)
    raise ValueError("rank 1 is tired")


def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    answers: list[str] = []
    with pytest.raises(ranks.RankFailed, match="rank 1 is tired"):
        ranks.run(failing_job, 2, on_answer=answers.append)
    assert answers in (["first"], [])  # the failure may come first


def test_growth_and_drift_are_seen_where_they_are_and_only_there() -> None:
    noise = [0.3, -0.2, 0.1, -0.3, 0.2, -0.1]
    flat = [100 + noise[i % 6] for i in range(60)]
    slope, doubt = long_run.slope(flat)
    assert abs(slope) < doubt < 0.01
    slope, doubt = long_run.slope([value + 0.5 * i for i, value in enumerate(flat)])
    assert slope == pytest.approx(0.5, abs=doubt) and doubt < 0.01
    rows = [
        {"step": i, "time": float(i + 1), long_run.MEAN: 0.01 * (1 + i / 10), long_run.LARGEST: 0.1}
        for i in range(40)
    ]
    samples = [
        (i + 0.5, {"host: engine": 1e9 + 5e6 * i, "host: Ray and others": 2e9 + 9e6 * i})
        for i in range(40)
    ]
    row = long_run.evaluate(Stage("", rows=rows), samples, settle=5)
    growth, drift = row["goals"][1], row["goals"][2]
    assert growth["measured"] == pytest.approx(5.0) and not growth["met"]
    assert drift["measured"] > 1.5 and not drift["met"]
    assert row["mb_by_step"]["host: engine"][:2] == [1000.0, 1005.0]


def test_the_driver_of_all_skips_what_does_not_fit_and_names_it(
    tmp_path: Path, capsys: Any
) -> None:
    words = ["--dry", "--out-dir", str(tmp_path), "--minutes", "0"]
    assert run_all.main([*words, "--only", "sleep-wake-4b", "trainer-4b"]) == 0
    assert "not run: --only trainer-4b sleep-wake-4b" in capsys.readouterr().out
    for gpus in (1, 2, 4):
        assert run_all.main(["--gpus", str(gpus), "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(case.name in listed and case.least <= case.limit <= 570 for case in run_all.CASES)


def dry(tmp_path: Path, *names: str) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.run_all",
        "--dry",
        "--out-dir",
        str(tmp_path),
        "--only",
        *names,
    ]
    done = subprocess.run(
        [*command, "--models", str(tmp_path / "models")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "table.md").exists() and (tmp_path / "log.txt").exists()
    return rows_of(tmp_path / "results.jsonl")


@pytest.mark.full
@pytest.mark.parametrize("case", run_all.CASES, ids=lambda case: case.name)
def test_each_case_runs_on_tiny_shapes(case: run_all.Case, tmp_path: Path) -> None:
    rows = dry(tmp_path, case.name)
    assert rows and not any("error" in row or "skipped" in row for row in rows)
