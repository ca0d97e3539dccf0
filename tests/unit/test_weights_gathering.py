"""Parameters travel in batches: nothing is lost, the order is kept, and the memory is bounded."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.checkpoints.gathering import PlacedParameter, batches, gather
from slime.checkpoints.megatron_names import Placement

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=12)


@given(SHAPES, st.integers(1, 400), st.integers(1, 4), st.data())
def test_batches_keep_the_order_and_the_limit(
    shapes: list[tuple[int, int]], limit: int, tp_size: int, data: st.DataObject
) -> None:
    dtypes, cut = st.sampled_from(["float32", "bfloat16"]), st.booleans()
    held = [
        PlacedParameter(f"p{i}", shape, data.draw(dtypes), 0, 0, False, data.draw(cut))
        for i, shape in enumerate(shapes)
    ]
    place = Placement(tp_size=tp_size, etp_size=1)
    found = list(batches(held, place, limit))
    assert [one for batch in found for one in batch] == held
    for batch in found:
        size = sum(one.nbytes * (tp_size if one.is_cut else 1) for one in batch)
        assert size <= limit or len(batch) == 1
    for batch, following in pairwise(found):  # none is closed too early
        first = following[0]
        size = sum(one.nbytes * (tp_size if one.is_cut else 1) for one in [*batch, first])
        assert size > limit


def test_alone_nothing_is_copied() -> None:
    weight = torch.arange(6.0).view(2, 3)
    held = PlacedParameter("w", (2, 3), "float32", 0, 0, True, True)
    [piece] = gather([held], {"w": weight}, Placement(), torch.device("cpu"))["w"]
    assert piece.data_ptr() == weight.data_ptr()
