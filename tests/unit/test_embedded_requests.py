"""What ``/generate`` accepts and refuses, and how text grows token by token."""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.embedded.engine import Engine, EngineDead, Hub
from slime.embedded.generate_request import RequestLimits, parse_generate
from slime.embedded.generate_routes import final_text
from slime.embedded.openai_request import parse_chat, parse_completion
from slime.embedded.sequence import Sequence, TextStream, find_stop, hold_back, trim_stop
from slime.embedded.server import end_tokens
from slime.engines.request_fields import BadRequest, SamplingParams, parse_params
from tests.support.embedded_models import EOS, VOCAB, byte_tokenizer, make_sequence, no_adapters

TOKENIZER = byte_tokenizer()


def limits(context: int = 64, **changes: Any) -> RequestLimits:
    fields = {
        "vocab_size": VOCAB,
        "context_length": context,
        "eos_token_ids": frozenset({EOS}),
        "tokenizer": TOKENIZER,
        "noise": random.Random(0),
        "adapters": no_adapters(),
    }
    return RequestLimits(**(fields | changes))


def test_tokens_without_an_output_end_no_answer() -> None:
    arch: Any = SimpleNamespace(
        eos_token_ids=[EOS, VOCAB, -1], spec=SimpleNamespace(vocab_size=VOCAB)
    )
    assert end_tokens(arch, SimpleNamespace(eos_token_id=VOCAB + 3)) == {EOS}
    assert end_tokens(arch, SimpleNamespace(eos_token_id=0)) == {0, EOS}


def test_one_prompt_is_one_answer_and_several_are_a_list() -> None:
    single = parse_generate({"input_ids": [1, 2]}, limits())
    assert single.is_single and len(single.jobs) == 1
    assert not parse_generate({"input_ids": [[1, 2]]}, limits()).is_single
    assert not parse_generate({"text": "hi", "sampling_params": {"n": 3}}, limits()).is_single
    batch = parse_generate(
        {
            "text": ["ab", "c"],
            "sampling_params": [{"n": 2, "max_new_tokens": 5}, {"n": 2, "max_new_tokens": 6}],
            "return_logprob": [True, False],
            "rid": ["x", "y"],
        },
        limits(),
    )
    assert [job.sequence.rid for job in batch.jobs] == ["x_0", "x_1", "y_0", "y_1"]
    assert [job.sequence.max_new_tokens for job in batch.jobs] == [5, 5, 6, 6]
    assert [job.return_logprob for job in batch.jobs] == [True, True, False, False]
    assert batch.jobs[0].sequence.prompt.tolist() == TOKENIZER.encode("ab")


def test_samples_of_one_seeded_request_differ_in_their_seed() -> None:
    jobs = parse_generate(
        {"input_ids": [1], "sampling_params": {"n": 3, "sampling_seed": 5}}, limits()
    ).jobs
    assert [job.sequence.seed for job in jobs] == [5, 6, 7]
    free = parse_generate({"input_ids": [1], "sampling_params": {"n": 3}}, limits()).jobs
    assert len({job.sequence.seed for job in free}) == 3


def test_new_tokens_are_capped_by_the_context() -> None:
    for wanted, expected in ((1000, 54), (54, 54), (7, 7), (None, 54)):
        body = {"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": wanted}}
        assert parse_generate(body, limits()).jobs[0].sequence.max_new_tokens == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the body must be an object"),
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [[1], []]}, "a prompt is empty"),
        ({"input_ids": [1, "2"]}, "'2'"),
        ({"input_ids": [1, VOCAB]}, f"0 to {VOCAB - 1}, the id of a token, got {VOCAB}"),
        ({"input_ids": [True]}, "got True"),
        ({"input_ids": [1] * 64}, "the prompt has 64 tokens, the context holds 64"),
        ({"text": 5}, "string"),
        ({"input_ids": [1], "sampling_param": {}}, "nearest: 'sampling_params'"),
        ({"input_ids": [1], "image_data": ["x"]}, "this engine serves text alone"),
        ({"input_ids": [1], "sampling_params": []}, "0 entries for 1 prompt"),
        ({"input_ids": [1], "sampling_params": 3}, "must be an object"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "nearest: 'temperature'"),
        (
            {"input_ids": [1], "sampling_params": {"temperature": -1}},
            "temperature must be a finite number of 0 (greedy)",
        ),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "finite number"),
        (
            {"input_ids": [1], "sampling_params": {"top_p": 0}},
            "top_p must be a finite number above 0",
        ),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be an integer: -1 (all)"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, "integer"),
        (
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
            "at most max_new_tokens",
        ),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": 7}}, "must be a list"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex is not supported"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be an integer from 1"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "twice"),
        (
            {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 3},
            "the prompt has 2 tokens",
        ),
    ],
)
def test_bad_requests_say_what_is_wrong(body: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_generate(body, limits())
    assert said in str(refused.value)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(BadRequest, match="no tokenizer"):
        parse_generate({"text": "a"}, limits(tokenizer=None))
    with pytest.raises(BadRequest, match="tokenizer"):
        parse_generate({"input_ids": [1], "sampling_params": {"stop": "x"}}, limits(tokenizer=None))


def test_a_stop_string_may_be_a_special_token_that_the_text_leaves_out() -> None:
    params = {
        "stop": ["<|im_end|>"],
        "skip_special_tokens": True,
        "max_new_tokens": 9,
        "ignore_eos": True,
    }
    (job,) = parse_generate({"input_ids": [1], "sampling_params": params}, limits()).jobs
    for token in TOKENIZER.encode("a<|im_end|>"):
        job.sequence.append(token, -1.0, "1")
    assert job.sequence.finish_reason == {"type": "stop", "matched": "<|im_end|>"}
    assert final_text(job, TOKENIZER) == "a"


def test_null_means_the_default() -> None:
    raw = {"temperature": None, "top_p": None, "stop": None, "regex": None, "custom_params": None}
    assert parse_params(raw, VOCAB) == parse_params(None, VOCAB)


@settings(max_examples=100)
@given(
    st.text(max_size=30),
    st.lists(st.integers(1, 5), max_size=40),
    st.lists(st.integers(0, 257), max_size=10),
)
def test_text_grows_to_the_whole(text: str, cuts: list[int], noise: list[int]) -> None:
    tokens = TOKENIZER.encode(text) + noise
    stream = TextStream(TOKENIZER, skip_special_tokens=True, spaces_between_special_tokens=True)
    shown = ""
    position = 0
    for cut in [*cuts, len(tokens)]:
        shown += stream.extend(tokens[position : position + cut])
        position += cut
        assert stream.text == shown
    shown += stream.finish()
    assert shown == stream.text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text("abE<", max_size=12), st.lists(st.text("abE<", min_size=1, max_size=4), max_size=3))
