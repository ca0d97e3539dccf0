"""The example of several turns with a tool, in front of an engine that plays the model."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from examples.search_tool import generate, reward
from slime.engines.api import GenerateResult
from slime.errors import UserError
from slime.rollout.generate import GenerateState, append_message, bind_state
from slime.samples.types import Sample, SampleStatus
from tests.support.embedded_models import byte_tokenizer
from tests.support.fake_rollout import FakeClient, hook_args, make_state

QUESTION = "<|im_start|>user\nHow high is the Zugspitze?<|im_end|>\n<|im_start|>assistant\n"


class Model(FakeClient):
    """Says one line after another; what it says ends with the stop string, or with the end of the turn."""

    def __init__(self, *lines: str, reason: str = "stop") -> None:
        super().__init__()
        self.lines, self.reason = list(lines), reason
        self.tokenizer: Any = byte_tokenizer()

    async def _answer(self, number: int, input_ids: list[int], params: dict[str, Any]) -> GenerateResult:
        line = self.lines[number]
        assert params["skip_special_tokens"] and params["stop"] == ["</search>"]
        tokens = self.tokenizer.encode(line)[: params["max_new_tokens"]]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = self.reason if len(tokens) == len(self.tokenizer.encode(line)) else "length"
        return GenerateResult(tokens, [-0.5] * len(tokens), text, reason, {"finish_reason": {"type": reason}})


def play(model: Model, room: int = 400) -> Sample:
    state = make_state(model, max_new_tokens=room, args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = model.tokenizer
    state.sampling_params["skip_special_tokens"] = True
    sample = Sample(index=0, prompt=QUESTION, label="2962")

    async def run() -> Sample:
        bind_state(state)
        return await generate(state.args, sample, state.params_for(sample))

    return asyncio.run(run())


def append(state: GenerateState, sample: Sample) -> None:
    def in_a_rollout() -> None:
        bind_state(state)
        append_message(sample, {"role": "tool", "content": "b"})

    contextvars.copy_context().run(in_a_rollout)


def conversation(sample: Sample) -> str:
    return byte_tokenizer().decode(sample.tokens)


def trained(sample: Sample) -> str:
    response = sample.tokens[sample.prompt_length :]
    return byte_tokenizer().decode([t for t, m in zip(response, sample.loss_mask or []) if m])


def test_two_turns_are_a_chat_as_the_template_writes_it() -> None:
    sample = play(Model("<search>zugspitze</search>", "2962<|im_end|>"))
    tool = "<|im_start|>tool\nThe Zugspitze is 2962 m high.<|im_end|>\n"
    assert conversation(sample) == (
        QUESTION + "<search>zugspitze</search><|im_end|>\n" + tool + "<|im_start|>assistant\n2962<|im_end|>"
    )
    assert sample.response == "<search>zugspitze</search>\nThe Zugspitze is 2962 m high.\n2962"
    assert trained(sample) == "<search>zugspitze</search>2962<|im_end|>"
    assert reward(None, sample) == 1.0
    sample.validate()


def test_a_model_that_asks_for_nothing_speaks_once() -> None:
    model = Model("2962<|im_end|>")
    assert play(model).response == "2962" and len(model.calls) == 1


def test_searches_end() -> None:
    model = Model(*["<search>k2</search>"] * 9)
    sample = play(model)
    assert len(model.calls) == 4 and sample.response.count("Nothing was found.") == 3 and reward(None, sample) == 0.0


@pytest.mark.parametrize("room", [10, 26, 60, 90])
def test_a_sample_without_room_is_truncated(room: int) -> None:
    sample = play(Model(*["<search>zugspitze</search>"] * 4), room)
    assert sample.status is SampleStatus.TRUNCATED
    sample.validate()


def test_what_is_aborted_comes_back_at_once() -> None:
    model = Model("<search>zugspitze</search>", reason="length")
    assert play(model).status is SampleStatus.TRUNCATED and len(model.calls) == 1


def test_a_model_that_has_ended_its_turn_gets_no_second_end() -> None:
    state = make_state(FakeClient(), args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = byte_tokenizer()
    sample = Sample(prompt="", tokens=[])
    sample.append_response_tokens(tokens=state.tokenizer.encode("a<|im_end|>"), log_probs=[-1.0, -1.0], text="a")
    append(state, sample)
    assert conversation(sample) == "a<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n"
    assert sample.response == "a\nb\n" and sum(sample.loss_mask or []) == 2


def test_a_template_that_knows_no_tools_says_so() -> None:
    state = make_state(FakeClient(), args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = byte_tokenizer()
    state.tokenizer.chat_template = "{{ raise_exception('only user and assistant') if messages[-1].role == 'tool' }}"
    with pytest.raises(UserError, match="only user and assistant"):
        append(state, Sample())
