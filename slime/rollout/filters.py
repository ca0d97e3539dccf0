"""Dynamic sampling filters: is a finished group worth training on?

A filter is ``fn(args, samples) -> DynamicFilterOutput | bool``; ``samples`` are all samples of the
group, also those that one trajectory fanned out into.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from slime.samples.frozen_fields import frozen
from slime.samples.types import Sample
from slime.user_code.hooks import DynamicFilter, DynamicFilterOutput
from slime.user_code.loading import FunctionFailed, call_hook, described, failures_of, named
from slime.user_code.process_state import kept

FLAG = "--dynamic-sampling-filter-path"
_SMALLEST_STD = 1e-6


def check_reward_nonzero_std(
    args: Any, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: equal rewards have advantage 0 (DAPO,
    https://arxiv.org/abs/2503.14476, §3.2). As in DAPO, these are the rewards of the reward
    function: an overlong penalty alone does not make a group worth training on.

    Example:
        rewards 1, 1, 1, 1 are dropped for the reason "zero_std_1.0"; rewards 1, 0, 1, 1 are kept.
    """
    rewards = [sample.get_reward_value(args) for sample in samples]
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    if variance**0.5 > _SMALLEST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Drop groups as `check_reward_nonzero_std` does, unless more prompts would have to be
    drawn."""
    verdict = check_reward_nonzero_std(args, samples)
    verdict.keep_when_insufficient = True
    return verdict


async def call_dynamic_filter(
    fn: DynamicFilter | None, args: Any, samples: list[Sample], limit: float | None = None
) -> DynamicFilterOutput:
    """Return the filter's verdict; a bare bool is wrapped, no filter keeps everything.

    Args:
        limit: seconds.
    Raises:
        FunctionFailed: the filter raised, did not return in time, or returned no verdict.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    path = getattr(args, "dynamic_sampling_filter_path", None)
    what = f"the function {named(path, FLAG)}" if path else f"the function of {FLAG}"
    with failures_of(what), kept(what), frozen(samples, what, [samples], is_ordered=False):
        verdict = await call_hook(fn, args, samples, what=what, limit=limit)
    return verdict_of(verdict, what)


def verdict_of(verdict: Any, what: str = "the filter") -> DynamicFilterOutput:
    """Convert the return value of a filter to its verdict; a bare bool is wrapped.

    Raises:
        FunctionFailed: ``verdict`` is not a verdict.
    """
    fix = (
        "return True to keep the group, False to drop it, or a "
        "slime.user_code.hooks.DynamicFilterOutput"
    )

    def truth(value: Any, name: str) -> bool:
        # a forgotten return would drop every group, and the text "False" would keep it
        try:
            if value is None or not hasattr(type(value), "__bool__") or value != value:
                raise TypeError
            return bool(value)
        except Exception as error:  # of an array of several numbers, for one
            raise FunctionFailed(f"{what} returned {described(value)}{name}", fix=fix) from error

    if not isinstance(verdict, DynamicFilterOutput):
        return DynamicFilterOutput(keep=truth(verdict, ""))
    reason = verdict.reason
    if not (reason is None or isinstance(reason, (str, int, float))):
        raise FunctionFailed(
            f"{what} returned {described(reason)} as its reason", fix="give a text, or None"
        )
    return DynamicFilterOutput(
        truth(verdict.keep, " as keep"),
        None if reason is None else str(reason),
        truth(verdict.keep_when_insufficient, " as keep_when_insufficient"),
    )


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Tell whether the group that the filter judged is dropped.

    Args:
        remaining_batch_size: groups kept or still running in this rollout, the judged one included.
        target_data_size: groups that the batch needs.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts drop reasons; kept for rollout functions of existing plugins.

    Example:
        >>> gatherer = MetricGatherer()
        >>> gatherer.on_dynamic_filter_drop("zero_std_1.0")
        >>> gatherer.collect()
        {'rollout/dynamic_filter/drop_zero_std_1.0': 1}
    """

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, float]:
        return {
            f"rollout/dynamic_filter/drop_{reason}": count
            for reason, count in self._reasons.items()
        }