def test_nothing_is_shown_that_a_stop_string_may_take_back(text: str, stops: list[str]) -> None:
    """Whatever comes next, the text up to a stop string that is found then begins with what was
    shown."""
    shown = hold_back(text, tuple(stops))
    assert text.startswith(shown) and not any(stop in shown for stop in stops)
    for stop in stops:
        for cut in range(1, len(stop)):
            if text.endswith(stop[:cut]):
                assert len(shown) <= len(text) - cut
    begun = any(text.endswith(stop[:cut]) for stop in stops for cut in range(1, len(stop)))
    if not begun and not any(stop in text for stop in stops):
        assert shown == text


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
    )
)
def test_any_value_of_a_parameter_is_taken_or_refused_by_name(value: Any) -> None:
    for name in (field.name for field in fields(SamplingParams)):
        try:
            parse_params({name: value}, VOCAB)
        except BadRequest as refused:
            assert refused.field == name and name in str(refused)


def test_openai_refusals_name_the_field_as_it_was_written() -> None:
    for body, field, said in (
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be an integer of at least 0, got -1"),
        ({"seed": "x"}, "seed", "seed must be an integer, got 'x'"),
        ({"prompt": [1, VOCAB]}, "prompt", "prompt must be an integer from 0"),
        ({"regex": "a+"}, "regex", "does not support the field 'regex'"),
        ({"stops": ["a"]}, "stops", "unknown field 'stops'; nearest: 'stop'"),
    ):
        with pytest.raises(BadRequest) as refused:
            parse_completion({"prompt": [1], **body}, limits(), "m")
        assert refused.value.field == field and said in str(refused.value)


def test_openai_requests_are_generate_requests() -> None:
    body = {
        "prompt": ["ab", "c"],
        "n": 2,
        "seed": 7,
        "stop": "x",
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
    }
    parsed = parse_completion(body, limits(), "m")
    jobs = parsed.generate.jobs
    assert (
        [job.sequence.seed for job in jobs] == [7, 8, 7, 8]
        and parsed.generate.n == 2
        and parsed.model == "m"
    )
    assert all(
        job.sequence.max_new_tokens == 3 and job.sequence.num_top_logprobs == 2 for job in jobs
    )
    assert all(job.sequence.logprob_start == 0 for job in jobs) and jobs[0].sequence.rid.startswith(
        parsed.id
    )
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5,
        "tools": [],
        "temperature": None,
    }
    [job] = parse_chat(chat, limits(), TOKENIZER, "m").generate.jobs
    assert job.sequence.max_new_tokens == 5 and job.sequence.params.temperature == 1.0
    [free] = parse_chat({"messages": chat["messages"]}, limits(), TOKENIZER, "m").generate.jobs
    assert free.sequence.max_new_tokens == 64 - len(free.sequence.prompt)


def test_stop_strings() -> None:
    assert find_stop("a</answer>b", ("</answer>", "b"), 0) == (1, "</answer>")
    assert find_stop("abc", ("x",), 0) is None and find_stop("aba", ("a",), 1) == (2, "a")
    assert trim_stop("yes\nno", "\n", keep=False) == "yes"
    assert trim_stop("yes\nno", "\n", keep=True) == "yes\n"
    assert trim_stop("yes", 17, keep=False) == "yes"


def test_requests_that_a_dead_engine_did_not_take_are_not_in_flight() -> None:
    class DeadEngine:
        def submit(self, sequences: list[Sequence]) -> None:
            raise EngineDead("the engine stopped")

        def abort(self, *_: Any) -> None:
            raise EngineDead("the engine stopped")

    async def ask() -> list[Sequence]:
        hub = Hub(asyncio.get_running_loop())
        engine = cast(Engine, DeadEngine())
        with pytest.raises(EngineDead):
            await hub.run(engine, [make_sequence([1])])
        with pytest.raises(EngineDead):
            await anext(hub.stream(engine, [make_sequence([1])]))
        return hub.in_flight

    assert asyncio.run(ask()) == []
