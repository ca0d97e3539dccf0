"""`slime compare`: a run against the ranges of its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.cli import compare
from slime.errors import UserError
from slime.observe.expected import NAME, ExpectedRange, comparison, read_expected
from slime.observe.run_data import Stage
from slime.observe.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "recipes").glob("*/expected*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_ranges_of_a_recipe_can_be_read(path: Path) -> None:
    ranges = read_expected(path)
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for one in ranges:
        assert one.least <= one.most
        assert one.first <= one.last
        assert one.source
        assert (
            one.metric.startswith("eval/") or f"`{one.metric.partition('/mean')[0]}" in documented
        )
    wanted = {"rollout/raw_reward", "train/train_rollout_logprob_abs_diff"}
    if path.parent.name.startswith("qwen3"):
        wanted |= {"rollout/response_len/mean", "train/entropy_loss", "perf/step_time"}
    assert wanted <= {one.metric for one in ranges}


@pytest.mark.parametrize("run", ["disaggregated, async", "disaggregated, sync"])
def test_recorded_runs_are_within_the_ranges_of_their_recipe(run: str) -> None:
    path = ROOT / "docs" / "measurements" / "learning-h200.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stage = Stage("", rows=[row for row in rows if row["run"] == run])
    lines, is_right = comparison(stage, read_expected(ROOT / "recipes" / "smollm2-arithmetic"))
    assert is_right, "\n".join(lines)
    assert sum(" within " in line for line in lines) == 6


def expected(**changes: Any) -> ExpectedRange:
    values: dict[str, Any] = {
        "metric": "m",
        "first": 2,
        "last": 3,
        "statistic": "mean",
        "least": 1.0,
        "most": 2.0,
        "basis": "bound",
        "source": "-",
    }
    return ExpectedRange(**{**values, **changes})


@pytest.mark.parametrize(
    ("series", "changes", "verdict"),
    [
        ([(1, 9.0), (2, 1.0), (3, 2.0), (4, 9.0)], {}, "within"),
        ([(2, 1.0), (3, 4.0)], {}, "outside"),
        ([(2, 1.0), (3, 4.0)], {"statistic": "min"}, "within"),
        ([(2, 1.0), (3, 4.0)], {"most": float("inf")}, "within"),
        ([(2, None), (3, 1.5)], {}, "outside"),
        ([(2, 1.5)], {}, "not reached"),
        ([(4, 1.5)], {}, "not reached"),
        ([], {}, "not logged"),
    ],
)
def test_verdicts(series: list[Any], changes: dict[str, Any], verdict: str) -> None:
    assert expected(**changes).judge(series)[1] == verdict


def run_folder(folder: Path, rewards: list[float]) -> Path:
    run = RunFolder(folder / "run")
    run.path.mkdir()
    rows = [
        {"step": step, "time": float(step), "stage": None, "rollout/raw_reward": reward}
        for step, reward in enumerate(rewards, start=1)
    ]
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "run.json").write_text(json.dumps({"stages": {"": {"state": "finished"}}}))
    return run.path


def write_ranges(folder: Path, **changes: object) -> Path:
    entry: dict[str, object] = {
        "metric": "rollout/raw_reward",
        "steps": [1, 2],
        "least": 0.5,
        "basis": "bound",
        "source": "made up",
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in (entry | changes).items()]
    (folder / NAME).write_text("\n".join(["[[range]]", *lines]))
    return folder


@pytest.mark.parametrize(("rewards", "status"), [([0.5, 0.7], 0), ([0.1, 0.2], 1), ([0.1], 0)])
def test_the_exit_status_says_whether_a_range_is_missed(
    rewards: list[float], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, rewards)
    assert compare.main([str(run), str(write_ranges(tmp_path))]) == status
    said = capsys.readouterr().out
    assert "rollout/raw_reward" in said and "≥ 0.5" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": [1]}, "is not complete"),
        ({"steps": [2, 1]}, "is empty"),
        ({"most": 0.4}, "is empty"),
        ({"max": 2}, "has an unknown max"),
        ({"basis": "guessed"}, "unknown statistic or basis"),
        ({"statistic": "mode"}, "unknown statistic or basis"),
    ],
)
def test_a_wrong_file_is_named(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read_expected(write_ranges(tmp_path, **changes))


def test_a_range_without_bounds_is_refused(tmp_path: Path) -> None:
    file = write_ranges(tmp_path) / NAME
    file.write_text(file.read_text().replace("least = 0.5", ""))
    with pytest.raises(UserError, match="has neither least nor most"):
        read_expected(file)


@pytest.mark.parametrize("content", [None, b"", b"range = 3", b"[[ranges]]", b"\xff"])
def test_a_recipe_without_ranges_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match="holds no ranges"):
        read_expected(tmp_path)
