"""How a rollout or an evaluation ends, however its samples came about: dump, the user's log function, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.hook_loading import call_user_function
from slime.hooks import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.path_patterns import Evaluation
from slime.rollout.debug_data import save_rollout
from slime.samples.types import Sample

Metrics = dict[str, float]


async def finish_rollout(
    config: Config,
    args: Any,
    rollout_id: int,
    output: RolloutFnTrainOutput,
    seconds: float,
    measure: Callable[[list[Sample]], Metrics] | None = None,
) -> RolloutFnTrainOutput:
    """Dump the samples; the output with all its metrics, or with none where the user's log function takes over.

    Args:
        seconds: that the rollout took.
        measure: default metrics of the samples, beside those that the output brings.
    """
    samples = [sample for group in output.samples for sample in group.samples]
    await _dump(config, rollout_id, samples)
    metrics = dict(output.metrics or {})
    path = config.rollout.custom_rollout_log_function_path
    limit = config.rollout.rollout_stall_timeout
    if path and await call_user_function(path, rollout_id, args, samples, metrics, seconds, limit=limit):
        return RolloutFnTrainOutput(output.samples, {})
    return RolloutFnTrainOutput(output.samples, (measure(samples) if measure is not None else {}) | metrics)


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
    if path and await call_user_function(path, rollout_id, args, output.data, metrics, limit=limit):
        return RolloutFnEvalOutput(output.data, {})
    return RolloutFnEvalOutput(output.data, metrics | {"perf/eval_time": seconds})


async def _dump(config: Config, rollout_id: int | Evaluation, samples: list[Sample]) -> None:
    """Write what --save-debug-rollout-data asks for."""
    if pattern := config.debug.save_debug_rollout_data:
        await asyncio.to_thread(save_rollout, pattern, rollout_id, samples)
