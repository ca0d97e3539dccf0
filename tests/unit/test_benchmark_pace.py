"""The pace of a run that generates ahead is told of its middle."""

from __future__ import annotations

import pytest

from benchmarks.pace import between, num_rollouts
from benchmarks.waves import ends, parse_args


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_neither_what_begins_together_nor_what_is_behind_the_steps_counts(ahead: int) -> None:
    """Steps that take ten seconds, but for those of both ends."""
    steps, first = 7, max(1, ahead)
    seconds = [99.0] * first + [10.0] * (steps - first) + [1.0] * ahead
    assert len(seconds) == num_rollouts(steps, ahead)
    rows = [{"step": i + 1, "time": sum(seconds[: i + 1])} for i in range(len(seconds))]
    chosen, took = between(rows, steps, ahead)
    whole = (steps - first) // first * first
    assert [row["step"] for row in chosen] == list(range(first + 1, first + whole + 1))
    assert took / len(chosen) == 10.0
    with pytest.raises(
        ValueError, match=f"the pace is that of {first} or more behind the first {first}"
    ):
        between(rows[: 2 * first - 1], steps, ahead)


def test_a_run_that_goes_on_is_slower_than_one_told_up_to_its_end() -> None:
    args = parse_args(["--prompts", "4", "--samples", "2", "--ahead", "3", "--scale", "1"])
    ended = ends(args, 7, 7)
    far = ends(args, 43, num_rollouts(43, 3))
    assert far[0] == ended[0], "until rollouts are missing it is the same run"
    assert (far[-1] - far[2]) / 40 > (ended[-1] - ended[0]) / 6
    assert (far[-1] - far[2]) / 40 < ended[-1] / 7, (
        "and faster than one that is told from its launch"
    )
