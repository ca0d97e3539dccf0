"""Record what happened to each sample and when, as spans in ``sample.trace``.

    generate_and_rm_group ─┬─ generate_and_rm ─┬─ generate ─┬─ queue
                           │                   │            ├─ prefill
                           │                   │            └─ decode
                           │                   └─ reward_model
                           └─ …

``sample.trace = {"version": 1, "trace_id": …, "events": […]}``; each event is ``{"type":
"span_start" | "span_end" | "event", "name", "ts", "trace_id", "sample_id", "group_id", "attempt",
"span_id", "parent_span_id", "attrs"}`` with ``ts`` in epoch seconds. The open span is in a context
variable, so that spans nest correctly in asyncio tasks and in threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from slime.observe.phases import now

if TYPE_CHECKING:
    from slime.samples.types import Sample

TRACE_VERSION = 1

_enabled = True


def set_tracing(enabled: bool) -> None:
    """Turn recording on or off for this process (``--trace``). When it is off, `span` costs almost
    nothing."""
    global _enabled
    _enabled = enabled


class Span:
    """An open span. `set` adds attributes to its end event; `adopt` records its end in more
    samples."""

    def __init__(self, samples: Sequence[Sample], name: str, parent: Span | None) -> None:
        self.name = name
        self.span_id = secrets.token_hex(8)
        self.parent_span_id = parent.span_id if parent is not None else None
        self.attempt: int = (
            parent.attempt if parent is not None else _earlier_attempts(samples, name)
        )
        self._samples = list(samples)
        self._attrs: dict[str, Any] = {}

    def set(self, **attrs: Any) -> None:
        self._attrs.update(attrs)

    def adopt(self, samples: Sequence[Sample]) -> None:
        """Record the end in these samples too, if a generate function returned other samples than
        it was given (fan-out)."""
        known = {id(sample) for sample in self._samples}
        self._samples += [sample for sample in samples if id(sample) not in known]

    def _record(self, kind: str, ts: float, attrs: dict[str, Any]) -> None:
        for sample in self._samples:
            _append(
                sample, kind, self.name, ts, self.attempt, self.span_id, self.parent_span_id, attrs
            )


_current: ContextVar[Span | None] = ContextVar("slime_trace_span", default=None)


def _earlier_attempts(samples: Sequence[Sample], name: str) -> int:
    """Count the earlier root spans of this name: an aborted sample that is resumed has attempt
    1."""
    trace = samples[0].trace if samples and _has_trace(samples[0]) else None
    events = trace["events"] if trace is not None else []
    return sum(
        e["type"] == "span_start" and e["name"] == name and e["parent_span_id"] is None
        for e in events
    )


def _has_trace(sample: Sample) -> bool:
    """Tell whether ``sample.trace`` is a trace of ours; users' code may put other objects there."""
    trace = sample.trace
    return isinstance(trace, dict) and "trace_id" in trace and isinstance(trace.get("events"), list)


def _append(
    sample: Sample,
    kind: str,
    name: str,
    ts: float,
    attempt: int,
    span_id: str | None,
    parent_span_id: str | None,
    attrs: dict[str, Any],
) -> None:
    if not _has_trace(sample):
        sample.trace = {"version": TRACE_VERSION, "trace_id": secrets.token_hex(16), "events": []}
    assert sample.trace is not None
    sample.trace["events"].append(
        {
            "type": kind,
            "name": name,
            "ts": ts,
            "trace_id": sample.trace["trace_id"],
            "sample_id": sample.index,
            "group_id": sample.group_index,
            "attempt": attempt,
            "span_id": span_id,
            "parent_span_id": parent_span_id,
            "attrs": attrs,
        }
    )


def _as_list(samples: Sample | Sequence[Sample]) -> Sequence[Sample]:
    return samples if isinstance(samples, Sequence) else [samples]


@contextmanager
def span(samples: Sample | Sequence[Sample], name: str, **attrs: Any) -> Iterator[Span]:
    """Record a span around a block, in one sample or in each of several (a group).

    An exception is recorded as the attribute ``error`` and raised again.

    Example:
        >>> with span(sample, "reward_model") as reward_span:
        ...     sample.reward = await score(sample)
        ...     reward_span.set(reward=sample.reward)
    """
    opened = Span(_as_list(samples), name, _current.get() if _enabled else None)
    if not _enabled:
        yield opened
        return
    opened._record("span_start", now(), attrs)
    token = _current.set(opened)
    try:
        yield opened
    except BaseException as error:
        opened.set(error=type(error).__name__)
        raise
    finally:
        _current.reset(token)
        opened._record("span_end", now(), opened._attrs)
        opened._samples = []  # timers of asyncio keep the context, and the span in it, for hours


def event(samples: Sample | Sequence[Sample], name: str, **attrs: Any) -> None:
    """Record a point in time (an abort, a retry) in the open span."""
    if not _enabled:
        return
    parent = _current.get()
    for sample in _as_list(samples):
        _append(
            sample,
            "event",
            name,
            now(),
            parent.attempt if parent else 0,
            None,
            parent.span_id if parent else None,
            attrs,
        )


def engine_phases(meta_info: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return a request's time in the engine as (phase, seconds), in order; [] if the engine gave no
    timings.

    Uses ``e2e_latency`` and ``queue_time``. ``decode_throughput`` (tokens per second after the
    first token) and ``completion_tokens`` split the rest into prefill and decode; without them, the
    rest is one phase, "decode".

    Example:
        >>> engine_phases({"e2e_latency": 2.0, "queue_time": 0.5, "decode_throughput": 10.0,
        ...                "completion_tokens": 11})
        [('queue', 0.5), ('prefill', 0.5), ('decode', 1.0)]
    """
    whole = meta_info.get("e2e_latency")
    if whole is None:
        return []
    queue = min(float(meta_info.get("queue_time") or 0.0), float(whole))
    busy = float(whole) - queue
    speed = meta_info.get("decode_throughput")
    tokens = meta_info.get("completion_tokens")
    if not speed or tokens is None:
        return [("queue", queue), ("decode", busy)]
    decode = min(busy, max(0, int(tokens) - 1) / float(speed))
    return [("queue", queue), ("prefill", busy - decode), ("decode", decode)]


def record_engine_timings(sample: Sample, meta_info: Mapping[str, Any]) -> None:
    """Add the engine's queue, prefill and decode times as child spans of the open span. Call this
    right after the answer arrives.

    The engine reports only durations: the spans follow each other, and decode ends now.
    """
    phases = engine_phases(meta_info) if _enabled else []
    parent = _current.get()
    start = now() - sum(seconds for _, seconds in phases)
    for name, seconds in phases:
        child = Span([sample], name, parent)
        child._record("span_start", start, {})
        start += seconds
        child._record("span_end", start, {})
