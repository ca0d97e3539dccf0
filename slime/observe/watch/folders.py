"""Run folders as they grow: metrics since the last look, state, alarms, the timeline of a step, settings."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.errors import UserError
from slime.files import read_object, without_secrets
from slime.observe.alarms import engine_loads, find_alarms
from slime.observe.chrome_trace import DRIVER, ENGINE, SAMPLES
from slime.observe.report.catalog import LEARNING, PHASE_COLORS, POLICY, SPEED, ChartSpec, step_time_chart
from slime.observe.report.charts import thin
from slime.observe.report.compare import settings_that_differ
from slime.observe.report.data import (
    Stage,
    elapsed,
    flags_with_origins,
    is_supervised,
    merge_rows,
    read_stages,
)
from slime.observe.watch.files import Place, is_inside, is_unchanged, new_lines
from slime.observe.watch.index import SampleIndex, path_key

#: Of a folder of runs, so many of the newest are shown.
MOST_RUNS = 30
#: Lanes of samples and points of a counter that a timeline shows at most.
_MOST_LANES, _MOST_POINTS = 400, 1200


class RunWatch:
    """One run folder. Any thread may ask; `refresh` reads what is new.

    Attributes:
        key: names the folder, the same in every process, and tells nothing of it.
        index: of its samples.
        generation: changes when the metrics begin anew, as when a resumed run takes steps back; no number comes back.
    """

    def __init__(self, path: Path, cache: Path | None = None) -> None:
        self.path = path
        self.index = SampleIndex(path, cache)
        self.key = path_key(path)
        self.generation = time.time_ns() // 1000  # a page that knows an earlier server's asks for everything
        self._lock = threading.RLock()
        self._place = Place()
        self._changed: list[tuple[str, float]] = []  # stage and step of each line, in the order of the lines
        self._rows: dict[str, dict[float, dict[str, Any]]] = {}
        self._stages: list[Stage] = []
        self._alarms: dict[str, tuple[Any, list[dict[str, str]]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the metrics that are new, and how the run stands."""
        with self._lock:
            path = self.path / "metrics.jsonl"
            if not is_unchanged(path, self._place) and is_inside(path, self.path):
                try:
                    self._read(path)
                except FileNotFoundError:  # it is being replaced
                    return
            rows = {name: [steps[step] for step in sorted(steps)] for name, steps in self._rows.items()}
            self._stages = read_stages(self.path, rows)

    def _read(self, path: Path) -> None:
        is_other, lines, after = new_lines(path, self._place)
        if is_other:
            self.generation += 1
            self._rows, self._changed = {}, []
        for line in lines:
            name, step = str(line.value.get("stage") or ""), line.value.get("step")
            if isinstance(step, (int, float)):
                steps = self._rows.setdefault(name, {})
                steps[step] = merge_rows([*([steps[step]] if step in steps else []), line.value])[0]
                self._changed.append((name, step))
        self._place = after[0]

    def stages(self) -> list[Stage]:
        """The stages as of the last `refresh`, by their start."""
        return self._stages

    def stage(self, name: str) -> Stage | None:
        return next((stage for stage in self._stages if stage.name == name), None)

    def metrics(self, stage: Stage, names: Iterable[str] | None, generation: int, since: int) -> dict[str, Any]:
        """Values of the steps that changed since a look.

        Args:
            names: which metrics; None: all.
            generation, since: as the last answer gave them; another generation gives everything.

        Returns:
            ``{"generation", "since", "steps": [...], "columns": {name: [value or null per step]}, "names": [all there
            are]}``.
        """
        with self._lock:
            since = since if generation == self.generation else 0
            steps = sorted({step for name, step in self._changed[since:] if name == stage.name})
            rows = self._rows.get(stage.name, {})
            known = stage.keys()
            wanted = known if names is None else [name for name in names if name in set(known)]
            return {
                "generation": self.generation,
                "since": len(self._changed),
                "steps": steps,
                "columns": {name: [rows[step].get(name) for step in steps] for name in wanted},
                "names": known,
            }

    def alarms(self, stage: Stage) -> list[dict[str, str]]:
        """What `find_alarms` says of the stage, the gravest first: ``{"name", "title", "detail", "fix"}``."""
        ended = stage.summary.get("ended") is not None
        key = (self.generation, len(self._changed), ended)
        known = self._alarms.get(stage.name)
        if known is None or known[0] != key:
            found = find_alarms(stage.rows, ended=ended)
            shown = [{"name": a.name, "title": a.title, "detail": a.detail, "fix": a.fix} for a in found]
            known = self._alarms[stage.name] = (key, shown)
        return known[1]

    def crash(self) -> dict[str, Any] | None:
        """The newest crash: ``{"error", "message", "notes", "note", "folder"}``."""
        files = [path for path in sorted(self.path.glob("crash/*/crash.json")) if is_inside(path, self.path)]
        if not files:
            return None
        details = read_object(files[-1])
        kept = {name: details.get(name) for name in ("error", "message", "notes", "note")}
        return {**kept, "folder": str(files[-1].parent.relative_to(self.path))}

    def describe(self, stage: Stage, key: str) -> dict[str, Any]:
        """What the list of runs says of a stage."""
        last = stage.rows[-1] if stage.rows else {}
        state = str(stage.summary.get("state") or "")
        return {
            "id": key,
            "name": self.path.name + (f"/{stage.name}" if stage.name else ""),
            "path": str(self.path),
            "stage": stage.name,
            "state": state,
            "started": stage.summary.get("started") or last.get("time"),
            "elapsed": elapsed(stage),
            "step": last.get("step"),
            "supervised": is_supervised(stage),
            "settings": dict(_headline(stage)),
            "alarms": self.alarms(stage),
            "crash": self.crash() if state == "failed" else None,
            "index": self.index.progress(),
        }

    def timeline_steps(self, stage: Stage) -> list[int]:
        """Rollouts of which there is a trace."""
        found = []
        for path in (self.path / "trace" / stage.name).glob("rollout_*.json"):
            match = re.fullmatch(r"rollout_(\d+)", path.stem)
            if match:
                found.append(int(match[1]))
        return sorted(found)

    def timeline(self, stage: Stage, rollout: int) -> dict[str, Any] | None:
        """The trace of a rollout, as `timeline` has it; None when there is none."""
        path = self.path / "trace" / stage.name / f"rollout_{rollout:06d}.json"
        if not path.is_file() or not is_inside(path, self.path):
            return None
        try:
            events = orjson.loads(path.read_bytes()).get("traceEvents")
        except (orjson.JSONDecodeError, AttributeError, FileNotFoundError):
            return None
        return timeline(events if isinstance(events, list) else [])

    def settings(self, stage: Stage) -> list[dict[str, str]]:
        """Every setting: ``{"flag", "value", "origin"}``, without secrets."""
        return [
            {"flag": name, "value": _text(without_secrets(name, value)), "origin": origin}
            for name, value, origin in flags_with_origins(stage.config)
        ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=repr).decode()


