"""Rollout functions of users (``--rollout-function-path``, ``--eval-function-path``): called, and what they return
checked."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.hook_loading import call_hook, failures_of
from slime.hooks import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, RolloutFunction
from slime.legacy_paths import replaced
from slime.samples.groups import groups_from_nested
from slime.samples.types import Group, Versions


async def call_rollout_fn(
    fn: RolloutFunction, args: Any, rollout_id: int, data_source: DataSource, *, evaluation: bool, path: str = ""
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a user's rollout function; a bare list (training) or dict (evaluation) is wrapped, samples become groups.

    Raises:
        UserError: it returned something else, or samples that do not fit `groups_from_nested`.
    """
    origin = path or str(fn)
    with failures_of(f"'{origin}'"):
        output = await call_hook(fn, args, rollout_id, data_source, what=origin, evaluation=evaluation)
    output = wrapped(output, evaluation)
    if evaluation and isinstance(output, RolloutFnEvalOutput):
        return output
    if not evaluation and isinstance(output, RolloutFnTrainOutput):
        return RolloutFnTrainOutput(groups_from_nested(output.samples, origin), output.metrics)
    wanted = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    raise UserError(f"{origin} returned a {type(output).__name__}", fix=f"return a slime.hooks.{wanted.__name__}")


def wrapped(output: Any, evaluation: bool) -> Any:
    """What a rollout function returned, a bare list (training) or dict (evaluation) as the output it stands for."""
    if evaluation:
        return RolloutFnEvalOutput(output) if isinstance(output, dict) else output
    return RolloutFnTrainOutput(output) if isinstance(output, list) else output


def validate_groups(groups: list[Group], origin: str) -> None:
    """Check what goes to training, and sort it by sample index.

    Raises:
        UserError: no groups, lengths that do not fit, samples without tokens.
    """
    if not groups:
        raise UserError(f"{origin} returned no groups", fix="return rollout_batch_size groups of samples")
    for group in groups:
        for sample in group.samples:
            sample.validate(origin)
            if not sample.tokens:
                raise UserError(f"{origin} returned a sample (index {sample.index}) without tokens")
    groups.sort(key=lambda group: min((s.index for s in group.samples if s.index is not None), default=group.index))


def check_age(groups: list[Group], origin: str, versions: Versions) -> None:
    """What a rollout function of the user's own returns must be new enough; the built-in one sees to that itself.

    Raises:
        UserError: a sample of weights that are too old.
    """
    for group in groups:
        if (version := versions.stale_among(group.weight_versions())) is not None:
            raise UserError(
                f"{origin} returned group {group.index} with tokens of weights {version}",
                why=f"--max-staleness allows for {versions.allowed}",
                fix="leave older ones out (rollout_log_probs and token_spans tell), raise --max-staleness, or pass"
                " --stale-samples correct",
            )


async def replaced_evaluation(args: Any, rollout_id: int) -> RolloutFnEvalOutput | None:
    """What a plugin's function in place of ``eval_rollout`` returned; None where there is none."""
    own = replaced("slime.rollout.sglang_rollout:eval_rollout")
    if own is None:
        return None
    with failures_of("the plugin's eval_rollout"):
        returned = await call_hook(own, args, rollout_id, what="the plugin's eval_rollout")
    output: RolloutFnEvalOutput = wrapped(returned[0] if isinstance(returned, tuple) else returned, True)
    return output
