"""Rollout functions that user code may call: HTTP, rewards, the supervised rollout.

`slime.compat.import_paths` maps old import paths to them; new code may call them as well. ``post``
uses the rollout's client, so requests count as in flight and are retried; while a rollout ends, no
request reaches the policy. User code may call all of them from its own threads and event loops: the
work is done on the run's event loop. ``args`` need not be the run's: flags that they lack are those
of the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slime.config.make import make_config
from slime.engines.api import EngineClient
from slime.engines.client import RolloutClient, loses_fields
from slime.errors import UserError
from slime.rollout.generate import current_state, is_in_run
from slime.rollout.loop import current_loop
from slime.rollout.resumed_requests import answered
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.sft import generate_sft
from slime.rollout.trajectory import GroupRun
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput

T = TypeVar("T")

_ABORTED_META = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}


def on_the_runs_loop(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wrap ``function`` to be awaited on any event loop of this process; it runs on the run's
    loop."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> T:
        loop = current_state().loop if is_in_run() else None
        if loop is None or loop is asyncio.get_running_loop():
            return await function(*args, **kwargs)

        async def there() -> T:
            return await function(*args, **kwargs)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), loop))

    return call


@on_the_runs_loop
async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    action: str = "post",
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """POST JSON and return the decoded answer.

    During an abort, requests to the policy's router or engines are not sent and get the empty
    "abort" answer of ``/generate``; judges, tools and other models answer as usual. An answer that
    a weight push aborts is completed (`slime.rollout.resumed_requests`). A ``/generate`` request
    with fields that the router would drop (e.g. ``return_sampling_mask``) is sent to an engine
    directly.

    Args:
        max_retries: 0 or 1 for a single attempt; otherwise the rollout's own retry rules hold.
        action: "post"; the only one that is supported.
    Raises:
        RequestRefused: HTTP 4xx.
        EngineError: all retries failed, or no answer came within the deadline.
    """
    if action != "post":
        raise UserError(f"http action {action!r} is not supported", fix="use 'post', or get()")
    origin, path = _split(url)
    if not is_in_run():
        async with RolloutClient(origin, max_concurrency=1) as client:
            return await client.post(path, payload, headers=headers, retry=max_retries > 1) or {}
    state = current_state()

    asks_router = path == "/generate" and origin == state.client.base_url

    async def send(body: dict[str, Any]) -> Any:
        return await state.client.post(
            path,
            body,
            url=origin,
            headers=headers,
            retry=max_retries > 1,
            past_router=asks_router and loses_fields(body),
        )

    answer = await answered(
        send,
        payload,
        lambda: state.aborted,
        lambda: state.counts.update(["continued"]),
        tokenizer=state.tokenizer,
        most_tokens=state.request_tokens,
        end_tokens=state.end_tokens,
    )
    if answer is None:
        return {"text": "", "output_ids": [], "meta_info": dict(_ABORTED_META)}
    return answer


@on_the_runs_loop
async def get(url: str) -> dict[str, Any]:
    """GET and return the decoded answer; not retried.

    Raises:
        EngineError: no answer within the deadline, or HTTP status >= 400.
    """
    origin, path = _split(url)
    if not is_in_run():
        async with EngineClient(origin) as engine:
            return await engine.get(path)
    return await (await current_state().client.engine(origin)).get(path)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of a model of --sglang-config. Without such a file the only model is called
    "policy".

    Raises:
        UserError: there is no such model.
    """
    routers = getattr(args, "sglang_model_routers", None)
    if not routers and not is_in_run():
        return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"
    routers = routers or current_state().args.sglang_model_routers
    if model_name not in routers:
        raise UserError(
            f"this run has no model '{model_name}'", fix=f"its models are: {', '.join(routers)}"
        )
    host, port = routers[model_name]
    return f"http://{host}:{port}{endpoint}"


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    origin = f"{parts.scheme}://{parts.netloc}"
    return origin, url[len(origin) :] or "/"


@on_the_runs_loop
async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Run the generate function, sample hooks and reward for one sample; returns a list if it fans
    out. With ``--group-rm`` it returns without a reward.

    Raises:
        Exception: the sample's failure.
    """
    (result,) = await _run_group(args, [sample], sampling_params, evaluation, ("group", "sample"))
    return result


@on_the_runs_loop
async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Run the generate function, sample hooks and rewards for one group. Returns each sample, or
    the list that it fanned out into. After `slime.rollout.sglang_rollout.abort` the group returns
    unchanged.

    Raises:
        Exception: the failure of the first sample that failed.
    """
    state = vars(current_loop()).get("plugin_state")
    if state is not None and state.aborted:
        return group
    return await _run_group(args, group, sampling_params, evaluation, ("group",))


async def _run_group(
    args: Any,
    group: list[Sample],
    sampling_params: dict[str, Any],
    evaluation: bool,
    called_by_plugin: tuple[str, ...],
) -> list[Any]:
    """Run a group with the reward flags of ``args``; return each sample, or its fan-out.

    Args:
        called_by_plugin: see `GroupRunner`.
    """
    state = dataclasses.replace(current_state(), args=args, sampling_params=sampling_params)
    group_rm = bool(getattr(args, "group_rm", False)) and not evaluation
    loop = current_loop()
    rewards = None if group_rm and "sample" in called_by_plugin else loop.rewards.reading(args)
    runner = loop.make_runner(
        state,
        rewards,
        rollout_id=None,
        evaluation=evaluation,
        group_rm=group_rm,
        called_by_plugin=called_by_plugin,
    )
    run = GroupRun.of(group)
    # in a separate task: the state that the runner binds must not replace the caller's
    await asyncio.create_task(runner.run(run))
    if run.failure is not None:
        raise run.failure
    return [
        trajectory.samples if trajectory.fanned_out else trajectory.samples[0]
        for trajectory in run.trajectories
    ]


@on_the_runs_loop
async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, Any]:
    """Return the reward of one sample, from the reward function in ``args``, else from the
    run's."""
    return await _rewarded(args, lambda rewards: rewards.score_by_flags(sample))


@on_the_runs_loop
async def batched_async_rm(
    args: Any, samples: list[Sample], **kwargs: Any
) -> list[float | dict[str, Any]]:
    """Return the rewards of samples that are scored together."""
    return await _rewarded(args, lambda rewards: rewards.score_group_by_flags(samples))


async def _rewarded(args: Any, score: Callable[[RewardPool], Awaitable[T]]) -> T:
    if is_in_run():
        return await score(current_loop().rewards.reading(args))
    rewards = RewardPool(make_config(), args, standalone=True)
    try:
        return await score(rewards.reading(args))
    finally:
        await rewards.close()


def generate_sft_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Run the supervised rollout under the rollout function contract."""
    if evaluation:
        raise UserError(
            "supervised fine-tuning has no rollout for evaluation", fix="pass --eval-function-path"
        )
    loop = current_loop()
    return generate_sft(loop.config, data_source, loop.tokenizer)
