"""Where a GPU had nothing to do: the gaps between kernels in a profile, and what the host did
meanwhile.

gaps = find_gaps(json.load(open("trace.json"))["traceEvents"])  # by torch.profiler
print(summary(gaps))
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function")
_EXPLAINED = 60  # the longest gaps; a look at the host's work takes a while


@dataclass(frozen=True)
class Gap:
    """Microseconds of the profile's clock.

    Attributes:
        after, before: kernels on its two sides.
        host: what of the host's work filled it best, outermost first.
    """

    start: float
    end: float
    after: str
    before: str
    host: tuple[str, ...] = ()

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Gaps:
    """Of one profile: its span on the GPU, the time with a kernel under way, and the gaps, longest
    first."""

    span: float
    busy: float
    gaps: list[Gap]


def find_gaps(events: Iterable[dict[str, Any]], at_least: float = 20.0) -> Gaps:
    """Gaps of ``at_least`` microseconds.

    Raises:
        ValueError: no kernel was recorded.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = sorted((e for e in complete if e.get("cat") in _ON_GPU), key=lambda e: float(e["ts"]))
    host = [e for e in complete if e.get("cat") in _ON_HOST]
    if not kernels:
        raise ValueError("the profile has no kernels")
    busy = 0.0
    gaps = []
    last = kernels[0]
    end = start = float(last["ts"])
    for kernel in kernels:
        begin = float(kernel["ts"])
        finish = float(kernel["ts"]) + float(kernel["dur"])
        if begin - end >= at_least:
            gaps.append(Gap(end, begin, last["name"], kernel["name"]))
        busy += max(0.0, finish - max(begin, end))
        if finish > end:
            end = finish
            last = kernel
    gaps.sort(key=lambda gap: -gap.length)
    known = [
        dataclasses.replace(gap, host=_meanwhile(host, gap.start, gap.end))
        for gap in gaps[:_EXPLAINED]
    ]
    return Gaps(end - start, busy, known + gaps[_EXPLAINED:])


def _meanwhile(host: Sequence[dict[str, Any]], start: float, end: float) -> tuple[str, ...]:
    """What overlaps half of the gap or more, from the outermost to the innermost."""
    found = []
    for event in host:
        begin = float(event["ts"])
        length = float(event["dur"])
        overlap = min(end, begin + length) - max(start, begin)
        if overlap >= (end - start) / 2:
            found.append((length, str(event["name"])))
    return tuple(name for _, name in sorted(found, reverse=True))


def summary(found: Gaps, rows: int = 12) -> str:
    idle = found.span - found.busy
    lines = [
        f"GPU: {found.span / 1e3:.1f} ms from first to last kernel, {found.busy / 1e3:.1f} ms "
        f"busy, {idle / 1e3:.1f} ms idle ({100 * idle / max(found.span, 1e-9):.1f} %), "
        f"{sum(gap.length for gap in found.gaps) / 1e3:.1f} ms of it in {len(found.gaps)} gaps:"
    ]
    for gap in found.gaps[:rows]:
        meanwhile = " > ".join(name[-60:] for name in gap.host[-4:]) or "between operations"
        lines.append(
            f"  {gap.length / 1e3:8.3f} ms  {gap.after[:40]} | {gap.before[:40]} | {meanwhile}"
        )
    by_reason: Counter[str] = Counter()
    for gap in found.gaps[:_EXPLAINED]:
        by_reason[gap.host[-1] if gap.host else "between operations"] += round(gap.length)
    lines += [
        f"  {length / 1e3:8.3f} ms in all: {reason[-90:]}"
        for reason, length in by_reason.most_common(rows)
    ]
    return "\n".join(lines)
