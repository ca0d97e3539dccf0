"""What users' functions call of the rollout they run in: HTTP, rewards, the supervised rollout.

These are the functions behind `slime.legacy_paths`; new code may call them as well. ``post`` goes through the rollout's
client, so it is counted as in flight and retried; while a rollout ends, the policy is not asked any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any
from urllib.parse import urlsplit

from slime.errors import UserError
from slime.hooks import DataSource, RolloutFnTrainOutput
from slime.rollout.continued import answered
from slime.rollout.generate import current_state
from slime.rollout.group_run import GroupRun
from slime.rollout.loop import current_loop
from slime.rollout.sft import generate_sft
from slime.samples.types import Sample

_ABORTED_META = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}


async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    action: str = "post",
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """POST JSON and return the decoded answer.

    While an abort is under way, what is meant for the policy's router or engines is not sent and gets the empty "abort"
    answer of ``/generate``; judges, tools and other models answer as ever. An answer that a push of weights cuts short
    is completed (`slime.rollout.continued`).

    Args:
        max_retries: 0 or 1 for a single try; otherwise the rollout's own retry rules hold.
        action: "post"; the only one that is supported.
    Raises:
        RequestRefused: HTTP 4xx.
        EngineError: failing after all retries, or no answer within the deadline.
    """
    if action != "post":
        raise UserError(f"http action {action!r} is not supported", fix="use 'post', or get()")
    origin, path = _split(url)
    state = current_state()

    async def send(body: dict[str, Any]) -> Any:
        return await state.client.post(path, body, url=origin, headers=headers, retry=max_retries > 1)

    def count() -> None:
        state.counts["continued"] += 1

    whole: dict[str, Any] = {"tokenizer": state.tokenizer, "most_tokens": state.request_tokens}
    whole["end_tokens"] = state.end_tokens
    answer = await answered(send, payload, lambda: state.aborted, count, **whole)
    return {"text": "", "output_ids": [], "meta_info": dict(_ABORTED_META)} if answer is None else answer


async def get(url: str) -> dict[str, Any]:
    """GET and return the decoded answer; not retried.

    Raises:
        EngineError: no answer within the deadline, or HTTP status >= 400.
    """
    origin, path = _split(url)
    return await (await current_state().client.engine(origin)).get(path)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Where a model of --sglang-config answers; the policy alone is called "policy" without such a file.

    Raises:
        UserError: there is no such model.
    """
    routers = args.sglang_model_routers
    if model_name not in routers:
        raise UserError(f"this run has no model '{model_name}'", fix=f"its models are: {', '.join(routers)}")
    host, port = routers[model_name]
    return f"http://{host}:{port}{endpoint}"


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", url[len(parts.scheme) + 3 + len(parts.netloc) :] or "/"


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One sample through generate function, sample hooks and reward; a list when it fanned out.

    Raises:
        Exception: whatever the sample failed of.
    """
    samples = await generate_and_rm_group(args, [sample], sampling_params, evaluation)
    return samples[0] if len(samples) == 1 else samples


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """The samples of one group through generate function, sample hooks and rewards; flat, also after a fan-out.

    Raises:
        Exception: whatever the first failing sample failed of.
    """
    state = dataclasses.replace(current_state(), args=args, sampling_params=sampling_params)
    group_rm = args.group_rm and not evaluation
    loop = current_loop()
    runner = loop.make_runner(state, loop.rewards, rollout_id=None, evaluation=evaluation, group_rm=group_rm)
    run = GroupRun.of(group)
    await asyncio.create_task(runner.run(run))  # in a task of its own: it binds a state, and the caller keeps his
    if run.failure is not None:
        raise run.failure
    return run.samples


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, Any]:
    """The reward of one sample by the run's reward function."""
    return await current_loop().rewards.score(sample)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[float | dict[str, Any]]:
    """The rewards of samples that are scored together."""
    return await current_loop().rewards.score_group(samples)


def generate_sft_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """The supervised rollout under the rollout function contract."""
    if evaluation:
        raise UserError("supervised fine-tuning has no rollout for evaluation", fix="pass --eval-function-path")
    loop = current_loop()
    return generate_sft(loop.config, data_source, loop.tokenizer)
