r"""`slime reward`: run a reward function on its own, on rows of data, without engines or trainer.

slime reward --custom-rm-path my.reward --prompt-data answers.jsonl \
    --label-key label --response-key response
slime reward --rm-type math --prompt-data train.jsonl \
    --input-key question --label-key answer --response 42
slime reward --custom-rm-path my.reward --prompt-data outputs/run/samples/rollout_000000.jsonl
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from typing import Any

from slime.cli.arguments import Arguments, at_least_one
from slime.config import Config, make_config
from slime.errors import UserError
from slime.hub import local_data
from slime.prompts.dataset_folders import TRAINING, split_notice
from slime.prompts.labels import label_text, written
from slime.prompts.problems import Problems, RowProblem, missing_key
from slime.prompts.readers import iter_rows
from slime.prompts.row_format import RowFormat, check_label_key, read_prompt
from slime.rollout.finish import unused_key
from slime.rollout.rewards.pool import RM_TYPES, RewardPool
from slime.rollout.rewards.row_checks import RewardJudge
from slime.samples.types import Sample, SampleStatus


def main(argv: list[str] | None = None) -> int:
    """Score rows; print one line per row, then mean, range and time. Returns the exit
    status."""
    flags = _parser().parse_args(argv)
    if flags.response is None and flags.response_key is None:
        flags.response_key = "response"
    if not flags.custom_rm_path and not flags.rm_type:
        raise UserError(
            "there is no reward function to run", fix="pass --custom-rm-path or --rm-type"
        )
    path = local_data(flags.prompt_data)
    if notice := split_notice(path, TRAINING):
        print(notice, file=sys.stderr)
    is_record = _is_record(path)
    config = make_config(
        num_rollout=1,
        rollout_batch_size=1,
        prompt_data=path,
        input_key=flags.input_key or ("prompt" if is_record else "input"),
        label_key=flags.label_key or ("label" if is_record else None),
        metadata_key=flags.metadata_key,
        label_type=flags.label_type,
        **{
            name: getattr(flags, name) for name in _REWARD_FLAGS if getattr(flags, name) is not None
        },
    )
    for warning in config.warnings:
        print(warning, file=sys.stderr)
    samples = _samples(config, flags.response, flags.response_key, flags.max_rows)
    started = time.perf_counter()
    rewards, metrics = asyncio.run(_score(config, samples))
    if warning := unused_key("--reward-key", flags.reward_key, rewards):
        print(warning, file=sys.stderr)
    _report(samples, rewards, metrics, time.perf_counter() - started, flags.reward_key)
    return 0


_REWARD_FLAGS = (
    "custom_rm_path", "rm_type", "group_rm", "reward_key", "rm_url", "rm_path", "rm_timeout",
    "rm_num_workers",
)  # fmt: skip


def _is_record(path: str) -> bool:
    """Tell whether a file has the columns of samples that a run has recorded (``samples/``)."""
    _, row = next(iter(iter_rows(path)), ("", {}))
    return {"rollout_id", "prompt", "response", "label", "weight_versions"} <= row.keys()


def _parser() -> Arguments:
    parser = Arguments("slime reward", __doc__)
    add = parser.add_argument
    add("--prompt-data", required=True, help="rows to score; path@[a:b] takes a slice")
    add("--custom-rm-path", help="your function, package.module.function or file.py:function")
    add("--rm-type", help=f"a built-in one: {', '.join(RM_TYPES)}")
    responses = parser.add_mutually_exclusive_group()
    responses.add_argument("--response", help="the response to score for every row")
    responses.add_argument("--response-key", help="column of the response (default: response)")
    add("--input-key", help="column of the prompt (default: input; prompt in samples of a run)")
    add("--label-key", help="column of the label (default: none; label in samples of a run)")
    add(
        "--label-type",
        choices=("text", "raw"),
        help="as in a run: numbers become text (text), or not",
    )
    add("--metadata-key", default="metadata", help="column of sample.metadata")
    add(
        "--group-rm",
        action="store_true",
        default=None,
        help="call the function with all rows at once",
    )
    add("--reward-key", help="key of the number, when rewards are dicts")
    add("--rm-url", help="address for --rm-type remote_rm")
    add("--rm-path", help="directory for --rm-type reward_model")
    add("--rm-timeout", type=float, help="seconds for one call")
    add("--rm-num-workers", type=int, help="processes of the math graders")
    add("--max-rows", type=at_least_one, default=100, help="score at most so many rows (100)")
    return parser


def _samples(
    config: Config, response: str | None, response_key: str | None, most: int
) -> list[Sample]:
    """Make one completed sample per row, as a reward function sees it in a run.

    Raises:
        UserError: some rows cannot be scored; the error counts them all.
    """
    check_label_key(config)
    form = RowFormat.of(config)
    if config.reward.custom_rm_path:
        judge = None
    else:
        judge = RewardJudge(config.reward.rm_type, config.reward.rm_url)
    assert config.data.prompt_data is not None
    found: list[Sample] = []
    problems = Problems()
    number = 0
    for number, (where, row) in enumerate(
        itertools.islice(iter_rows(config.data.prompt_data), most), 1
    ):
        try:
            prompt = read_prompt(row, form, None)
            if response_key is not None and response_key not in row:
                raise missing_key(response_key, "--response-key", row)
        except RowProblem as problem:
            problems.add(where, problem)
            continue
        for judged in judge([prompt])[0] if judge is not None else ():
            problems.add(where, judged)
        text = response or "" if response_key is None else _response_text(row, response_key)
        found.append(
            Sample(
                group_index=number - 1,
                index=number - 1,
                prompt=prompt.text,
                response=text,
                response_length=len(text.split()),
                label=prompt.label,
                metadata=prompt.metadata,
                status=SampleStatus.COMPLETED,
            )
        )
    if problems.found:
        raise problems.error(config.data.prompt_data, number)
    return found


def _response_text(row: dict[str, Any], key: str) -> str:
    """Return the response of a row; a number becomes text exactly as it is written in the data."""
    text = label_text(written(row, key))
    return "" if text is None else str(text)


async def _score(config: Config, samples: list[Sample]) -> tuple[list[Any], dict[str, float]]:
    pool = RewardPool(config, standalone=True)
    try:
        if config.reward.group_rm:
            rewards = await pool.score_group(samples)
        else:
            rewards = await _score_each(pool, samples)
        return rewards, pool.metrics()
    finally:
        await pool.close()


async def _score_each(pool: RewardPool, samples: list[Sample]) -> list[Any]:
    """Score all samples. On the first failure, cancel the others before the pool's workers end:
    a pending call would report the end of its worker as a crash."""
    tasks = [asyncio.ensure_future(pool.score(sample)) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(
    samples: list[Sample],
    rewards: list[Any],
    metrics: dict[str, float],
    seconds: float,
    key: str | None,
) -> None:
    for sample, reward in zip(samples, rewards):
        print(f"{reward!s:>8}  label {sample.label!r:.40}  response {sample.response[-60:]!r}")
    numbers = [reward[key] if isinstance(reward, dict) and key else reward for reward in rewards]
    if numbers:
        spread = f"min {min(numbers):g}, max {max(numbers):g}, {len(set(numbers))} different values"
        print(
            f"{len(numbers)} rows: mean {statistics.fmean(numbers):.4f}, {spread}, {seconds:.2f} s"
        )
    for name, count in metrics.items():
        if count:
            print(f"{name}: {count:.0f}", file=sys.stderr)
