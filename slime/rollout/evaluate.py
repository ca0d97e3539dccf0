"""Evaluation: every data set at once, n samples per prompt, scored like training samples, never
trained on."""

from __future__ import annotations

import asyncio
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.config import Config
from slime.config.flag import option_of
from slime.log import get_logger
from slime.models.context import model_context
from slime.prompts.dataset_folders import EVALUATION
from slime.prompts.images import ImageSources
from slime.prompts.prepare import Checker, read_samples
from slime.prompts.row_format import RowFormat, keeps_raw_labels
from slime.prompts.source import vocab_size_of_run
from slime.rollout.eval_datasets import EvalDataset
from slime.rollout.generate import context_limit
from slime.rollout.metrics import pass_at_k_metrics, reward_parts, sample_metrics, trajectory_scores
from slime.rollout.trajectory import GroupRun, GroupRunner, too_many_failed
from slime.rollout.watchdog import Watchdog
from slime.samples.types import Sample, SampleStatus
from slime.user_code.hooks import RolloutFnEvalOutput

logger = get_logger(__name__)


@dataclass
class EvalSet:
    """A data set with its prompts, read once and copied for every evaluation."""

    dataset: EvalDataset
    prompts: list[Sample]

    def draw(self) -> list[GroupRun]:
        """Return fresh groups; sample indices count from 0 in each set, so that seeds do not
        depend on other sets."""
        n = self.dataset.n_samples_per_eval_prompt
        runs = []
        for i, prompt in enumerate(self.prompts):
            samples: list[Sample] = []
            for j in range(n):
                sample = copy.deepcopy(prompt)
                sample.group_index = i
                sample.index = i * n + j
                sample.generate_function_path = self.dataset.custom_generate_function_path
                sample.custom_rm_path = self.dataset.custom_rm_path
                sample.metadata = self.dataset.inject_metadata(sample.metadata)
                samples.append(sample)
            runs.append(GroupRun.of(samples, order=i))
        return runs


def read_eval_prompts(dataset: EvalDataset, config: Config, tokenizer: Any) -> list[Sample]:
    """Return the prompts of one set, in file order; prompts longer than ``--eval-max-prompt-len``
    are left out with a warning.

    Raises:
        UserError: a row is invalid, or no row is left.
    """
    return read_samples(dataset.path, eval_checker(dataset, config, tokenizer), EVALUATION)


def eval_form(dataset: EvalDataset, config: Config) -> RowFormat:
    """Return the columns of an evaluation set."""
    return RowFormat(
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        apply_chat_template=dataset.apply_chat_template,
        template_kwargs=dataset.apply_chat_template_kwargs,
        raw_label=keeps_raw_labels(config),
        rm_type=config.reward.rm_type,
        rm_type_of_all=dataset.inject_metadata(None).get("rm_type"),
        own_reward=bool(dataset.custom_rm_path or config.reward.custom_rm_path),
        metadata_required=dataset.metadata_key != config.data.metadata_key,
        tools_required=dataset.tool_key != config.data.tool_key,
        images=ImageSources.of(config, dataset.path, dataset.multimodal_keys),
        input_flag=_named_by("input_key", dataset, config),
        label_flag=_named_by("label_key", dataset, config),
        metadata_flag=_named_by("metadata_key", dataset, config),
        tool_flag=_named_by("tool_key", dataset, config),
    )


def eval_checker(dataset: EvalDataset, config: Config, tokenizer: Any) -> Checker:
    """Return the checker of an evaluation set, which checks and measures each row as it is read."""
    form = eval_form(dataset, config)
    whole = config.eval.eval_max_context_len
    longest = context_limit(config.eval.eval_max_prompt_len, None if whole is None else whole - 1)
    limit_flags = "--eval-max-prompt-len or --eval-max-context-len"
    is_ours = longest is None and not dataset.custom_generate_function_path
    if is_ours and (context := model_context(config)) is not None:
        longest = context - 1
        limit_flags = (
            f"the model's context of {context} tokens; --eval-max-prompt-len sets another limit"
        )
    vocab_size = vocab_size_of_run(config)
    return Checker(form, tokenizer, longest, limit_flags, vocab_size=vocab_size)


def _named_by(key: str, dataset: EvalDataset, config: Config) -> str:
    """Return what names a column of a set, for messages: a flag, or a key of --eval-config."""
    flag = f"eval_{key}"
    is_own = getattr(dataset, key) != getattr(config.eval, flag, None)
    return f"--eval-config's {key}" if is_own else option_of(flag)


#: The task of each evaluated prompt, running or done → its group.
Tasks = dict[asyncio.Task[None], GroupRun]


