"""A `TrainBatch` on its way to the trainer: whatever its tensors are, they come out as they went
in."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.samples.batch import StepPlan, TrainBatch

_DTYPES = (torch.int64, torch.float32, torch.int32, torch.uint8, torch.bfloat16)
_SHAPES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=6)


def tensors(shapes: list[list[int]], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    return [
        torch.arange(torch.Size(shape).numel()).to(dtypes[i % len(dtypes)]).view(shape)
        for i, shape in enumerate(shapes)
    ]


def batch(**fields: Any) -> TrainBatch:
    n = len(fields["tokens"])
    plain: dict[str, Any] = dict.fromkeys(
        ("response_lengths", "sample_indices", "group_indices", "trajectory_ids"), [1] * n
    )
    plain |= dict.fromkeys(("rewards", "raw_rewards", "rollout_mask_sums"), [0.5] * n) | {
        "truncated": [False] * n
    }
    return TrainBatch(rollout_id=3, steps=[StepPlan([[0]], 1, 2)], loss_masks=[], **plain, **fields)


@given(_SHAPES, _SHAPES, st.lists(st.sampled_from(_DTYPES), min_size=1, max_size=2))
def test_tensors_come_out_as_they_went_in(
    shapes: list[list[int]], others: list[list[int]], dtypes: list[torch.dtype]
) -> None:
    sent = batch(
        tokens=tensors(shapes, [torch.int64]),
        payloads={"of the engine": tensors(others, dtypes)},
        metadata=[{"a": 1}],
    )
    buffers: list[pickle.PickleBuffer] = []
    content = cloudpickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    # as from Ray: read-only
    found = pickle.loads(content, buffers=[bytes(buffer) for buffer in buffers])
    for name, value in vars(sent).items():
        if name in ("tokens", "payloads"):
            columns = value if isinstance(value, dict) else {"": value}
            got = getattr(found, name)
            for ours, theirs in (
                pair
                for key, column in columns.items()
                for pair in zip(got[key] if key else got, column, strict=True)
            ):
                assert (
                    torch.equal(ours, theirs)
                    and ours.dtype == theirs.dtype
                    and ours.shape == theirs.shape
                )
                ours.zero_()
        else:
            assert getattr(found, name) == value
    assert all(torch.equal(a, b) for a, b in zip(sent.tokens, tensors(shapes, [torch.int64])))
