"""Steps of a sample's way that need nothing but the sample."""

from __future__ import annotations

import copy
from typing import Any

from slime.errors import UserError
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import FunctionFailed, call_hook


async def apply_sample_hook(
    hook: Any,
    origin: str,
    args: Any,
    sample: Sample,
    optional: dict[str, Any],
    limit: float | None = None,
) -> Sample:
    """What a sample hook makes of ``sample``.

    Args:
        origin: the hook in messages (`slime.user_code.loading.named`).
        limit: seconds that it may take.
    Raises:
        FunctionFailed: it hung, or returned something else than a sample, or one whose lengths do
            not fit.
    """
    own = await call_hook(
        hook,
        args,
        sample,
        optional=optional,
        what=f"{origin} on sample {sample.index}",
        limit=limit,
    )
    own = sample if own is None else own
    if not isinstance(own, Sample):
        what = f"{origin} returned a {type(own).__name__}"
        raise FunctionFailed(what, fix="return a sample, or None to keep it")
    try:
        own.validate(origin)
    except UserError as error:
        raise FunctionFailed.of(error) from error
    return own


def truncated(sample: Sample, prompt: Sample, prompt_ids: list[int]) -> Sample:
    """The sample as far as users' code has built it when there was no more room; as it was given to
    that code, where it is half-built (its prompt is another, or its lengths do not fit)."""
    try:
        sample.validate()
        whole = sample.tokens[: sample.prompt_length] == prompt_ids
    except UserError:
        whole = False
    if not whole:
        sample = copy_of_prompt(prompt)
        sample.tokens = sample.tokens or prompt_ids
    sample.status = SampleStatus.TRUNCATED
    return sample


def set_rewards(samples: list[Sample], scores: list[Any] | None) -> None:
    """
    Raises:
        UserError: other than one score for each sample. None for all of them leaves the samples
            without.
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
    twin.rollout_log_probs = (
        None if sample.rollout_log_probs is None else list(sample.rollout_log_probs)
    )
    twin.token_spans = [copy.copy(token_span) for token_span in sample.token_spans]
    twin.weight_versions = list(sample.weight_versions)
    twin.spec_info, twin.prefix_cache_info = (
        copy.copy(sample.spec_info),
        copy.copy(sample.prefix_cache_info),
    )
    if sample.trace is not None:  # whose events stay as they are
        twin.trace = {**sample.trace, "events": list(sample.trace.get("events", ()))}
    return twin
