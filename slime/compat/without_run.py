"""The reference system's generate functions without a run, for unit tests of plugins.

Names are looked up in ``slime.rollout.sglang_rollout`` at each call: a test may replace
``GenerateState``, ``generate``, ``post``, ``async_rm`` or ``batched_async_rm`` there.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from typing import Any

from slime.config.flags import all_flags
from slime.errors import UserError
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.generate import sampling_params as engine_params
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import load_function

_OLD = "slime.rollout.sglang_rollout"


class LoneState:
    """``GenerateState(args)`` without a run; ``args`` is a namespace with some of the flags.

    Attributes:
        tokenizer: of ``args.hf_checkpoint``; None without it.
        semaphore: limits concurrent requests to what the engines of ``args`` accept.
        sampling_params: for training rollouts.
        pendings, remaining_batch_size, aborted: for the plugin's own bookkeeping; see `reset`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        checkpoint = _flag(args, "hf_checkpoint")
        self.tokenizer = load_tokenizer(checkpoint) if checkpoint else None
        self.processor = None
        engines = (_flag(args, "rollout_num_gpus") or 1) // (
            _flag(args, "rollout_num_gpus_per_engine") or 1
        )
        self.semaphore = asyncio.Semaphore(
            _flag(args, "sglang_server_concurrency") * max(1, engines)
        )
        self.sampling_params = engine_params(
            temperature=_flag(args, "rollout_temperature"),
            top_p=_flag(args, "rollout_top_p"),
            top_k=_flag(args, "rollout_top_k"),
            min_p=_flag(args, "rollout_min_p"),
            max_new_tokens=_flag(args, "rollout_max_response_len"),
            stop=tuple(_flag(args, "rollout_stop") or ()),
            stop_token_ids=tuple(_flag(args, "rollout_stop_token_ids") or ()),
            skip_special_tokens=bool(_flag(args, "rollout_skip_special_tokens")),
        )
        self.dp_rank = 0
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first task."""
        self.pendings: set[asyncio.Task[Any]] = set()
        self.remaining_batch_size = 0
        self.aborted = False


def _flag(args: Any, name: str) -> Any:
    """Return the value in ``args``, else the flag's default."""
    value = getattr(args, name, None)
    return all_flags()[name].default if value is None else value


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without added special tokens; the tokenizer has ``encode`` or is
    callable."""
    if hasattr(tokenizer, "encode"):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Send one request to the router of ``args``, and append the answer to the sample."""
    old = importlib.import_module(_OLD)
    state = old.GenerateState(args)
    if not sample.tokens:
        if not isinstance(sample.prompt, str):
            raise UserError(
                "the prompt is no text",
                fix="render messages first, with --apply-chat-template in a run",
            )
        sample.tokens = token_ids(state.tokenizer, sample.prompt)
    params = dict(sampling_params)
    if sample.response_length:
        params["max_new_tokens"] = params["max_new_tokens"] - sample.response_length
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    output = await old.post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload
    )
    meta = output["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=meta,
        text=output.get("text", ""),
    )
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample, and apply sample hooks and reward; a list if the generate function
    fanned out. With ``group_rm`` in ``args`` no reward is computed."""
    old = importlib.import_module(_OLD)
    state = old.GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = SampleStatus.ABORTED
            return sample
        result = await _generated(args, sample, sampling_params, evaluation)
    result = await importlib.import_module("slime.rollout.sample_hooks").apply_rollout_sample_hooks(
        args, result, evaluation=evaluation
    )
    if getattr(args, "group_rm", False):
        return result
    if isinstance(result, list):
        unscored = [one for one in result if one.reward is None]
        for one, reward in zip(unscored, await old.batched_async_rm(args, unscored), strict=True):
            one.reward = reward
    elif result.reward is None and result.status != SampleStatus.ABORTED:
        result.reward = await old.async_rm(args, result)
    return result


async def _generated(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    path = sample.generate_function_path or getattr(args, "custom_generate_function_path", None)
    if not path:
        return await importlib.import_module(_OLD).generate(args, sample, sampling_params)
    function = load_function(path)
    takes = "evaluation" in inspect.signature(function).parameters
    return await function(
        args, sample, sampling_params, **({"evaluation": evaluation} if takes else {})
    )


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate a group's samples concurrently; with ``args.group_rm`` score them together."""
    old = importlib.import_module(_OLD)
    if old.GenerateState(args).aborted:
        return group
    tasks = [
        old.generate_and_rm(args, sample, sampling_params, evaluation=evaluation)
        for sample in group
    ]
    done = list(await asyncio.gather(*tasks))
    if getattr(args, "group_rm", False):
        leaves = [sample for one in done for sample in (one if isinstance(one, list) else [one])]
        for sample, reward in zip(leaves, await old.batched_async_rm(args, leaves), strict=True):
            sample.reward = reward
    return done
