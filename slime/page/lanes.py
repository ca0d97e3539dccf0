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
_MOST_LANES = 400
_MOST_POINTS = 1200
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
    if not timed:
        return {
            "length": 0,
            "phases": [],
            "counters": {},
            "lanes": [],
            "lanes_from": 0,
            "lanes_to": 0,
            "left_out": 0,
        }
    start = min(e["ts"] for e in timed)
    end = max(e["ts"] + _duration(e) for e in timed)

    def ms(microseconds: float) -> float:
        return round(microseconds / 1000, 3)

    driver: list[list[Any]] = [
        [
            phase_word(str(e.get("name"))),
            ms(e["ts"] - start),
            ms(_duration(e)),
            PHASE_COLORS.get(str(e.get("name")), 7),
        ]
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
        if e.get("ph") == "M"
        and e.get("name") == "thread_name"
        and e.get("pid") == SAMPLES
        and e.get("args")
    }
    lanes: dict[Any, list[list[Any]]] = {tid: [] for tid in titles}
    for event in timed:
        if event["pid"] == SAMPLES and event["ph"] in ("X", "i"):
            name = str(event.get("name"))
            span = [
                _SPANS.get(name, name),
                ms(event["ts"] - start),
                ms(_duration(event)),
                0,
                event.get("args") or {},
            ]
            lanes.setdefault(event.get("tid"), []).append(span)
    for spans in lanes.values():
        _set_depths(spans)
    named = [
        {"name": titles.get(tid, str(tid)), "spans": spans} for tid, spans in lanes.items() if spans
    ]
    # the last to end first
    named.sort(key=lambda lane: -max(span[1] + span[2] for span in lane["spans"]))
    shown = [span for lane in named for span in lane["spans"]]
    return {
        "length": ms(end - start),
        "phases": driver,
        "counters": {name: thin(points, _MOST_POINTS) for name, points in counters.items()},
        "lanes": named[:_MOST_LANES],
        "lanes_from": min((span[1] for span in shown), default=0),
        "lanes_to": max((round(span[1] + span[2], 3) for span in shown), default=0),
        "left_out": max(0, len(named) - _MOST_LANES),
    }


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
