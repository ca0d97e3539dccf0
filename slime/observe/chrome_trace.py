"""Timelines as Chrome trace-event JSON, which https://ui.perfetto.dev and chrome://tracing open.

The trace's "processes" group rows of one kind: 1 = the driver's phases, 2 = requests inside the
engines (counters), 3 = the samples, one row each. Times are microseconds since 1970, so that files
of one run share a time axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from slime.files import json_safe, write_atomically
from slime.observe.phases import PhaseEvent
from slime.samples.types import Sample

DRIVER = 1
ENGINE = 2
SAMPLES = 3
_PROCESS_NAMES = {DRIVER: "driver", ENGINE: "engine", SAMPLES: "samples"}
_COUNTED = ("queue", "prefill", "decode")


@dataclass
class TraceSpan:
    """A finished span of one sample; times in microseconds."""

    name: str
    start: int
    end: int
    span_id: str
    parent_span_id: str | None
    attempt: int
    attrs: dict[str, Any] = field(default_factory=dict)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def sample_spans(trace: dict[str, Any]) -> list[TraceSpan]:
    """Return the spans of one ``sample.trace``, sorted by start. A span without an end ends at the
    trace's last event and has the attribute ``unfinished``."""
    spans: dict[str, TraceSpan] = {}
    closed = set()
    last_ts = max((_microseconds(e["ts"]) for e in trace["events"]), default=0)
    for event in trace["events"]:
        ts = _microseconds(event["ts"])
        span_id = event["span_id"]
        if event["type"] == "span_start":
            parent = event["parent_span_id"]
            attempt = event["attempt"]
            spans[span_id] = TraceSpan(
                event["name"], ts, last_ts, span_id, parent, attempt, dict(event["attrs"])
            )
        elif event["type"] == "span_end" and span_id in spans:
            spans[span_id].end = max(ts, spans[span_id].start)
            spans[span_id].attrs.update(event["attrs"])
            closed.add(span_id)
    for span in spans.values():
        if span.span_id not in closed:
            span.attrs["unfinished"] = True
    return sorted(spans.values(), key=lambda span: (span.start, -span.end))


def assign_rows(spans: Sequence[TraceSpan]) -> list[int]:
    """Assign each span to a row. The format requires that spans of a row nest or follow each
    other.

    A sample needs several rows only if it does things in parallel, such as tool calls. `spans` must
    be sorted by start, longer ones first.
    """
    open_ends: list[list[int]] = []  # per row: ends of its open spans, outermost first
    rows = []
    for span in spans:
        for row, ends in enumerate(open_ends):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                rows.append(row)
                break
        else:
            open_ends.append([span.end])
            rows.append(len(open_ends) - 1)
    return rows


def _event(
    kind: str, name: str, pid: int, tid: int, ts: int, args: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Make an event of a kind of Chrome's format: "X" has a duration, "i" is an instant, "C" a
    counter, "M" metadata."""
    return {"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, "args": args, **more}


def _metadata(kind: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return _event("M", kind, pid, tid, 0, {"name": name})


def _complete(
    name: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:
    return _event("X", name, pid, tid, start, args, cat="slime", dur=end - start)


def _sample_events(samples: Iterable[Sample]) -> tuple[list[dict[str, Any]], list[TraceSpan]]:
    """Return the events of all samples, and their spans inside the engine."""
    events: list[dict[str, Any]] = []
    in_engine: list[TraceSpan] = []
    next_tid = 1
    for sample in samples:
        if not sample.trace:
            continue
        spans = sample_spans(sample.trace)
        in_engine += [span for span in spans if span.name in _COUNTED]
        rows = assign_rows(spans)
        title = f"group {sample.group_index} · sample {sample.index}"
        for row in range(max(rows, default=-1) + 1):
            name = title if row == 0 else f"{title} ({row + 1})"
            events.append(_metadata("thread_name", SAMPLES, name, next_tid + row))
        for span, row in zip(spans, rows):
            args = json_safe(span.attrs, max_text=200)
            if span.attempt:
                args["attempt"] = span.attempt
            events.append(_complete(span.name, SAMPLES, next_tid + row, span.start, span.end, args))
        for point in sample.trace["events"]:
            if point["type"] == "event":
                args = json_safe(point["attrs"], max_text=200)
                ts = _microseconds(point["ts"])
                more = {"cat": "slime", "s": "t"}
                events.append(_event("i", point["name"], SAMPLES, next_tid, ts, args, **more))
        next_tid += max(rows, default=-1) + 1
    return events, in_engine


def _engine_counters(spans: Iterable[TraceSpan]) -> list[dict[str, Any]]:
    """Count requests that are queued, in prefill and in decode, over time."""
    changes = sorted(
        change
        for span in spans
        if span.end > span.start
        for change in (
            (span.start, _COUNTED.index(span.name), 1),
            (span.end, _COUNTED.index(span.name), -1),
        )
    )
    counts = [0] * len(_COUNTED)
    events: list[dict[str, Any]] = []
    for ts, which, change in changes:
        counts[which] += change
        event = _event("C", "requests", ENGINE, 0, ts, dict(zip(_COUNTED, counts)))
        if events and events[-1]["ts"] == ts:
            events[-1] = event
        else:
            events.append(event)
    return events


def _phase_events(phases: Iterable[PhaseEvent]) -> list[dict[str, Any]]:
    return [
        _complete(
            p.name, DRIVER, 1, _microseconds(p.start), _microseconds(p.start + p.duration), {}
        )
        for p in phases
    ]


def chrome_trace(samples: Iterable[Sample], phases: Iterable[PhaseEvent] = ()) -> dict[str, Any]:
    """Return the trace of one rollout as a JSON object in Chrome's trace-event format."""
    sample_events, in_engine = _sample_events(samples)
    names = [_metadata("process_name", pid, name) for pid, name in _PROCESS_NAMES.items()]
    names.append(_metadata("thread_name", DRIVER, "phases", 1))
    events = names + _phase_events(phases) + _engine_counters(in_engine) + sample_events
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, samples: Iterable[Sample], phases: Iterable[PhaseEvent] = ()) -> None:
    """Write ``trace/rollout_000012.json``."""
    write_atomically(path, orjson.dumps(chrome_trace(samples, phases)))


def add_phases(path: Path, phases: Sequence[PhaseEvent]) -> None:
    """Add the driver's phases to a trace that the rollout process wrote; create the file if it does
    not exist."""
    if not phases:
        return
    if not path.exists():
        write_trace(path, [], phases)
        return
    trace = orjson.loads(path.read_bytes())
    trace["traceEvents"] += _phase_events(phases)
    write_atomically(path, orjson.dumps(trace))
