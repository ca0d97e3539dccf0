"""The timeline of a step from its trace: the driver's phases, engine counters, and a lane per
sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.observe.catalog import PHASE_COLORS, thin
from slime.observe.chrome_trace import DRIVER, ENGINE, SAMPLES
from slime.observe.console import phase_word
from slime.observe.run_data import Stage
from slime.page.files import is_inside

#: Largest number of sample lanes, and of points of a counter, in a timeline.
_MAX_LANES = 400
_MAX_POINTS = 1200
#: Span name → shown name; users' own spans keep their names.
_SPANS = {
    "generate_and_rm_group": "group",
    "generate_and_rm": "sample",
    "generate": "generate",
    "reward_model": "reward",
}


def traced_steps(run: Path, stage: Stage) -> list[int]:
    """Return the steps that have a trace; that of rollout k is step k + 1."""
    names = (
        path.stem.removeprefix("rollout_")
        for path in (run / "trace" / stage.name).glob("rollout_*.json")
    )
    return sorted(int(name) + 1 for name in names if name.isdecimal())


def timeline_of(run: Path, stage: Stage, step: int) -> dict[str, Any] | None:
    """Return the trace of a step as `timeline` does; None if there is none."""
    path = run / "trace" / stage.name / f"rollout_{step - 1:06d}.json"
    if not path.is_file() or not is_inside(path, run):
        return None
    try:
        events = orjson.loads(path.read_bytes()).get("traceEvents")
    except (orjson.JSONDecodeError, AttributeError, OSError):
        return None
    return timeline(events if isinstance(events, list) else [])


def timeline(events: Sequence[Any]) -> dict[str, Any]:
    """Arrange a trace in Chrome's format in lanes, in milliseconds since its beginning.

    Returns:
        ``{"length", "phases": [[name, start, ms, color]], "counters": {name: [[at, value]]},
        "lanes": [{"name", "spans": [[name, start, ms, depth, args]]}], "lanes_from", "lanes_to":
        when the first of all lanes begins and the last one ends, "left_out": lanes that are not
        shown}``.
    """
    events = [e for e in events if isinstance(e, dict) and isinstance(e.get("ts"), (int, float))]
    timed = [
        e
        for e in events
        if e.get("ph") in ("X", "C", "i") and e.get("pid") in (DRIVER, ENGINE, SAMPLES)
    ]
    start = min((e["ts"] for e in timed), default=0)
    end = max((e["ts"] + _duration(e) for e in timed), default=0)
    phases: list[list[Any]] = []
    counters: dict[str, list[tuple[float, float | None]]] = {}
    for event in timed:
        name = str(event.get("name"))
        at = _ms(event["ts"] - start)
        if event["pid"] == DRIVER and event["ph"] == "X":
            color = PHASE_COLORS.get(name, 7)
            phases.append([phase_word(name), at, _ms(_duration(event)), color])
        elif event["ph"] == "C" and isinstance(event.get("args"), dict):
            for counter, value in event["args"].items():
                counters.setdefault(str(counter), []).append((at, value))
    lanes = _sample_lanes(events, start)
    spans = [span for lane in lanes for span in lane["spans"]]
    return {
        "length": _ms(end - start),
        "phases": phases,
        "counters": {name: thin(points, _MAX_POINTS) for name, points in counters.items()},
        "lanes": lanes[:_MAX_LANES],
        "lanes_from": min((span[1] for span in spans), default=0),
        "lanes_to": max((round(span[1] + span[2], 3) for span in spans), default=0),
        "left_out": max(0, len(lanes) - _MAX_LANES),
    }


def _sample_lanes(events: Sequence[dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """Return the samples' lanes that have spans, the last to end first."""
    titles: dict[Any, str] = {}
    lanes: dict[Any, list[list[Any]]] = {}
    for event in events:
        if event.get("pid") != SAMPLES:
            continue
        name = str(event.get("name"))
        args = event.get("args") or {}
        if event.get("ph") == "M" and name == "thread_name" and args:
            titles[event.get("tid")] = str(args.get("name"))
        elif event.get("ph") in ("X", "i"):
            at = _ms(event["ts"] - start)
            span = [_SPANS.get(name, name), at, _ms(_duration(event)), 0, args]
            lanes.setdefault(event.get("tid"), []).append(span)
    for spans in lanes.values():
        _set_depths(spans)
    named = [{"name": titles.get(tid, str(tid)), "spans": spans} for tid, spans in lanes.items()]
    return sorted(named, key=lambda lane: -max(span[1] + span[2] for span in lane["spans"]))


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)


def _duration(event: dict[str, Any]) -> float:
    duration = event.get("dur")
    return max(0.0, duration) if isinstance(duration, (int, float)) else 0.0


def _set_depths(spans: list[list[Any]]) -> None:
    """Set each span's nesting depth; sorts spans by start, longer ones first."""
    spans.sort(key=lambda span: (span[1], -span[2]))
    ends: list[float] = []
    for span in spans:
        while ends and ends[-1] <= span[1] + 1e-6:
            ends.pop()
        span[3] = len(ends)
        ends.append(span[1] + span[2])
