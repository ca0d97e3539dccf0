"""Steps of a sample's way that need nothing but the sample."""

from __future__ import annotations

import copy
from typing import Any

from slime.errors import UserError
from slime.hook_loading import call_hook
from slime.samples.types import Sample


async def apply_sample_hook(hook: Any, path: str, args: Any, sample: Sample, optional: dict[str, Any]) -> Sample:
    """What a sample hook makes of ``sample``.

    Raises:
        UserError: something else than a sample, or one whose lengths do not fit.
    """
    own = await call_hook(hook, args, sample, optional=optional)
    if own is None:
        return sample
    if not isinstance(own, Sample):
        raise UserError(f"'{path}' returned a {type(own).__name__}", fix="return a sample, or None to keep it")
    own.validate(path)
    return own


def set_rewards(samples: list[Sample], scores: list[Any] | None) -> None:
    """
    Raises:
        UserError: other than one score for each sample. None for all of them leaves the samples without.
    """
    if scores is None:
        return
    if len(scores) != len(samples):
        raise UserError(
            f"the reward function returned {len(scores)} rewards for {len(samples)} samples",
            fix="return one reward per sample, in their order",
        )
    for sample, score in zip(samples, scores):
        sample.reward = score


def copy_of_prompt(sample: Sample) -> Sample:
    """A copy that shares nothing mutable that generation touches."""
    twin = copy.copy(sample)
    twin.tokens, twin.metadata = list(sample.tokens), copy.deepcopy(sample.metadata)
    twin.loss_mask = None if sample.loss_mask is None else list(sample.loss_mask)
    twin.rollout_log_probs = None if sample.rollout_log_probs is None else list(sample.rollout_log_probs)
    twin.token_spans, twin.weight_versions = copy.deepcopy(sample.token_spans), list(sample.weight_versions)
    twin.spec_info, twin.prefix_cache_info = copy.copy(sample.spec_info), copy.copy(sample.prefix_cache_info)
    twin.trace = copy.deepcopy(sample.trace)
    return twin
