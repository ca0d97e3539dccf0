"""Experts that an engine sent tokens to, from its answers to the columns of a batch."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.errors import UserError
from slime.samples.columns import _optional
from slime.samples.types import Sample


def payload(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def test_a_sample_keeps_the_experts_of_its_answers() -> None:
    """Whole answers replace, answers from a later token on are appended."""
    first, rest = np.arange(2 * 3 * 2).reshape(2, 3, 2), 100 + np.arange(2 * 3 * 2).reshape(2, 3, 2)
    args = SimpleNamespace(num_layers=3, moe_router_topk=2)
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        args, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": payload(first)}
    )
    assert sample.rollout_routed_experts.tolist() == first.tolist()
    more = {"routed_experts": payload(rest), "routed_experts_start_len": 2}
    sample.append_response_tokens(tokens=[4, 5], log_probs=[0.0, 0.0], meta_info=more)
    assert np.array_equal(
        sample.rollout_routed_experts.reshape(4, 3, 2), np.concatenate([first, rest])
    )
    sample.reset_response()
    assert sample.rollout_routed_experts is None


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"routed_experts": "no base64!"}, "cannot be read"),
        ({"routed_experts": payload(np.zeros(7))}, "7 routed experts for 2 tokens"),
        (
            {"routed_experts": payload(np.zeros(6)), "routed_experts_start_len": 1},
            "none of earlier tokens",
        ),
    ],
)
def test_answers_that_do_not_fit_are_refused(meta: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Sample(tokens=[1, 2]).append_response_tokens(tokens=[3], log_probs=[0.0], meta_info=meta)
    assert said in str(caught.value)


def test_rows_stay_as_the_call_that_sampled_the_next_token_had_them() -> None:
    """The second call read the first tokens once more, with other weights, and was aborted in the
    midst of it."""
    first, cut = np.arange(8).reshape(4, 1, 2), np.full((5, 1, 2), -1)
    cut[0] = 50
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        tokens=[3, 4, 5], log_probs=[0.0] * 3, meta_info={"routed_experts": payload(first)}
    )
    sample.append_response_tokens(tokens=[6], trainable=False)
    sample.append_response_tokens(
        tokens=[], log_probs=[], meta_info={"routed_experts": payload(cut)}
    )
    assert sample.rollout_routed_experts.tolist() == [*first[:, 0].tolist(), [-1, -1]]


def test_a_sample_that_trains_nothing_may_lack_experts() -> None:
    samples = [Sample(index=i, tokens=[1, 2, 3], response_length=1) for i in (0, 1)]
    samples[0].rollout_routed_experts = np.zeros((2, 1, 2), np.int32)
    assert len(_optional(samples, [[1], [0]], "rollout_routed_experts")[1]) == 0
    with pytest.raises(UserError, match="have no rollout_routed_experts"):
        _optional(samples, [[1], [1]], "rollout_routed_experts")
