"""What is said of the first step: numbers always, advice where they are large."""

from __future__ import annotations

import pytest

from slime.observe.first_step import first_step_lines


@pytest.mark.parametrize(
    ("log_prob", "advice"),
    [
        (-0.4, ""),
        (-1.0, ""),
        (-1.3, "--apply-chat-template"),
        (-5.0, "--apply-chat-template"),
        (-11.5, "slime doctor"),
    ],
)
def test_large_log_probs_say_what_they_mean(log_prob: float, advice: str) -> None:
    first, *rest = first_step_lines(
        {"rollout/log_probs": log_prob, "rollout/rollout_log_probs": -0.3, "train/grad_norm": 0.5}
    )
    assert (
        first == f"first step: mean log-prob {log_prob:.3f} by the trainer, -0.300 by the engine; "
        "gradient norm 0.50"
    )
    assert (advice in rest[0] and len(rest) == 1) if advice else not rest


def test_the_reference_is_named_and_what_scores_nothing_says_nothing() -> None:
    assert first_step_lines({"train/loss": 2.0, "train/grad_norm": 1.0}) == []
    assert first_step_lines({"rollout/ref_log_probs": -0.2}) == [
        "first step: mean log-prob -0.200 by the reference"
    ]
