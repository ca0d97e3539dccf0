"""Flat runs of a tensor as boxes: every element once, in order, in few boxes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.checkpoints.optimizer_state import boxes


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=300)
@given(runs())
def test_boxes_hold_the_run_and_nothing_else(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = run
    whole = torch.arange(math.prod(shape)).view(shape)
    found = boxes(shape, start, end)
    pieces = [
        whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))].reshape(-1)
        for box in found
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).tolist() == list(
        range(start, end)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1) and all(
        math.prod(box.size) > 0 for box in found
    )
