"""Plugin authors test their functions without a run, as they do with the reference system."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from slime.utils.data import filter_long_prompt
from slime.utils.types import Sample

from slime.rollout import sglang_rollout
from tests.support.prompt_fixtures import make_tokenizer

PARAMS = {"temperature": 1.0, "max_new_tokens": 8}


class Callable_:
    """A tokenizer that can only be called."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


class Encoding:
    """A tokenizer that can only encode."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]


def run_args(**flags: Any) -> Namespace:
    return Namespace(
        sglang_router_ip="127.0.0.1", sglang_router_port=30000, partial_rollout=False, **flags
    )


def patched(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, aborted: bool = False) -> Namespace:
    """A state of the author's own in the place of GenerateState."""
    state = Namespace(
        tokenizer=tokenizer, processor=None, semaphore=asyncio.Semaphore(2), aborted=aborted
    )
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    return state


async def engine(url: str, payload: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    assert url == "http://127.0.0.1:30000/generate" and payload["return_logprob"]
    pairs = [[-0.5, token + 1] for token in payload["input_ids"][:3]]
    return {
        "text": "abc",
        "meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": "stop"}},
    }


async def shout(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    sample.response = sample.prompt.upper() + ("!" if evaluation else "")
    return sample


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return [Sample(prompt=sample.prompt, response=part) for part in ("a", "bb")]


async def length(args: Any, sample: Any, **kwargs: Any) -> Any:
    if isinstance(sample, list):
        return [float(len(one.response)) for one in sample]
    return float(len(sample.response))


def here(name: str) -> str:
    return f"{__name__}.{name}"


@pytest.mark.parametrize(
    "tokenizer", [Callable_(), Encoding(), make_tokenizer()], ids=["called", "encodes", "whole"]
)
def test_the_built_in_function_with_a_patched_state_and_post(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    patched(monkeypatch, tokenizer)
    monkeypatch.setattr(sglang_rollout, "post", engine)
    sample = asyncio.run(generate(run_args(), Sample(prompt="hello"), PARAMS))
    assert sample.response_length == 3 and sample.rollout_log_probs == [-0.5] * 3
    assert (
        sample.tokens[-3:] == [token + 1 for token in sample.tokens[:3]]
        and sample.response == "abc"
    )
    assert sample.status == Sample.Status.COMPLETED and sample.loss_mask == [1, 1, 1]


def test_generate_and_rm_calls_the_authors_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, Encoding())
    args = run_args(custom_generate_function_path=here("shout"), custom_rm_path=here("length"))
    sample = asyncio.run(generate_and_rm(args, Sample(prompt="hi"), PARAMS))
    assert isinstance(sample, Sample) and (sample.response, sample.reward) == ("HI", 2.0)
    evaluated = asyncio.run(generate_and_rm(args, Sample(prompt="hi"), PARAMS, evaluation=True))
    assert isinstance(evaluated, Sample) and evaluated.reward == 3.0


def test_a_fan_out_is_scored_together_and_a_group_rm_later(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, Encoding())
    args = run_args(custom_generate_function_path=here("fan_out"), custom_rm_path=here("length"))
    parts = asyncio.run(generate_and_rm(args, Sample(prompt="hi"), PARAMS))
    assert isinstance(parts, list) and [part.reward for part in parts] == [1.0, 2.0]
    args.custom_generate_function_path, args.group_rm = here("shout"), True
    unscored = asyncio.run(generate_and_rm(args, Sample(prompt="hi"), PARAMS))
    assert isinstance(unscored, Sample) and unscored.reward is None
    group = asyncio.run(
        generate_and_rm_group(args, [Sample(prompt="x"), Sample(prompt="yy")], PARAMS)
    )
    assert [sample.reward for sample in group] == [1.0, 2.0]


def test_after_an_abort_samples_come_back_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, Encoding(), aborted=True)
    args = run_args(custom_generate_function_path=here("shout"))
    sample = asyncio.run(generate_and_rm(args, Sample(prompt="hi"), PARAMS))
    assert (
        isinstance(sample, Sample)
        and sample.status == Sample.Status.ABORTED
        and sample.response == ""
    )


def test_the_state_is_made_of_the_flags(tmp_path: Any) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    args = Namespace(
        hf_checkpoint=str(tmp_path),
        rollout_temperature=0.7,
        rollout_num_gpus=4,
        sglang_server_concurrency=3,
    )
    state = GenerateState(args)
    assert state is GenerateState(args) and state is not GenerateState(Namespace())
    assert state.sampling_params["temperature"] == 0.7 and state.semaphore._value == 12
    assert state.tokenizer.encode("hi") == make_tokenizer().encode("hi")
    assert (state.pendings, state.remaining_batch_size, state.aborted) == (set(), 0, False)


@pytest.mark.parametrize("tokenizer", [Callable_(), Encoding()], ids=["called", "encodes"])
def test_stub_tokenizers_measure_prompts(tokenizer: Any) -> None:
    samples = [Sample(prompt="hi"), Sample(prompt="hello")]
    assert filter_long_prompt(samples, tokenizer, None, 3) == samples[:1]
    assert DynamicFilterOutput(keep=True).keep
