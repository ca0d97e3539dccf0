"""Gaps between kernels in a profile, on traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.timeline import Gap, find_gaps, summary


def event(
    name: str, start: float, length: float, category: str = "kernel", stream: int = 7
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": length,
        "args": {"stream": stream},
    }


TRACE = [
    event("matmul", 1000, 100),
    event("copy", 1050, 150, "gpu_memcpy", stream=8),  # until 1200, while matmul ends at 1100
    event("short", 1110, 10),  # within the copy
    event("softmax", 1210, 90),  # 10 µs after it: too short to be a gap
    event("fill", 1500, 50, "gpu_memset"),  # 200 µs after softmax
    event("adam", 1650, 350, stream=8),  # 100 µs after fill
    event("optimizer.step", 1290, 400, "user_annotation"),
    event("aten::item", 1310, 150, "cpu_op"),
    event("cudaStreamSynchronize", 1320, 130, "cuda_runtime"),
    event("aten::add", 1300, 20, "cpu_op"),  # too little of any gap
    event("ProfilerStep", 0, 5000, "Trace"),  # of no kind that is known
    {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 1400},
    {"ph": "M", "name": "process_name", "args": {}},
]


def test_gaps_of_two_streams() -> None:
    found = find_gaps(reversed(TRACE))
    assert (found.span, found.busy) == (1000.0, 1000.0 - 10 - 200 - 100)
    assert found.gaps == [
        Gap(
            1300, 1500, "softmax", "fill", ("optimizer.step", "aten::item", "cudaStreamSynchronize")
        ),
        Gap(1550, 1650, "fill", "adam", ("optimizer.step",)),
    ]
    assert [gap.length for gap in found.gaps] == [200, 100]
    assert [gap.length for gap in find_gaps(TRACE, at_least=10).gaps] == [200, 100, 10]


def test_the_last_to_end_is_the_one_before_a_gap() -> None:
    found = find_gaps(
        [event("long", 0, 100, stream=1), event("short", 10, 5, stream=2), event("next", 150, 1)]
    )
    assert found.gaps == [Gap(100, 150, "long", "next")]


def test_a_summary_says_what_the_host_did() -> None:
    first, *lines = summary(find_gaps(TRACE)).splitlines()
    assert first == (
        "GPU: 1.0 ms from first to last kernel, 0.7 ms busy, 0.3 ms idle (31.0 %), 0.3 ms of it "
        "in 2 gaps:"
    )
    assert (
        lines[0].split("  ")[-1]
        == "softmax | fill | optimizer.step > aten::item > cudaStreamSynchronize"
    )
    assert "fill | adam | optimizer.step" in lines[1]
    assert [line.split(" in all: ")[1] for line in lines[2:]] == [
        "cudaStreamSynchronize",
        "optimizer.step",
    ]


def test_gaps_that_nothing_explains() -> None:
    found = find_gaps([event("a", 0, 10), event("b", 60, 10), event("c", 140, 0)])
    assert summary(found).splitlines()[-1].endswith("0.120 ms in all: between operations")
    # one kernel, shorter than the clock
    assert summary(find_gaps([event("a", 5, 0)])).startswith("GPU: 0.0 ms")


@pytest.mark.parametrize(
    "events", [[], [event("aten::add", 0, 9, "cpu_op")], [{"ph": "i", "cat": "kernel"}]]
)
def test_a_profile_without_kernels_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="no kernels"):
        find_gaps(events)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=12))
def test_busy_and_gaps_make_up_the_span(pairs: list[tuple[int, int]]) -> None:
    found = find_gaps([event(str(i), *pair) for i, pair in enumerate(pairs)], at_least=1)
    covered = {t for start, length in pairs for t in range(start, start + length)}
    first, last = min(s for s, _ in pairs), max(s + n for s, n in pairs)
    assert found.busy == len(covered) and found.span == last - first
    assert found.busy + sum(gap.length for gap in found.gaps) == found.span
    assert {t for gap in found.gaps for t in range(int(gap.start), int(gap.end))} == set(
        range(first, last)
    ) - covered
