"""Hooks that tests name by path; each notes how it was called."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from typing import Any

import numpy as np

from slime.engines.client import RequestRefused
from slime.rollout.generate import append_message, current_state, generate
from slime.rollout.loop import generate_rollout_async
from slime.samples.types import Sample, SampleStatus
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput

calls: list[tuple[str, Any]] = []


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    sample.append_response_tokens(tokens=[50, 51], trainable=False, text="4")
    sampling_params["max_new_tokens"] = 14  # a change that no other sample may see
    return await generate(args, sample, sampling_params)


async def asked_twice(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    append_message(sample, {"role": "user", "content": "more"})
    return await generate(args, sample, sampling_params)


async def with_evaluation(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    calls.append(("generate", (sample.index, evaluation, dict(sampling_params))))
    return await generate(args, sample, sampling_params)


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    sample = await generate(args, sample, sampling_params)
    twin = copy.deepcopy(sample)
    twin.index = twin.group_index = None
    return [sample, twin]


async def plans_first(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A planner's sample with a prompt of its own, which is not trained on, before the answer."""
    calls.append(
        (
            "drawn",
            (
                list(sample.tokens),
                dict(sample.metadata),
                sample.remove_sample,
                sample.train_metadata,
            ),
        )
    )
    answer = await generate(args, sample, sampling_params)
    plan = copy.deepcopy(answer)
    plan.tokens = [42, 43, 44, *plan.tokens[-plan.response_length :]]
    plan.metadata, plan.train_metadata, plan.remove_sample = (
        {"turns": ["plan"]},
        {"weight": 0},
        True,
    )
    return [plan, answer]


