"""Profile this process with torch.profiler, and merge several profiles and the run's own timelines
into one file for https://ui.perfetto.dev."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime.files import write_atomically

#: Suffix of torch.profiler's files, also those of SGLang.
TRACE_SUFFIX = ".trace.json.gz"


class TorchProfile:
    """A profile of the calling thread and its kernels. Call `stop` in the same thread.

    Args:
        path: the file that `stop` writes; ends with `TRACE_SUFFIX`.
    """

    def __init__(self, path: Path) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> Path:
        """Write the profile; return its path."""
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        return self._path


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace in Chrome's format, with or without gzip.

    Raises:
        ValueError: the file is truncated, or not JSON.
    """
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}") from error
    trace: dict[str, Any] = orjson.loads(content)
    return trace


def merge_traces(traces: Mapping[str, Path], target: Path) -> int:
    """Write one trace with the events of all traces on one clock; return the number of events.

    Args:
        traces: label ("trainer rank 0") → file of the trace. Its times are microseconds since its
            "baseTimeNanoseconds", or since 1970 without that field.
    """
    read = {name: read_trace(path) for name, path in traces.items()}
    offsets = {name: int(trace.get("baseTimeNanoseconds", 0)) for name, trace in read.items()}
    starts = [
        offsets[name] + int(1000 * first)
        for name, trace in read.items()
        if (first := min(_times(trace), default=None)) is not None
    ]
    base = min(starts, default=0)
    events = list[dict[str, Any]]()
    numbers = dict[tuple[str, Any], int]()
    for order, (name, trace) in enumerate(read.items()):
        shift = (offsets[name] - base) / 1000
        for event in trace["traceEvents"]:
            events.append(_moved(event, name, order, shift, numbers))
    named = {event["pid"] for event in events if _names_process(event)}
    for (name, pid), number in numbers.items():
        if number not in named:
            arguments = {"name": f"{name}: {pid}"}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": arguments})
    packed = gzip.compress(
        orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}),
        compresslevel=3,
    )
    write_atomically(target, packed)
    return len(events)


def _times(trace: dict[str, Any]) -> Iterable[float]:
    return (float(event["ts"]) for event in trace["traceEvents"] if _has_time(event))


def _has_time(event: dict[str, Any]) -> bool:
    return event.get("ph") != "M" and "ts" in event


def _names_process(event: dict[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "process_name"


def _moved(
    event: dict[str, Any], name: str, order: int, shift: float, numbers: dict[tuple[str, Any], int]
) -> dict[str, Any]:
    """Move an event to the common clock. Process ids and flow ids become unique among all traces,
    and process names get the label of their trace."""
    moved = dict(event)
    if "pid" in event:
        moved["pid"] = numbers.setdefault((name, event["pid"]), len(numbers) + 1)
    if "id" in event:
        moved["id"] = f"{order}:{event['id']}"
    if _has_time(event):
        moved["ts"] = float(event["ts"]) + shift
    if _names_process(event):
        moved["args"] = {"name": f"{name}: {event['args']['name']}"}
    return moved
