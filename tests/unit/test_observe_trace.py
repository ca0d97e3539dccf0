"""Spans of samples, and timelines in Chrome's trace-event format."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.observe.chrome_trace import (
    TraceSpan,
    add_phases,
    assign_rows,
    chrome_trace,
    sample_spans,
    write_trace,
)
from slime.observe.phases import PhaseEvent
from slime.observe.trace import engine_phases, event, record_engine_timings, set_tracing, span
from slime.samples.types import Sample

META = {"e2e_latency": 2.0, "queue_time": 0.5, "decode_throughput": 10.0, "completion_tokens": 11}


def names_and_parents(sample: Sample) -> list[tuple[str, str | None]]:
    assert sample.trace is not None
    spans = sample_spans(sample.trace)
    by_id = {s.span_id: s.name for s in spans}
    return [(s.name, by_id.get(s.parent_span_id or "")) for s in spans]


def test_format_of_the_events() -> None:
    sample = Sample(index=5, group_index=2)
    with span(sample, "reward_model", rm_type="math") as opened:
        opened.set(reward=1.0)
    assert sample.trace is not None and sample.trace["version"] == 1
    start, end = sample.trace["events"]
    keys = {
        "type", "name", "ts", "trace_id", "sample_id", "group_id", "attempt", "span_id",
        "parent_span_id", "attrs"
    }  # fmt: skip
    assert set(start) == set(end) == keys
    assert (start["type"], end["type"]) == ("span_start", "span_end")
    assert start["trace_id"] == sample.trace["trace_id"] and start["span_id"] == end["span_id"]
    assert (start["sample_id"], start["group_id"], start["attempt"]) == (5, 2, 0)
    assert start["attrs"] == {"rm_type": "math"} and end["attrs"] == {"reward": 1.0}
    assert start["ts"] <= end["ts"]
    json.dumps(sample.trace)


def test_spans_nest_in_concurrent_tasks() -> None:
    group = [Sample(index=i, group_index=0) for i in range(4)]

    async def one(sample: Sample) -> None:
        with span(sample, "generate_and_rm"):
            with span(sample, "generate"):
                await asyncio.sleep(0.001 * (4 - (sample.index or 0)))
                record_engine_timings(sample, {**META, "e2e_latency": 0.001, "queue_time": 0.0})
            with span(sample, "reward_model"):
                await asyncio.to_thread(lambda: event(sample, "scored"))

    async def run() -> None:
        with span(group, "generate_and_rm_group"):
            await asyncio.gather(*(one(sample) for sample in group))

    asyncio.run(run())
    for sample in group:
        assert sorted(names_and_parents(sample)) == sorted(
            [
                ("generate_and_rm_group", None),
                ("generate_and_rm", "generate_and_rm_group"),
                ("generate", "generate_and_rm"),
                ("queue", "generate"),
                ("prefill", "generate"),
                ("decode", "generate"),
                ("reward_model", "generate_and_rm"),
            ]
        )
        assert sample.trace is not None
        (point,) = [e for e in sample.trace["events"] if e["type"] == "event"]
        reward_id = next(
            e["span_id"] for e in sample.trace["events"] if e["name"] == "reward_model"
        )
        assert point["parent_span_id"] == reward_id, "threads keep the open span too"


def test_an_exception_is_recorded_and_goes_on() -> None:
    sample = Sample()
    with pytest.raises(TimeoutError), span(sample, "generate"):
        raise TimeoutError
    assert sample.trace is not None and sample.trace["events"][-1]["attrs"] == {
        "error": "TimeoutError"
    }
    with span(sample, "generate"):
        pass
    assert names_and_parents(sample)[-1] == ("generate", None), "the failed span is no longer open"


def test_a_resumed_sample_counts_its_attempts() -> None:
    sample = Sample()
    for _ in range(2):
        with span(sample, "generate_and_rm"), span(sample, "generate"):
            pass
    assert sample.trace is not None
    assert [(s.name, s.attempt) for s in sample_spans(sample.trace)] == [
        ("generate_and_rm", 0),
        ("generate", 0),
        ("generate_and_rm", 1),
        ("generate", 1),
    ]


def test_fan_out_copies_get_the_end_of_the_span() -> None:
    sample = Sample(index=1)
    with span(sample, "generate") as opened:
        fanned = [copy.deepcopy(sample), copy.deepcopy(sample)]
        opened.adopt(fanned)
    for one in fanned:
        assert one.trace is not None
        (recorded,) = sample_spans(one.trace)
        assert "unfinished" not in recorded.attrs


@pytest.fixture
def tracing_off() -> Iterator[None]:
    set_tracing(False)
    yield
    set_tracing(True)


@pytest.mark.usefixtures("tracing_off")
def test_nothing_is_recorded_when_tracing_is_off() -> None:
    sample = Sample()
    with span(sample, "generate") as opened:
        opened.set(x=1)
        event(sample, "abort")
        record_engine_timings(sample, META)
    assert sample.trace is None


def test_engine_phases() -> None:
    assert engine_phases(META) == [("queue", 0.5), ("prefill", 0.5), ("decode", 1.0)]
    assert engine_phases({}) == []
    assert engine_phases({"e2e_latency": 1.0}) == [("queue", 0.0), ("decode", 1.0)]
    assert sum(s for _, s in engine_phases({**META, "decode_throughput": 0.1})) == 2.0, (
        "never more than it took"
    )


# -- Chrome trace ----------------------------------------------------------------------------------


def check_format(trace: dict[str, Any]) -> None:
    """What the trace-event format demands, and that complete events of one lane nest."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in trace["traceEvents"]:
        assert e["ph"] in {"M", "X", "C", "i"}
        assert (
            isinstance(e["pid"], int)
            and isinstance(e["tid"], int)
            and isinstance(e["ts"], int)
            and e["name"]
        )
        if e["ph"] == "X":
            assert isinstance(e["dur"], int) and e["dur"] >= 0
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        if e["ph"] == "C":
            assert all(v >= 0 for v in e["args"].values())
        if e["ph"] == "i":
            assert e["s"] == "t"
    for spans in lanes.values():
        check_nesting(spans)