async def fan_out_with_different_ids(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> list[Sample]:
    samples = await fan_out(args, sample, sampling_params)
    samples[0].rollout_id, samples[1].rollout_id = 1, 2
    return samples


async def stumbles_over_an_abort(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """As a function that posts to a chat route and finds no "choices" in the answer."""
    await generate(args, sample, sampling_params)
    sample.loss_mask = []
    await current_state().client.wait_for_abort()
    raise KeyError("choices")


async def runs_out_of_room(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Its own request for a second turn is refused by the engine."""
    sample = await generate(args, sample, sampling_params)
    sample.append_response_tokens(tokens=[50, 51], trainable=False, text="4")
    raise RequestRefused(
        "http://engine-0", "The input is longer than the model's context length (64 tokens).", 400
    )


async def runs_out_of_room_half_built(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    sample.tokens = [*sample.tokens, 50, 51]
    raise RequestRefused("http://engine-0", "the context holds 64 tokens", 400)


async def is_refused(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise RequestRefused("http://engine-0", "stop must be a list", 400)


async def from_text(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return Sample(prompt="ab", response="cde")


async def with_mask_over_all_tokens(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [0, 0, *([1] * sample.response_length)]
    return sample


async def with_wrong_mask(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1] * (sample.response_length + 5)
    return sample


async def gives_up(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = SampleStatus.FAILED
    return sample


async def raises(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise OSError("the sandbox is gone")


async def returns_nothing(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
    return None


def not_async(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return copy.copy(sample)  # what that gives, a call alone can tell


async def through_the_old_paths(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """A generate function as existing plugins have them."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample as OldSample

    assert OldSample is Sample
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    output = await post(
        url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    )
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = ids + [pair[1] for pair in pairs]
    sample.response_length, sample.response = len(pairs), output["text"]
    sample.rollout_log_probs = [pair[0] for pair in pairs]
    sample.status = Sample.Status.COMPLETED
    return sample


let_go = threading.Event()


async def first_sample_only(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample 0 is generated; the others wait for `let_go`, whoever cancels them."""
    while sample.index and not let_go.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)
    return await generate(args, sample, sampling_params)


# -- sample hooks ----------------------------------------------------------------------------------


def note_sample(args: Any, sample: Sample) -> None:
    calls.append(("note_sample", (sample.index, sample.reward)))


async def replace_sample(
    args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False
) -> Sample:
    calls.append(("replace_sample", (sample.index, rollout_id, evaluation)))
    sample.metadata["hooked"] = True
    return sample


def text_of_sample(args: Any, sample: Sample) -> str:
    return sample.response


# -- hooks of the loop -----------------------------------------------------------------------------


def drop_odd(args: Any, samples: list[Sample], **kwargs: Any) -> bool:
    calls.append(("drop_odd", [sample.index for sample in samples]))
    return samples[0].group_index is not None and samples[0].group_index % 2 == 0


def remove_first(args: Any, groups: list[list[Sample]]) -> None:
    calls.append(("remove_first", [[sample.index for sample in group] for group in groups]))
    groups[0][0].remove_sample = True


def see_all(args: Any, all_groups: list[list[Sample]], data_source: Any) -> None:
    calls.append(("see_all", ([[s.index for s in group] for group in all_groups], data_source)))


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], extra: dict[str, Any], seconds: float
) -> bool:
    calls.append(("log_rollout", (rollout_id, len(samples), sorted(extra), seconds >= 0)))
    return True


def log_as_plugins_do(
    rollout_id: int, args: Any, samples: list[Sample], extra: dict[str, Any], seconds: float
) -> bool:
    from slime.utils import logging_utils, metric_utils

    own = metric_utils.dict_add_prefix(
        metric_utils.compute_statistics([s.reward for s in samples]), "mine/reward_"
    )
    own |= {
        "rollout/step": metric_utils.compute_rollout_step(args, rollout_id),
        "mine/name": "no number",
    }
    logging_utils.log(args, own, step_key="rollout/step")
    return True


async def logs_while_it_generates(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    from slime.utils.tracking_utils import log

    logged = current_state().logged
    log(args, {"mine/answers": logged.get("mine/answers", 0) + 1}, step_key="rollout/step")
    return await generate(args, sample, sampling_params)


def log_eval_as_plugins_do(
    rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, Any]
) -> bool:
    from slime.utils import tracking_utils

    tracking_utils.log(
        args, {"eval/step": rollout_id, "eval/mine": np.float32(0.5)}, step_key="eval/step"
    )
    return False


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, Any]) -> bool:
    calls.append(("log_eval", (rollout_id, sorted(data))))
    return True


def sync_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Calls the built-in one from a thread, as plugins that post-process rollouts do."""
    from slime.rollout.sglang_rollout import generate_rollout

    calls.append(("sync_rollout", (rollout_id, evaluation)))
    output = generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    output.metrics["rollout/from_plugin"] = 1.0
    return output


async def rollout_after_a_trial(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """Generates a sample with parameters of its own, then the batch, from a source of its own."""
    from slime.rollout.plugin_api import generate_and_rm

    trial = Sample(group_index=10**6, index=10**6, tokens=[9, 7], prompt="p")
    await generate_and_rm(args, trial, {"max_new_tokens": 1})
    calls.append(("params", current_state().sampling_params["max_new_tokens"]))
    return await generate_rollout_async(args, rollout_id, Renumbered(data_source), evaluation)


class Renumbered(DataSource):
    """Another source's prompts, with a first token that tells them apart."""

    def __init__(self, source: DataSource) -> None:
        self.source = source

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self.source.get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            sample.tokens[0] += 1000
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.source.add_samples(samples)


def evaluation_without_rewards(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    return {"own": {"scores": [0.5]}}


def evaluation_without_samples(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    return {"own": {"rewards": [0.5]}}


async def async_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """Its own loop, with bare lists as older functions return them; out of order."""
    if evaluation:
        return {"own": {"rewards": [0.5, 1.0], "truncated": [False, True], "samples": []}}
    groups = data_source.get_samples(args.rollout_batch_size)
    state = current_state(args)
    for group in groups:
        for sample in group:
            await generate(args, sample, state.params_for(sample))
            sample.reward = 1.0
    return groups[::-1]


async def rollout_with_metrics(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    return RolloutFnTrainOutput(
        await async_rollout(args, rollout_id, data_source), {"rollout/mine": 2.0}
    )


async def own_loop_on_old_paths(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """A rollout loop of a plugin's own, from the old building blocks."""
    from slime.rollout.rm_hub import async_rm
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_and_rm_group

    params = GenerateState(args).sampling_params
    first, *rest = data_source.get_samples(args.rollout_batch_size)
    groups = [
        await generate_and_rm_group(args, group, {**params, "sampling_seed": 1}) for group in rest
    ]
    groups.append(
        [await generate_and_rm(args, sample, {**params, "sampling_seed": 1}) for sample in first]
    )
    for group in groups:
        for sample in group:
            assert sample.reward == await async_rm(args, sample)
    return groups


def log_and_replace(
    rollout_id: int, args: Any, samples: Any, extra_metrics: Any, rollout_time: float
) -> bool:
    calls.append(("log", (rollout_id, samples, dict(extra_metrics))))
    return True


def log_beside(
    rollout_id: int, args: Any, samples: Any, extra_metrics: Any, rollout_time: float
) -> None:
    log_and_replace(rollout_id, args, samples, extra_metrics, rollout_time)
