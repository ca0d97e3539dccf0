"""The example of several turns with a tool, in front of an engine that plays the model."""

from __future__ import annotations

import contextvars

import pytest

from examples.search.rollout import generate, reward, search
from slime.errors import UserError
from slime.rollout.generate import GenerateState, append_message, bind_state
from slime.samples.types import Sample, SampleStatus
from tests.support.embedded_models import byte_tokenizer
from tests.support.fake_rollout import FakeClient, hook_args, make_state
from tests.support.scripted_model import ScriptedModel, conversation, play, trained

QUESTION = "<|im_start|>user\nHow high is the Zugspitze?<|im_end|>\n<|im_start|>assistant\n"


def ask(model: ScriptedModel, room: int = 400) -> Sample:
    sample = play(generate, model, Sample(index=0, prompt=QUESTION, label="2962"), room)
    assert all(
        c["params"]["skip_special_tokens"] and c["params"]["stop"] == ["</search>"]
        for c in model.calls
    )
    return sample


def append(state: GenerateState, sample: Sample) -> None:
    def in_a_rollout() -> None:
        bind_state(state)
        append_message(sample, {"role": "tool", "content": "b"})

    contextvars.copy_context().run(in_a_rollout)


def test_two_turns_are_a_chat_as_the_template_writes_it() -> None:
    sample = ask(ScriptedModel("<search>zugspitze</search>", "2962<|im_end|>"))
    tool = "<|im_start|>tool\nThe Zugspitze is 2962 m high.<|im_end|>\n"
    assert conversation(sample) == (
        QUESTION
        + "<search>zugspitze</search><|im_end|>\n"
        + tool
        + "<|im_start|>assistant\n2962<|im_end|>"
    )
    assert sample.response == "<search>zugspitze</search>\nThe Zugspitze is 2962 m high.\n2962"
    assert trained(sample) == "<search>zugspitze</search>2962<|im_end|>"
    assert reward(None, sample) == 1.0
    sample.validate()


def test_a_model_that_asks_for_nothing_speaks_once() -> None:
    model = ScriptedModel("2962<|im_end|>")
    assert ask(model).response == "2962" and len(model.calls) == 1


def test_an_answer_is_what_the_model_says_and_not_the_tool() -> None:
    sample = ask(ScriptedModel("<search>zugspitze</search>", "<|im_end|>"))
    sample.label = "The Zugspitze is 2962 m high."
    assert sample.response.strip().endswith(sample.label) and reward(None, sample) == 0.0


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("how high is Mont Blanc", "Mont Blanc is 4806 m high."),
        ("Kilimanjaro!", "Kilimanjaro is 5895 m high."),
        ("", "Nothing was found."),
    ],
)
def test_the_corpus(query: str, found: str) -> None:
    assert search(query) == found


def test_searches_end() -> None:
    model = ScriptedModel(*["<search>k2</search>"] * 9)
    sample = ask(model)
    assert (
        len(model.calls) == 4
        and sample.response.count("Nothing was found.") == 3
        and reward(None, sample) == 0.0
    )


@pytest.mark.parametrize("room", [10, 26, 60, 90])
def test_a_sample_without_room_is_truncated(room: int) -> None:
    sample = ask(ScriptedModel(*["<search>zugspitze</search>"] * 4), room)
    assert sample.status is SampleStatus.TRUNCATED
    sample.validate()


def test_what_is_aborted_comes_back_at_once() -> None:
    model = ScriptedModel("<search>zugspitze</search>", reason="length")
    assert ask(model).status is SampleStatus.TRUNCATED and len(model.calls) == 1


def test_a_model_that_has_ended_its_turn_gets_no_second_end() -> None:
    state = make_state(FakeClient(), args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = byte_tokenizer()
    sample = Sample(prompt="", tokens=[])
    sample.append_response_tokens(
        tokens=state.tokenizer.encode("a<|im_end|>"), log_probs=[-1.0, -1.0], text="a"
    )
    append(state, sample)
    assert (
        conversation(sample)
        == "a<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.response == "a\nb\n" and sum(sample.loss_mask or []) == 2


def test_a_template_that_knows_no_tools_says_so() -> None:
    state = make_state(FakeClient(), args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = byte_tokenizer()
    state.tokenizer.chat_template = (
        "{{ raise_exception('only user and assistant') if messages[-1].role == 'tool' }}"
    )
    with pytest.raises(UserError, match="only user and assistant"):
        append(state, Sample())
