"""The reward that estimators compare: the reward function's value minus the penalty for answers
near the length limit."""

from __future__ import annotations

from typing import Any

from slime.samples.types import Sample


def shaped_reward(sample: Sample, args: Any) -> float:
    """Return a sample's reward with the overlong penalty."""
    return sample.get_reward_value(args) + overlong_penalty(sample, args)


def overlong_penalty(sample: Sample, args: Any) -> float:
    """Return the penalty of a long answer (at most 0): 0 up to ``--overlong-buffer-len`` tokens
    below ``--rollout-max-response-len``, then linearly down to ``-overlong_penalty_factor`` at the
    limit.

    Only tokens that the model generated count.

    Source: Yu et al., "DAPO" (arXiv:2503.14476), eq. 13.
    """
    buffer = getattr(args, "overlong_buffer_len", None)
    if buffer is None:
        return 0.0
    excess = _generated_tokens(sample, args) - (args.rollout_max_response_len - buffer)
    return float(-args.overlong_penalty_factor * min(max(excess / buffer, 0.0), 1.0))


def _generated_tokens(sample: Sample, args: Any) -> int:
    trained = sample.effective_response_length
    if not args.mask_offpolicy_in_partial_rollout:
        return trained
    # the beginning of a continued answer is masked, but the model generated it
    spans = [span for span in sample.token_spans if span.weight_version is not None]
    return max(trained, sum(span.end - span.start for span in spans))