def check_nesting(spans: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "overlaps without nesting"
        open_ends.append(end)


def traced_sample(index: int) -> Sample:
    sample = Sample(index=index, group_index=index // 2)
    with span(sample, "generate_and_rm"), span(sample, "generate", prompt="x" * 1000):
        record_engine_timings(sample, {**META, "e2e_latency": 0.0})
        event(sample, "retry", reason="503")
    return sample


def test_written_trace_has_lanes_for_driver_engine_and_samples(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rollout_000012.json"
    write_trace(path, [traced_sample(i) for i in range(4)] + [Sample()])
    add_phases(path, [PhaseEvent("rollout", 1000.0, 2.0, 0), PhaseEvent("train", 1002.0, 1.0, 0)])
    trace = json.loads(path.read_text())
    check_format(trace)
    process_names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert process_names == {1: "driver", 2: "engine", 3: "samples"}
    lanes = {
        e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 3
    }
    assert lanes == {
        "group 0 · sample 0",
        "group 0 · sample 1",
        "group 1 · sample 2",
        "group 1 · sample 3",
    }
    phases = [
        (e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] == 1
    ]
    assert phases == [("rollout", 1_000_000_000, 2_000_000), ("train", 1_002_000_000, 1_000_000)]
    prompts = [e["args"]["prompt"] for e in trace["traceEvents"] if e["name"] == "generate"]
    assert all(len(prompt) < 300 for prompt in prompts), "long texts are cut"
    assert sorted(p.name for p in path.parent.iterdir()) == ["rollout_000012.json"], (
        "no temporary file is left"
    )


def test_add_phases_makes_the_file_when_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rollout_000000.json"
    add_phases(path, [])
    assert not path.exists()
    add_phases(path, [PhaseEvent("train", 1.0, 1.0, 0)])
    check_format(json.loads(path.read_text()))


def test_an_unfinished_span_ends_with_what_was_seen_last() -> None:
    sample = Sample()
    assert sample.trace is None
    with span(sample, "generate"):
        event(sample, "abort")
        cut = copy.deepcopy(sample)
    assert cut.trace is not None
    (unfinished,) = sample_spans(cut.trace)
    assert unfinished.attrs["unfinished"] is True
    assert unfinished.end == round(cut.trace["events"][-1]["ts"] * 1e6)
    check_format(chrome_trace([cut]))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=25))
def test_rows_always_nest(pairs: list[tuple[int, int]]) -> None:
    spans = [
        TraceSpan("s", start, start + length, str(i), None, 0)
        for i, (start, length) in enumerate(pairs)
    ]
    spans.sort(key=lambda s: (s.start, -s.end))
    rows = assign_rows(spans)
    for row in set(rows):
        check_nesting([(s.start, s.end) for s, r in zip(spans, rows) if r == row])


def test_engine_counters_return_to_zero() -> None:
    sample = Sample(index=0)
    with span(sample, "generate"):
        record_engine_timings(sample, META)
    counters = [e["args"] for e in chrome_trace([sample])["traceEvents"] if e["ph"] == "C"]
    assert counters[0] == {"queue": 1, "prefill": 0, "decode": 0}
    assert counters[-1] == {"queue": 0, "prefill": 0, "decode": 0}
