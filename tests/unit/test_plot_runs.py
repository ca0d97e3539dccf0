"""Pictures of runs: every point is inside, at its place; what cannot be drawn is said."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import plot_runs

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@given(VALUES)
def test_points_are_inside_and_in_order(values: list[float]) -> None:
    text = plot_runs.picture(
        [("a run", [(float(step), value) for step, value in enumerate(values)])], "m", "title"
    )
    [line] = re.findall(r'<polyline points="([^"]*)"', text)
    points = [tuple(map(float, pair.split(","))) for pair in line.split()]
    assert len(points) == len(values)
    assert all(0 <= x <= plot_runs.WIDTH and 0 <= y <= plot_runs.HEIGHT for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert all(points[i][1] >= points[j][1] for i in range(len(values)) for j in range(len(values))
               if values[i] <= values[j])  # fmt: skip


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_enclose_the_range(low: float, span: float) -> None:
    found = plot_runs.ticks(low, low + span)
    slack = 1e-6 * max(1.0, abs(low), span)
    assert found == sorted(found) and found[0] <= low + slack and found[-1] >= low + span - slack
    assert 2 <= len(found) <= 8


def test_two_metrics_of_one_run(tmp_path: Path) -> None:
    file, out = tmp_path / "metrics.jsonl", tmp_path / "a.svg"
    file.write_text(
        "".join(
            json.dumps({"step": i, "score": i / 3, "calls": 1 - i / 3}) + "\n" for i in range(4)
        )
    )
    assert plot_runs.main(["score", str(out), f"score={file}", f"calls={file}#calls"]) == 0
    up, down = (line.split() for line in re.findall(r'<polyline points="([^"]*)"', out.read_text()))
    assert up[0].split(",")[1] == down[-1].split(",")[1] != up[-1].split(",")[1]


def test_a_metric_that_is_not_there_is_an_error_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": i, "eval/sums": i / 3}) + "\n" for i in range(4)))
    assert plot_runs.main(["eval/sums", str(tmp_path / "a.svg"), f"one & two={file}"]) == 0
    assert "one &amp; two" in (tmp_path / "a.svg").read_text()
    with pytest.raises(SystemExit):
        plot_runs.main(["eval/other", str(tmp_path / "b.svg"), f"a={file}"])
    assert "has no eval/other; it has eval/sums" in capsys.readouterr().err
