"""How a rollout or an evaluation ends, however its samples came about: dump, the user's log function, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.hook_loading import call_user_function
from slime.hooks import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.path_patterns import Evaluation
from slime.rollout.debug_data import save_rollout
from slime.rollout.generate import current_state, is_in_run
from slime.samples.types import Sample

Metrics = dict[str, float]

_LOGGED: contextvars.ContextVar[Metrics] = contextvars.ContextVar("slime_logged_metrics")
"""Of the log function that runs, also where no engine has generated (SFT)."""


def logged_metrics() -> Metrics | None:
    """Metrics of the rollout or evaluation that this code runs in, for users' functions to add to; None where there is
    none."""
    found = _LOGGED.get(None)
    return current_state().logged if found is None and is_in_run() else found


@contextlib.contextmanager
def _collecting() -> Iterator[Metrics]:
    logged = logged_metrics()
    token = _LOGGED.set({} if logged is None else logged)
    try:
        yield _LOGGED.get()
    finally:
        _LOGGED.reset(token)


async def finish_rollout(
    config: Config,
    args: Any,
    rollout_id: int,
    output: RolloutFnTrainOutput,
    seconds: float,
    measure: Callable[[list[Sample]], Metrics] | None = None,
) -> RolloutFnTrainOutput:
    """Dump the samples; the output with all its metrics, or with those alone that the user's log function adds
    (`logged_metrics`) where it takes over.

    Args:
        seconds: that the rollout took.
        measure: default metrics of the samples, beside those that the output brings.
    """
    samples = [sample for group in output.samples for sample in group.samples]
    await _dump(config, rollout_id, samples)
    metrics = dict(output.metrics or {})
    path = config.rollout.custom_rollout_log_function_path
    limit = config.rollout.rollout_stall_timeout
    with _collecting() as logged:
        if path and await call_user_function(path, rollout_id, args, samples, metrics, seconds, limit=limit):
            return RolloutFnTrainOutput(output.samples, dict(logged))
    measured = measure(samples) if measure is not None else {}
    return RolloutFnTrainOutput(output.samples, measured | metrics | logged)


async def finish_evaluation(
    config: Config,
    args: Any,
    rollout_id: int,
    output: RolloutFnEvalOutput,
    seconds: float,
    *,
    before_training: bool = False,
) -> RolloutFnEvalOutput:
    """The same for an evaluation; ``eval/<name>`` is the mean reward where the evaluation function gave none.

    Args:
        before_training: no rollout came before it: its dump must not be replaced by that of the one after rollout 0.
    Raises:
        UserError: a data set without a list of rewards.
    """
    metrics: dict[str, Any] = dict(output.metrics or {})
    for name, values in output.data.items():
        if not isinstance(values, dict) or not isinstance(values.get("rewards"), list):
            raise UserError(
                f"{args.eval_function_path} returned no list of rewards for data set {name!r}",
                fix="return {name: {'rewards': [number, …], 'truncated': […], 'samples': […]}}",
            )
        if f"eval/{name}" not in metrics and values["rewards"]:
            metrics[f"eval/{name}"] = sum(values["rewards"]) / len(values["rewards"])
    samples = [sample for values in output.data.values() for sample in values.get("samples") or ()]
    await _dump(config, Evaluation(None if before_training else rollout_id), samples)
    path = config.rollout.custom_eval_rollout_log_function_path
    limit = config.rollout.rollout_stall_timeout
    with _collecting() as logged:
        if path and await call_user_function(path, rollout_id, args, output.data, metrics, limit=limit):
            return RolloutFnEvalOutput(output.data, dict(logged))
    return RolloutFnEvalOutput(output.data, metrics | {"perf/eval_time": seconds} | logged)


async def _dump(config: Config, rollout_id: int | Evaluation, samples: list[Sample]) -> None:
    """Write what --save-debug-rollout-data asks for."""
    if pattern := config.debug.save_debug_rollout_data:
        await asyncio.to_thread(save_rollout, pattern, rollout_id, samples)
