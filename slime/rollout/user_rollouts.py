"""Call users' rollout functions (``--rollout-function-path``, ``--eval-function-path``), and check
what they return."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from slime.config.flag import option_of
from slime.config.groups_rollout import RolloutConfig
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.rollout.response_text import TextCheck
from slime.rollout.validate_generate_output import check_distinct, check_values
from slime.samples.frozen_fields import frozen
from slime.samples.sample_fields import is_finite, is_number
from slime.samples.types import Group, Sample, VersionWindow, groups_from_nested
from slime.user_code.hooks import (
    DataSource,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    RolloutFunction,
)
from slime.user_code.loading import (
    FunctionFailed,
    call_hook,
    call_user_function,
    check_returns_nothing,
    described,
    failures_of,
    named,
    shown,
)
from slime.user_code.overrides import override_of
from slime.user_code.process_state import kept

logger = get_logger(__name__)
Output = TypeVar("Output", RolloutFnTrainOutput, RolloutFnEvalOutput)


async def call_rollout_fn(
    fn: RolloutFunction,
    args: Any,
    rollout_id: int,
    data_source: DataSource,
    wanted: type[Output],
    path: str | None = None,
) -> Output:
    """Call a user's rollout function; a bare list (training) or dict (evaluation) is wrapped,
    samples become groups.

    Args:
        wanted: the output of a rollout or of an evaluation.
    Raises:
        UserError: it returned something else, or samples that `groups_from_nested` refuses.
    """
    evaluation = wanted is RolloutFnEvalOutput
    flag = "--eval-function-path" if evaluation else "--rollout-function-path"
    origin = named(path, flag) if path else "the plugin's generate_rollout"
    with failures_of(origin), kept(origin):
        output = await call_hook(
            fn, args, rollout_id, data_source, what=path or origin, evaluation=evaluation
        )
    output = wrapped(output, evaluation)
    if not isinstance(output, wanted):
        raise FunctionFailed(
            f"{origin} returned {described(output)}",
            fix=f"return a slime.user_code.hooks.{wanted.__name__}",
        )
    given: Any = output
    found: Any = given.data if evaluation else groups_from_nested(given.samples, origin)
    return wanted(found, checked_metrics(given.metrics, origin))


async def call_with_groups(
    dest: str, args: Any, views: list[list[Sample]], *more: Any, limit: float
) -> None:
    """Call the function of the flag ``dest`` with groups of finished samples; it returns nothing.

    Raises:
        FunctionFailed: it failed, or changed generated content or the lists.
    """
    path = getattr(args, dest)
    flag = option_of(dest)
    samples = [sample for view in views for sample in view]
    with frozen(samples, named(path, flag), [views, *views], is_ordered=False):
        returned = await call_user_function(path, args, views, *more, flag=flag, limit=limit)
    instead = "set remove_sample on the samples, and return nothing"
    if dest != "rollout_sample_filter_path":
        instead = "return nothing; --dynamic-sampling-filter-path decides which groups are trained"
    check_returns_nothing(returned, [views], named(path, flag), instead)


def checked_metrics(metrics: Any, origin: str) -> dict[str, Any] | None:
    """Return the metrics that a function gave, as Python's numbers. A value that is not finite
    becomes NaN, and one that is no number is left out, with one warning per name.

    Raises:
        FunctionFailed: they are not a dict with text keys.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        fix = "metrics are a dict: {'mine/name': number}"
        raise FunctionFailed(f"{origin} gave {described(metrics)} as its metrics", fix=fix)
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        said = ""
        if not is_number(value):
            said = "%s gives the metric %s, which is %s: it is left out, as it is no number"
        elif not is_finite(value):
            found[name] = math.nan
            said = "%s gives the metric %s, which is %s: it is logged as not finite"
        else:
            found[name] = value if isinstance(value, (int, float)) else float(value)
        if said:
            tell(logger, said, origin, name, shown(value), once=f"metric {name} {origin}")
    return found


def wrapped(output: Any, evaluation: bool) -> Any:
    """Wrap a bare list (training) or dict (evaluation) that a rollout function returned."""
    if evaluation:
        return RolloutFnEvalOutput(output) if isinstance(output, dict) else output
    return RolloutFnTrainOutput(output) if isinstance(output, list) else output


def validate_groups(groups: list[Group], origin: str) -> None:
    """Check the groups for training, and sort them by sample index.

    Raises:
        UserError: there are no groups, lengths do not match, or a sample has no tokens.
    """
    if not groups:
        raise UserError(
            f"{origin} returned no groups", fix="return rollout_batch_size groups of samples"
        )
    for group in groups:
        for sample in group.samples:
            sample.validate(origin)
            if not sample.tokens:
                raise FunctionFailed(
                    f"{origin} returned a sample (index {sample.index}) without tokens",
                    fix="put prompt and response tokens into sample.tokens",
                )
    groups.sort(
        key=lambda group: min(
            (s.index for s in group.samples if s.index is not None), default=group.index
        )
    )


def check_groups(
    groups: list[Group], origin: str, vocab_size: int | None, args: Any, tokenizer: Any
) -> None:
    """Check the values of groups that a user's rollout function returned, and compare the tokens
    of the first samples with their text.

    Raises:
        UserError: tokens, log-probs or rewards that cannot be trained on; indices that are not
            distinct.
    """
    check_text = TextCheck(tokenizer)
    for group in groups:
        for sample in group.samples:
            check_values(sample, origin, vocab_size, args)
            check_text(sample, origin)
    check_distinct(groups, origin)


def tell_of_other_sizes(groups: list[Group], origin: str, flags: RolloutConfig) -> None:
    """Warn once if a user's rollout function returns other numbers than the flags say."""
    sizes = {len(group.trajectories) for group in groups}
    odd = sorted(sizes - {flags.n_samples_per_prompt})
    found = []
    if len(groups) != flags.rollout_batch_size:
        found.append(
            f"{len(groups)} groups, and --rollout-batch-size is {flags.rollout_batch_size}"
        )
    if odd:
        found.append(
            f"groups of {odd[0]} trajectories, and --n-samples-per-prompt is "
            f"{flags.n_samples_per_prompt}"
        )
    for one in found:
        said = "%s returned %s: all that it returned is trained on, in steps of --global-batch-size"
        tell(logger, said, origin, one, once=f"sizes {origin} {one.partition(',')[0][-6:]}")


def check_age(groups: list[Group], origin: str, versions: VersionWindow) -> None:
    """Check that groups of a user's rollout function are new enough; the built-in one checks this
    itself.

    Raises:
        UserError: a sample has tokens of weights that are too old.
    """
    for group in groups:
        if (version := versions.stale_among(group.weight_versions())) is not None:
            raise UserError(
                f"{origin} returned group {group.index} with tokens of weights {version}",
                why=f"--max-staleness allows for {versions.allowed}",
                fix="leave older ones out (rollout_log_probs and token_spans tell), raise "
                "--max-staleness, or pass --stale-samples correct",
            )


async def overridden_evaluation(args: Any, rollout_id: int) -> RolloutFnEvalOutput | None:
    """Call the plugin's replacement of ``eval_rollout``; None if there is none."""
    own = override_of("evaluation")
    if own is None:
        return None
    with failures_of("the plugin's eval_rollout"):
        returned = await call_hook(own, args, rollout_id, what="the plugin's eval_rollout")
    return wrapped(returned[0] if isinstance(returned, tuple) else returned, True)
