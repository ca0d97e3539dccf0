"""The end of every rollout and evaluation: dump, the user's log function, metrics."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from slime.config.config import Config
from slime.log import get_logger, tell
from slime.paths import Evaluation
from slime.rollout.debug_data import save_rollout
from slime.rollout.generate import current_state, is_in_run
from slime.rollout.user_rollouts import checked_metrics
from slime.samples.frozen_fields import frozen
from slime.samples.sample_fields import as_list, reward_number
from slime.samples.types import Sample
from slime.user_code.hooks import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.user_code.loading import FunctionFailed, call_user_function, described, named

logger = get_logger(__name__)

Metrics = dict[str, float]
#: The flags of log functions, for messages.
ROLLOUT_LOG = "--custom-rollout-log-function-path"
EVAL_LOG = "--custom-eval-rollout-log-function-path"

_LOGGED: contextvars.ContextVar[Metrics] = contextvars.ContextVar("slime_logged_metrics")
"""Metrics that the running log function adds, also where no engine generates (SFT)."""


def logged_metrics() -> Metrics | None:
    """Return the dict in which user functions add metrics to the current rollout or evaluation;
    None outside of both."""
    found = _LOGGED.get(None)
    return current_state().logged if found is None and is_in_run() else found


async def _logged(
    config: Config,
    path: str | None,
    flag: str,
    samples: list[Sample],
    metrics: Metrics,
    given: tuple[Any, ...],
    completed: Callable[[Metrics], Metrics],
) -> Metrics:
    """Call the user's log function, if there is one, and return the metrics to log: the
    ``completed`` ones, unless the function takes over, and those that it added with
    `logged_metrics`.

    Args:
        metrics: one of the ``given`` arguments; the function may change it.
    """
    known = logged_metrics()
    logged: Metrics = {} if known is None else known
    if path:
        origin = named(path, flag)
        token = _LOGGED.set(logged)
        try:
            with frozen(samples, origin):
                limit = config.rollout.rollout_stall_timeout
                takes_over = await call_user_function(path, *given, flag=flag, limit=limit)
        finally:
            _LOGGED.reset(token)
        metrics = checked_metrics(metrics, origin) or {}
        logged = checked_metrics(logged, origin) or {}
        if is_true(takes_over, origin):
            return logged
    return completed(metrics) | logged


async def finish_rollout(
    config: Config,
    args: Any,
    rollout_id: int,
    output: RolloutFnTrainOutput,
    seconds: float,
    measure: Callable[[list[Sample]], Metrics] | None = None,
) -> RolloutFnTrainOutput:
    """Dump the samples, and return the output with all its metrics. If the user's log function
    takes over, only the metrics that it adds (`logged_metrics`) are left.

    Args:
        seconds: duration of the rollout.
        measure: computes default metrics of the samples; metrics of the output take precedence.
    """
    samples = [sample for group in output.samples for sample in group.samples]
    if not config.algorithm.trains_on_data:
        _warn_of_unused_key("--reward-key", config.reward.reward_key, samples)
        category = config.observe.log_reward_category
        _warn_of_unused_key("--log-reward-category", category, samples)
    await _dump(config, rollout_id, samples)
    metrics = dict(output.metrics or {})
    path = config.rollout.custom_rollout_log_function_path
    given = (rollout_id, args, samples[:], metrics, seconds)

    def completed(metrics: Metrics) -> Metrics:
        return (measure(samples) if measure is not None else {}) | metrics

    logged = await _logged(config, path, ROLLOUT_LOG, samples, metrics, given, completed)
    return RolloutFnTrainOutput(output.samples, logged)


async def finish_evaluation(
    config: Config,
    args: Any,
    rollout_id: int,
    output: RolloutFnEvalOutput,
    seconds: float,
    *,
    before_training: bool = False,
) -> RolloutFnEvalOutput:
    """Dump the samples of an evaluation, and return it with all its metrics; ``eval/<name>`` is the
    mean reward where the evaluation function gave none.

    Args:
        before_training: no rollout came before. The dump gets another name, so the evaluation after
            rollout 0 does not replace it.
    Raises:
        FunctionFailed: a data set has no list of rewards, or the log function failed or changed
            samples.
    """
    metrics: dict[str, Any] = dict(output.metrics or {})
    path = args.eval_function_path
    _check_evaluation(
        output.data, named(path, "--eval-function-path") if path else "the evaluation"
    )
    for name, values in output.data.items():
        if f"eval/{name}" not in metrics and values["rewards"]:
            metrics[f"eval/{name}"] = sum(values["rewards"]) / len(values["rewards"])
    samples = [sample for values in output.data.values() for sample in values.get("samples") or ()]
    if not config.origins["eval_reward_key"].startswith("derived"):
        _warn_of_unused_key("--eval-reward-key", config.reward.eval_reward_key, samples)
    elif config.algorithm.trains_on_data or config.rollout.num_rollout == 0:
        _warn_of_unused_key("--reward-key", config.reward.eval_reward_key, samples)
    await _dump(config, Evaluation(None if before_training else rollout_id), samples)
    path = config.rollout.custom_eval_rollout_log_function_path
    given = (rollout_id, args, output.data, metrics)

    def completed(metrics: Metrics) -> Metrics:
        return metrics | {"perf/eval_time": seconds}

    logged = await _logged(config, path, EVAL_LOG, samples, metrics, given, completed)
    return RolloutFnEvalOutput(output.data, logged)


def unused_key(option: str, key: str | None, rewards: list[Any]) -> str:
    """Return the warning that a key of dict rewards is given and no reward is a dict; else ""."""
    found = [reward for reward in rewards if reward is not None]
    if key is None or not found or any(isinstance(reward, dict) for reward in found):
        return ""
    return (
        f"{option} {key} has no effect: the rewards are plain numbers ({found[0]}, for one), not "
        f"dicts; leave it out, or return dicts with the key {key!r}"
    )


def _warn_of_unused_key(option: str, key: str | None, samples: list[Sample]) -> None:
    if warning := unused_key(option, key, [sample.reward for sample in samples]):
        tell(logger, "%s", warning, once=f"unused {option}")


def _check_evaluation(data: Any, origin: str) -> None:
    """Check the return value of an evaluation function; convert rewards to floats.

    Raises:
        FunctionFailed: a data set has no list of finite rewards, or its samples are no `Sample`.
    """
    fix = "return {name: {'rewards': [number, …], 'truncated': […], 'samples': […]}}"
    if not isinstance(data, dict):
        raise FunctionFailed(f"{origin} returned {described(data)} as its data", fix=fix)
    if not data:
        raise FunctionFailed(f"{origin} returned no data set", fix=fix)
    for name, values in data.items():
        rewards = as_list(values.get("rewards")) if isinstance(values, dict) else None
        if not isinstance(rewards, list):
            raise FunctionFailed(
                f"{origin} returned no list of rewards for data set {name!r}", fix=fix
            )
        values["rewards"] = [
            reward_number(value, origin, f"the reward of sample {position} of data set {name!r}")
            for position, value in enumerate(rewards)
        ]
        samples = values.get("samples") or ()
        is_list = isinstance(samples, (list, tuple))
        if not is_list or not all(isinstance(sample, Sample) for sample in samples):
            raise FunctionFailed(
                f"{origin} returned samples of data set {name!r} that are no Sample", fix=fix
            )
        for key in ("truncated", "samples"):
            count = len(as_list(values.get(key)) or ())
            if count not in (0, len(values["rewards"])):
                raise FunctionFailed(
                    f"{origin} returned {count} {key} for {len(values['rewards'])} rewards of data "
                    f"set {name!r}",
                    fix="give one entry per reward in each list",
                )
        if not values["rewards"]:
            tell(logger, "%s returned no rewards for data set %r", origin, name, once=origin + name)


def is_true(value: Any, origin: str) -> bool:
    """Convert the return value of a log function to a bool.

    Raises:
        FunctionFailed: it is neither a bool nor None; a dict of metrics would count as True, and
            switch the default metrics off.
    """
    is_truth = type(value).__name__ in ("bool", "bool_")  # NumPy's has another class
    if value is None or is_truth or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise FunctionFailed(
        f"{origin} returned {described(value)}",
        why="it may return True, so that the default metrics are not logged",
        fix="add metrics of yours to extra_metrics, and return True, False or nothing",
    )


async def _dump(config: Config, rollout_id: int | Evaluation, samples: list[Sample]) -> None:
    if pattern := config.debug.save_debug_rollout_data:
        await asyncio.to_thread(save_rollout, pattern, rollout_id, samples)