async def evaluate(
    sets: list[EvalSet],
    make_runner: Callable[[EvalDataset], GroupRunner],
    args: Any,
    *,
    max_failed_fraction: float,
    stall_timeout: float,
    on_start: Callable[[Tasks, Sequence[Watchdog]], None] = lambda tasks, watchdogs: None,
) -> RolloutFnEvalOutput:
    """Generate and score all sets concurrently.

    Args:
        make_runner: gives each set a runner with its own sampling parameters.
        max_failed_fraction: of a set's prompts; more failures end the evaluation, fewer are left
            out of the numbers and counted as ``eval/<name>/num_failed``.
        on_start: called with the tasks and the watchdogs once all tasks have started.
    Raises:
        UserError: too many failures, a stall, or a mistake in user code.
    """
    runs = {item.dataset.name: item.draw() for item in sets}
    tasks: Tasks = {}
    watchdogs = []
    for item in sets:
        runner = make_runner(item.dataset)
        watchdogs.append(Watchdog(runner.state.client, runner, stall_timeout))
        tasks |= {asyncio.create_task(runner.run(run)): run for run in runs[item.dataset.name]}
    on_start(tasks, watchdogs)
    try:
        await _wait(tasks, watchdogs)
    finally:
        for task in tasks:
            task.cancel()
    args = copy.copy(args)
    args.reward_key = args.eval_reward_key or args.reward_key
    data: dict[str, dict[str, list[Any]]] = {}
    metrics: dict[str, float] = {}
    for item in sets:
        name = item.dataset.name
        kept = _without_failures(name, runs[name], max_failed_fraction)
        metrics[f"eval/{name}/num_failed"] = len(runs[name]) - len(kept)
        samples = sorted(
            (sample for run in kept for sample in run.samples), key=lambda sample: sample.index or 0
        )
        data[name] = {
            "rewards": [sample.get_reward_value(args) for sample in samples],
            "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
            "samples": samples,
        }
        metrics |= eval_metrics(name, kept, args)
    return RolloutFnEvalOutput(data, metrics)


def progress_of(tasks: Tasks) -> dict[str, float]:
    """Return ``done`` of ``target`` prompts, ``tokens`` generated so far."""
    tokens = sum(run.num_tokens for run in tasks.values())
    return {"done": sum(task.done() for task in tasks), "target": len(tasks), "tokens": tokens}


async def _wait(tasks: Tasks, watchdogs: list[Watchdog]) -> None:
    """Wait until all are done, or until the first exception. The evaluation has stalled only if
    every set has stalled."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=watchdogs[0].interval, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
        if not done:
            waiting = [tasks[task] for task in pending]
            stalled = [await watchdog.check(waiting) for watchdog in watchdogs]
            if (first := stalled[0]) is not None and all(stalled):
                if not watchdogs[0].give_up_hung(waiting, first.seconds):
                    raise first
                logger.warning("%s", first)


def _without_failures(
    name: str, runs: list[GroupRun], max_failed_fraction: float
) -> list[GroupRun]:
    kept = [run for run in runs if run.failure is None and run.is_generated]
    num_failed = len(runs) - len(kept)
    if num_failed > max(1, int(max_failed_fraction * len(runs))) or (num_failed and not kept):
        failed = next((run for run in runs if run.failure is not None), None) or next(
            run for run in runs if not run.is_generated
        )
        what = f"{num_failed} of {len(runs)} prompts of evaluation set {name!r} failed"
        raise too_many_failed(what, "one of them", failed, "failed_eval.jsonl") from failed.failure
    if num_failed:
        logger.warning(
            "%d of %d prompts of evaluation set %s failed and are left out",
            num_failed,
            len(runs),
            name,
        )
    return kept


def eval_metrics(name: str, runs: list[GroupRun], args: Any) -> dict[str, float]:
    """Return the metrics of one set: ``eval/<name>`` (mean reward of its trajectories),
    ``-truncated_ratio``, ``-pass@k``, ``/response_len/…`` and ``/reward_part/…``.

    pass@k uses the number of trajectories that this set has per prompt.
    """
    samples = [sample for run in runs for sample in run.samples]
    if not samples:
        return {}
    scores = [
        trajectory_scores([trajectory.samples for trajectory in run.trajectories], args)
        for run in runs
    ]
    metrics = sample_metrics(samples, f"eval/{name}") | reward_parts(samples, f"eval/{name}", args)
    metrics[f"eval/{name}"] = statistics.fmean(
        statistics.fmean(sample.get_reward_value(args) for sample in trajectory.samples)
        for run in runs
        for trajectory in run.trajectories
        if trajectory.samples
    )
    metrics[f"eval/{name}-truncated_ratio"] = metrics.pop(f"eval/{name}/truncated_ratio")
    if max(map(len, scores)) > 1 or args.eval_pass_k:
        for key, value in pass_at_k_metrics(scores, args.eval_pass_k).items():
            metrics[f"eval/{name}-{key}"] = value
    return metrics
