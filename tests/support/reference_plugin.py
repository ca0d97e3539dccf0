"""A plugin as existing projects have it, imports and all: its own generate function over HTTP, a
reward from the hub, a filter, a data source and a rollout function around the built-in one."""

from __future__ import annotations

import logging
from typing import Any

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer, pop_first
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rm_hub import async_rm
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.types import Sample

from slime.rollout import sglang_rollout

logger = logging.getLogger(__name__)


class Counts(metaclass=SingletonMeta):
    def __init__(self) -> None:
        self.generated = 0


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload)
    if output["meta_info"]["finish_reason"]["type"] == "abort":
        sample.status = Sample.Status.ABORTED
        return sample
    pairs = [(item[1], item[0]) for item in output["meta_info"]["output_token_logprobs"]]
    sample.tokens = prompt_ids
    sample.append_response_tokens(
        args,
        tokens=[token for token, _ in pairs],
        log_probs=[log_prob for _, log_prob in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    Counts().generated += 1
    sample.metadata["number"] = Counts().generated
    return sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Words of the answer by the hub's function, and a little for different characters so that
    samples differ."""
    hub_args = type("HubArgs", (), {"custom_rm_path": None, "rm_type": "f1"})()
    score = await async_rm(hub_args, sample)
    assert score == f1_score(sample.response, sample.label)[0]
    return score + len(set(sample.tokens[-sample.response_length :])) / 100


def keep(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    verdict = check_reward_nonzero_std(args, samples)
    args.filtered = getattr(args, "filtered", 0) + (not verdict.keep)
    return verdict


class Source(RolloutDataSourceWithBuffer):
    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.update_metadata({"calls": 0})

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.metadata["calls"] += 1
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            sample.metadata["call"] = self.metadata["calls"]
        return groups


def take(
    args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    return pop_first(args, rollout_id, buffer, num_samples)


def rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    assert load_function("slime.rollout.sglang_rollout.generate_rollout") is generate_rollout
    output = sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
    metrics = {
        "rollout/plugin/generated": Counts().generated,
        "rollout/plugin/source_calls": data_source.get_metadata()["calls"],
        "rollout/plugin/filtered": getattr(args, "filtered", 0),
    }
    return RolloutFnTrainOutput(samples=output.samples, metrics={**output.metrics, **metrics})


def advantages(args: Any, rollout_data: Any) -> None:
    """In the trainer: as grpo, through the functions of earlier versions."""
    from slime.utils.ppo_utils import get_grpo_returns

    shapes = rollout_data["kl"] or rollout_data["log_probs"]
    rollout_data["advantages"] = get_grpo_returns(rollout_data["rewards"], shapes)
    rollout_data["returns"] = rollout_data["advantages"]
