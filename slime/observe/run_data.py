"""Read a run folder for pages and commands. Missing or half-written files are skipped without an
error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.flag import DATA_LOSSES
from slime.errors import UserError
from slime.files import read_lines, read_object
from slime.observe.run_folder import RunFolder, config_files, is_held

#: (step, value) of a metric; the value is None if it was not a finite number.
Point = tuple[float, float | None]
#: Keys of a metrics row that are not metrics.
ROW_KEYS = ("step", "time", "stage", "nonfinite")


@dataclass
class Stage:
    """One stage of a run.

    Attributes:
        name: "" if the run has only one stage.
        summary: the stage's entry in ``run.json``.
        config: the stage's configuration file as written.
        rows: metrics, one dict per step, in order.
        rollouts, evaluations: name → file of recorded samples, in order.
    """

    name: str
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    rollouts: dict[str, Path] = field(default_factory=dict)
    evaluations: dict[str, Path] = field(default_factory=dict)

    def series(self, key: str) -> list[Point]:
        """Return the points of one metric; a value is None if it was not a finite number."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def keys(self) -> list[str]:
        """Return the names of all metrics, in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row if key not in ROW_KEYS))


@dataclass
class RunData:
    """A run folder: its stages in order of their start, and its crashes, newest last."""

    path: Path
    stages: list[Stage]
    crashes: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.path.name


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``. What no run writes is left out: lines without a step
    or with a stage that is no name, and values that are not numbers."""
    return [
        {key: value for key, value in row.items() if _is_cell(key, value)}
        for row in read_lines(path)
        if type(row.get("step")) is int and isinstance(row.get("stage"), str | None)
    ]


def merge_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge to one row per step, in order; later rows of a step extend and override earlier ones.
    Rows without a step, and values that are not numbers, are dropped."""
    by_step: dict[float, dict[str, Any]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, (int, float)):
            continue
        merged = by_step.setdefault(step, {})
        merged |= {k: v for k, v in row.items() if k != "nonfinite" and _is_cell(k, v)}
        added = row.get("nonfinite")
        if added and isinstance(added, list):
            merged["nonfinite"] = merged.get("nonfinite", []) + added
    return [by_step[step] for step in sorted(by_step)]


def rows_by_stage(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return stage → one row per step of ``metrics.jsonl``; "" is the stage of a run without
    stages."""
    names = dict.fromkeys(row.get("stage") or "" for row in rows)
    return {
        name: merge_rows([row for row in rows if (row.get("stage") or "") == name])
        for name in names
    }


def _is_cell(key: str, value: Any) -> bool:
    return (
        key in ROW_KEYS
        or value is None
        or (isinstance(value, (int, float)) and not isinstance(value, bool))
    )


def read_run(path: Path) -> RunData:
    """Read the folder of a run, finished or not.

    Raises:
        UserError: there is no such run folder.
    """
    if not path.is_dir():
        raise UserError(f"no run folder {path}", fix="pass a directory below outputs/")
    stages = read_stages(path, rows_by_stage(read_metrics(path / "metrics.jsonl")))
    if not stages:
        raise UserError(
            f"{path} is not a run folder", why="it has neither config.json nor metrics.jsonl"
        )
    crashes = [
        read_object(p) | {"folder": str(p.parent.relative_to(path))}
        for p in sorted(path.glob("crash/*/crash.json"))
    ]
    return RunData(path, stages, crashes)


def read_stages(path: Path, rows: dict[str, list[dict[str, Any]]]) -> list[Stage]:
    """Return the stages of a run folder in order of their start; [] if it is not a run
    folder.

    Args:
        rows: the metrics of each stage, from `rows_by_stage`.
    """
    config_names = list(config_files(path))
    if not rows and not config_names:
        return []
    summary = RunFolder(path).read_summary()
    names = dict.fromkeys([*rows, *summary["stages"], *config_names])
    started = {name: entry.get("started") or 0.0 for name, entry in summary["stages"].items()}
    stages = []
    for name in sorted(names, key=lambda name: started.get(name, 0.0)):
        run = RunFolder(path, name or None)
        stage = Stage(name, summary["stages"].get(name, {}), read_object(run.config_path))
        stage.rows = rows.get(name, [])
        stage.rollouts = _sample_files(run, "rollout_*.jsonl")
        stage.evaluations = _sample_files(run, "eval_*.jsonl")
        if stage.summary.get("state") == "running" and not is_held(path):
            stage.summary = {**stage.summary, "state": "interrupted", "ended": _last_time(stage)}
        stages.append(stage)
    return stages


def _sample_files(run: RunFolder, pattern: str) -> dict[str, Path]:
    """Return name → file of recorded samples, in order; ``eval_start`` comes first."""
    files = [path for path in run.samples.glob(pattern) if path.is_file()]
    files.sort(key=lambda path: (path.stem != "eval_start", path.stem))
    return {path.stem: path for path in files}


def _last_time(stage: Stage) -> float | None:
    return max(
        (row["time"] for row in stage.rows if isinstance(row.get("time"), (int, float))),
        default=None,
    )


def flags_with_origins(config: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (flag, value, origin) for a configuration file: ``{group: {flag: value}, "origins":
    {flag: origin}}``."""
    groups = {name: flags for name, flags in config.items() if isinstance(flags, dict)}
    origins = groups.pop("origins", {})
    return [
        (name, value, str(origins.get(name, "")))
        for flags in groups.values()
        for name, value in flags.items()
    ]


def config_value(config: dict[str, Any], name: str) -> Any:
    """Return the value of one flag in a configuration file, None if it is missing."""
    return next((value for flag, value, _ in flags_with_origins(config) if flag == name), None)


def is_supervised(stage: Stage) -> bool:
    """Tell whether a stage trains on its data and generates nothing, so that it has no rewards."""
    return config_value(stage.config, "loss_type") in DATA_LOSSES


def learns_preferences(stage: Stage) -> bool:
    """Tell whether a stage learns from preferences (``--loss-type preference_loss``)."""
    return config_value(stage.config, "loss_type") == "preference_loss"


def elapsed(stage: Stage) -> float | None:
    """Return seconds from the stage's start to its end, or to now if it runs; None if unknown."""
    start = stage.summary.get("started") or (stage.rows[0].get("time") if stage.rows else None)
    if start is None:
        return None
    state = stage.summary.get("state")
    end = stage.summary.get("ended") or (time.time() if state == "running" else _last_time(stage))
    return max(0.0, end - start) if end else None