def _headline(stage: Stage) -> Iterable[tuple[str, Any]]:
    shown = ("hf_checkpoint", "advantage_estimator", "loss_type", "rollout_batch_size", "n_samples_per_prompt", "lr")
    for name, value, _ in flags_with_origins(stage.config):
        if name in shown and value is not None:
            yield name, str(value).rstrip("/").rsplit("/", 1)[-1] if name == "hf_checkpoint" else value


# -- charts --------------------------------------------------------------------------------------------------------


def catalog() -> list[dict[str, Any]]:
    """The charts of the report by section, for the page to draw: ``{"section", "charts": [{"title", "keys", "note",
    "unit", "may_vanish", "line", "beside"}]}``."""
    sections: dict[str, Sequence[ChartSpec]] = {"Learning": LEARNING, "Policy": POLICY, "Speed": SPEED}
    return [
        {
            "section": name,
            "charts": [
                {
                    "title": spec.title,
                    "keys": spec.keys,
                    "note": spec.note,
                    "unit": spec.unit,
                    "may_vanish": spec.may_vanish,
                    "line": spec.line,
                    "beside": spec.beside,
                }
                for spec in specs
            ],
        }
        for name, specs in sections.items()
    ]


def phases(stage: Stage) -> list[dict[str, Any]]:
    """Seconds per phase and step: ``{"name", "color", "points": [[step, seconds]]}``, the longest first."""
    chart = step_time_chart(stage)
    return [{"name": s.name, "color": s.color, "points": s.points} for s in chart.series] if chart else []


def engines(stage: Stage) -> dict[str, Any]:
    """Mean load of each engine, and the metrics that tell of engines: ``{"loads": {engine: requests}, "names"}``."""
    told = ("rollout/engine_load/", "rollout/prefix_cache", "rollout/avg_cached", "rollout/spec_", "perf/engines_idle")
    known = stage.keys()
    names = [name for name in known if name.startswith(told)]
    loads = dict(sorted(engine_loads(stage.rows).items(), key=lambda item: int(item[0])))
    return {"loads": loads, "names": names}


def differences(stages: dict[str, Stage]) -> list[dict[str, Any]]:
    """Settings that are not the same in all: ``{"flag", "values": [one per stage]}``."""
    return [{"flag": flag, "values": texts} for flag, texts in settings_that_differ(stages).items()]


# -- the timeline of a step ----------------------------------------------------------------------------------------


def timeline(events: Sequence[Any]) -> dict[str, Any]:
    """A trace in Chrome's format as lanes, in milliseconds since its beginning.

    Returns:
        ``{"length", "phases": [[name, start, ms, color]], "counters": {name: [[at, value]]}, "lanes": [{"name",
        "spans": [[name, start, ms, depth, args]]}], "left_out": lanes that are not shown}``.
    """
    events = [e for e in events if isinstance(e, dict) and isinstance(e.get("ts"), (int, float))]
    timed = [e for e in events if e.get("ph") in ("X", "C", "i") and e.get("pid") in (DRIVER, ENGINE, SAMPLES)]
    if not timed:
        return {"length": 0, "phases": [], "counters": {}, "lanes": [], "left_out": 0}
    start = min(e["ts"] for e in timed)
    end = max(e["ts"] + _duration(e) for e in timed)

    def ms(microseconds: float) -> float:
        return round(microseconds / 1000, 3)

    driver = [
        [str(e.get("name")), ms(e["ts"] - start), ms(_duration(e)), PHASE_COLORS.get(str(e.get("name")), 7)]
        for e in timed
        if e["pid"] == DRIVER and e["ph"] == "X"
    ]
    counters: dict[str, list[tuple[float, float | None]]] = {}
    for event in timed:
        if event["ph"] == "C" and isinstance(event.get("args"), dict):
            for name, value in event["args"].items():
                counters.setdefault(str(name), []).append((ms(event["ts"] - start), value))
    titles = {
        e.get("tid"): str(e["args"].get("name"))
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name" and e.get("pid") == SAMPLES and e.get("args")
    }
    lanes: dict[Any, list[list[Any]]] = {tid: [] for tid in titles}
    for event in timed:
        if event["pid"] == SAMPLES and event["ph"] in ("X", "i"):
            span = [str(event.get("name")), ms(event["ts"] - start), ms(_duration(event)), 0, event.get("args") or {}]
            lanes.setdefault(event.get("tid"), []).append(span)
    for spans in lanes.values():
        _set_depths(spans)
    named = [{"name": titles.get(tid, str(tid)), "spans": spans} for tid, spans in lanes.items() if spans]
    named.sort(key=lambda lane: -max(span[1] + span[2] for span in lane["spans"]))  # the last to end first
    return {
        "length": ms(end - start),
        "phases": driver,
        "counters": {name: thin(points, _MOST_POINTS) for name, points in counters.items()},
        "lanes": named[:_MOST_LANES],
        "left_out": max(0, len(named) - _MOST_LANES),
    }


def _duration(event: dict[str, Any]) -> float:
    duration = event.get("dur")
    return max(0.0, duration) if isinstance(duration, (int, float)) else 0.0


def _set_depths(spans: list[list[Any]]) -> None:
    """How many spans each lies in; sorts them by start, the longer first."""
    spans.sort(key=lambda span: (span[1], -span[2]))
    ends: list[float] = []
    for span in spans:
        while ends and ends[-1] <= span[1] + 1e-6:
            ends.pop()
        span[3] = len(ends)
        ends.append(span[1] + span[2])


# -- which runs ----------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / "metrics.jsonl").is_file() or any(path.glob("config*.json"))


def runs_below(paths: Sequence[Path]) -> list[Path]:
    """The run folders that are meant: each of `paths`, or of a folder of runs the newest.

    Raises:
        UserError: one of them does not exist, or is no run folder and has none in it.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}", fix="pass run folders, or a folder that holds some")
        if is_run(path):
            found[path] = None
            continue
        inside = sorted((p for p in path.iterdir() if p.is_dir() and is_run(p)), key=_last_change, reverse=True)
        if not inside:
            raise UserError(f"{path} holds no run", why="a run folder has config.json or metrics.jsonl")
        found.update(dict.fromkeys(inside[:MOST_RUNS]))
    return list(found)


def _last_change(path: Path) -> float:
    files = [path / name for name in ("metrics.jsonl", "run.json") if (path / name).is_file()]
    return max((file.stat().st_mtime for file in files), default=0.0)
