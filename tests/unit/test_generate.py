"""The built-in generate function, and users' own: tokens in and out, limits, resume, seeds, hooks,
failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.api import EngineError, GenerateResult
from slime.engines.client import RequestRefused, RolloutClient
from slime.errors import UserError
from slime.log import untold
from slime.rollout.generate import (
    bind_state,
    context_limit,
    generate,
    prompt_token_ids,
    sample_seed,
    sampling_params,
)
from slime.rollout.resumed_requests import answered
from slime.rollout.trajectory import GroupRun, GroupRunner, copy_of_prompt
from slime.rollout.validate_generate_output import complete_tokens, warn_of_missing_end_token
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import FunctionFailed
from tests.support import rollout_hooks
from tests.support.fake_engine import FakeEngine, answer
from tests.support.fake_rollout import FakeClient, FakeRewards, FakeTokenizer, hook_args, make_state

HOOKS = "tests.support.rollout_hooks."


def generate_once(
    sample: Sample, client: Any = None, more_params: dict[str, Any] | None = None, **kw: Any
) -> Sample:
    async def main() -> Sample:
        state = make_state(client or FakeClient(), **kw)
        bind_state(state)
        return await generate(state.args, sample, state.params_for(sample) | (more_params or {}))

    return asyncio.run(main())


def run_group(
    samples: list[Sample],
    *,
    client: FakeClient | None = None,
    rewards: Any = None,
    evaluation: bool = False,
    **flags: Any,
) -> GroupRun:
    async def main() -> GroupRun:
        state = make_state(client or FakeClient(), args=hook_args(**flags))
        group = GroupRun.of(samples)
        runner = GroupRunner(state, rewards or FakeRewards(), rollout_id=7, evaluation=evaluation)
        await asyncio.wait_for(runner.run(group), timeout=10)
        return group

    rollout_hooks.calls.clear()
    return asyncio.run(main())


def sample_at(index: int = 0, first: int = 20) -> Sample:
    return Sample(group_index=0, index=index, tokens=[first, 7])


def test_a_copy_of_a_prompt_does_not_change_with_it() -> None:
    sample = Sample(prompt=[{"role": "user", "content": "hi"}], label={"answer": ["4"]}, index=0)
    twin = copy_of_prompt(sample)
    sample.prompt.append({"role": "assistant", "content": "ho"})
    sample.label["answer"].append("5")
    assert len(twin.prompt) == 1 and twin.label == {"answer": ["4"]}


# -- tokens ----------------------------------------------------------------------------------------


def test_response_is_what_the_engine_sampled() -> None:
    sample = generate_once(sample_at())
    expected, reason = answer([20, 7], sample_seed(42, 0), 8)
    assert sample.tokens == [20, 7, *expected] and sample.response_length == len(expected)
    assert sample.rollout_log_probs == [-0.5] * len(expected) and sample.loss_mask == [1] * len(
        expected
    )
    assert sample.status is (SampleStatus.COMPLETED if reason == "stop" else SampleStatus.TRUNCATED)
    assert sample.weight_versions == ["1"] and sample.prefix_cache_info.total_prompt_tokens == 2
    sample.validate()


def test_prompt_becomes_tokens_once_and_without_special_tokens() -> None:
    client = FakeClient()
    sample = generate_once(Sample(index=0, prompt="ab"), client)
    assert client.calls[0]["input_ids"] == [97, 98] == sample.tokens[:2]
    chat = Sample(index=0, prompt=[{"role": "user", "content": "x"}])
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "any"
    assert prompt_token_ids(tokenizer, chat) == [ord(c) for c in "user:x;"]


def test_plain_text_begins_as_a_server_would_begin_it_and_templated_text_as_it_stands() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.bos_token_id = 9
    for templated, expected in ((False, [9, 97, 98]), (True, [97, 98])):
        client = FakeClient()
        sample = generate_once(
            Sample(index=0, prompt="ab"), client, tokenizer=tokenizer, templated=templated
        )
        assert client.calls[0]["input_ids"] == expected == sample.tokens[: len(expected)]
        assert sample.prompt_length == len(expected)
    assert (
        generate_once(
            Sample(index=0, prompt="ab", tokens=[97, 98]), tokenizer=tokenizer
        ).prompt_length
        == 2
    )


def test_messages_are_rendered_with_the_runs_arguments_of_the_template_or_the_samples_own() -> None:
    class Moody(FakeTokenizer):
        chat_template = "{{ mood }}"

        def apply_chat_template(
            self, messages: list[dict[str, Any]], mood: str = "none", **kwargs: Any
        ) -> str:
            return mood

    messages = [{"role": "user", "content": "x"}]

    async def main() -> list[str]:
        args = hook_args(apply_chat_template_kwargs={"mood": "glad"})
        bind_state(make_state(FakeClient(), args=args, tokenizer=Moody()))
        samples = [Sample(index=0, prompt=messages), Sample(0, 0, prompt=messages)]
        samples[1].apply_chat_template_kwargs = {"mood": "sad"}
        return ["".join(map(chr, prompt_token_ids(Moody(), sample))) for sample in samples]

    assert asyncio.run(main()) == ["glad", "sad"]


@pytest.mark.parametrize(
    "sample", [Sample(index=3, prompt=""), Sample(index=3, prompt="x", multimodal_inputs={"a": 1})]
)
def test_prompts_that_cannot_be_sent_are_named(sample: Sample) -> None:
    with pytest.raises(UserError, match="sample 3 has"):
        generate_once(sample)


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 5), max_size=6), index=st.integers(0, 40), limit=st.integers(1, 30)
)
def test_a_resumed_sample_equals_an_uninterrupted_one(
    cuts: list[int], index: int, limit: int
) -> None:
    class Cutting(FakeClient):
        """Aborts the first requests after so many tokens, with a new weight version each time."""

        async def generate(
            self, input_ids: list[int], params: dict[str, Any], **kwargs: Any
        ) -> GenerateResult:
            result = await super().generate(input_ids, params, **kwargs)
            self.weight_version += 1
            if cuts and len(result.token_ids) > cuts[0]:
                keep = cuts.pop(0)
                meta = {**result.meta_info, "finish_reason": {"type": "abort"}}
                return GenerateResult(
                    result.token_ids[:keep], result.log_probs[:keep], "", "abort", meta
                )
            return result

    async def no_pause(seconds: float) -> None:
        return None

    client = Cutting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.rollout.generate._pause", no_pause)
        sample = generate_once(sample_at(index), client, max_new_tokens=limit)
    assert sample.tokens[2:] == answer([20, 7], sample_seed(42, index), limit)[0]
    assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
    for call in client.calls:
        assert len(call["input_ids"]) - 2 + call["params"]["max_new_tokens"] == limit
    covered = [position for span in sample.token_spans for position in range(span.start, span.end)]
    assert covered == list(range(sample.response_length))
    sample.validate()


@given(st.integers(0, 60), st.integers(1, 24), st.integers(1, 9))
def test_an_answer_in_pieces_equals_a_whole_one(index: int, limit: int, most: int) -> None:
    whole = generate_once(sample_at(index), max_new_tokens=limit)
    client = FakeClient()
    in_pieces = generate_once(sample_at(index), client, max_new_tokens=limit, request_tokens=most)
    for name in (
        "tokens",
        "response",
        "response_length",
        "rollout_log_probs",
        "loss_mask",
        "status",
    ):
        assert getattr(in_pieces, name) == getattr(whole, name), name
    asked = [call["params"]["max_new_tokens"] for call in client.calls]
    assert max(asked) <= most and len(asked) == max(1, -(-whole.response_length // most))


class EndsAt(FakeClient):
    """Samples ``tokens``, and looks at the number of tokens before it looks at the token, as
    engines do."""

    def __init__(self, tokens: list[int], reason: str) -> None:
        super().__init__()
        self.tokens, self.reason = tokens, reason

    async def generate(
        self, input_ids: list[int], params: dict[str, Any], **_: Any
    ) -> GenerateResult:  # type: ignore[override]
        self.calls.append({"input_ids": input_ids, "params": params})
        piece = self.tokens[len(input_ids) - 2 :][: params["max_new_tokens"]]
        meta = {"finish_reason": {"type": self.reason}, "weight_version": "1"}
        return GenerateResult(
            piece, [-0.5] * len(piece), FakeTokenizer().decode(piece), self.reason, meta
        )

    async def send(self, body: dict[str, Any]) -> dict[str, Any]:
        got = await self.generate(body["input_ids"], body["sampling_params"])
        return {"text": got.text, "output_ids": got.token_ids, "meta_info": dict(got.meta_info)}


@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize(
    "ends", [{"end_tokens": frozenset([2])}, {"more_params": {"stop_token_ids": [2]}}]
)
def test_an_answer_that_ends_with_its_piece_has_ended(reason: str, ends: dict[str, Any]) -> None:
    """And is not gone on with, past its end."""
    client = EndsAt([5, 6, 7, 2, 8, 9], reason)
    sample = generate_once(sample_at(), client, request_tokens=4, **ends)
    assert (
        sample.tokens[2:] == [5, 6, 7, 2]
        and sample.status is SampleStatus.COMPLETED
        and len(client.calls) == 1
    )
    body = {
        "input_ids": [20, 7],
        "sampling_params": {"max_new_tokens": 8, **ends.get("more_params", {})},
    }
    more = {"most_tokens": 4, "end_tokens": ends.get("end_tokens", frozenset())}
    got = asyncio.run(answered(client.send, body, lambda: False, lambda: None, **more))
    assert got["output_ids"] == [5, 6, 7, 2] and got["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_stop_string_that_an_abort_cuts_ends_the_answer(cut: int) -> None:
    """Whether the abort comes before its end, within it or with it."""
    written = [1, 2, 3, 4, 5, 6, 7, 8]
    stop = FakeTokenizer().decode([3, 4])

    class Aborts(FakeClient):
        async def generate(
            self, input_ids: list[int], params: dict[str, Any], **_: Any
        ) -> GenerateResult:
            there = len(input_ids) - 2
            end = cut if not there else 4 if there < 3 else None  # as the engine sees the string
            piece = written[there:end]
            reason = "stop" if there else "abort"
            meta = {"finish_reason": {"type": reason}, "weight_version": "1"}
            text = FakeTokenizer().decode(piece)
            return GenerateResult(piece, [-0.5] * len(piece), text, reason, meta)

    sample = generate_once(sample_at(), Aborts(), more_params={"stop": [stop]})
    assert sample.status is SampleStatus.COMPLETED
    sample.validate()
    assert sample.tokens[2:] == written[:4]
    assert sample.response == FakeTokenizer().decode(written[:4])


def test_a_token_that_shall_be_ignored_ends_nothing() -> None:
    client = EndsAt([5, 6, 7, 2, 8, 9, 9, 9], "length")
    ignore = {"more_params": {"ignore_eos": True}}
    sample = generate_once(
        sample_at(), client, request_tokens=4, end_tokens=frozenset([2]), **ignore
    )
    assert sample.tokens[2:] == [5, 6, 7, 2, 8, 9, 9, 9] and sample.status is SampleStatus.TRUNCATED


@pytest.mark.parametrize(
    "params", [{"stop": ["."]}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3}]
)
def test_what_counts_from_the_first_token_is_asked_for_at_once(params: dict[str, Any]) -> None:
    client = FakeClient()
    generate_once(sample_at(), client, more_params=params, request_tokens=2)
    assert [call["params"]["max_new_tokens"] for call in client.calls] == [8]


class Bytes:
    """A tokenizer with one token per byte, and an engine that cuts answers anywhere."""

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@given(st.text(min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_a_cut_within_a_character_loses_nothing(text: str, most: int, is_own_request: bool) -> None:
    tokens = list(text.encode())

    class Engine(FakeClient):
        async def generate(
            self, input_ids: list[int], params: dict[str, Any], **_: Any
        ) -> GenerateResult:  # type: ignore[override]
            there = len(input_ids) - 2
            piece = tokens[there : there + params["max_new_tokens"]]
            reason = "stop" if there + len(piece) == len(tokens) else "length"
            meta = {"finish_reason": {"type": reason}, "weight_version": "1"}
            return GenerateResult(piece, [-0.5] * len(piece), Bytes().decode(piece), reason, meta)

        async def send(self, body: dict[str, Any]) -> dict[str, Any]:
            got = await self.generate(body["input_ids"], body["sampling_params"])
            return {"text": got.text, "output_ids": got.token_ids, "meta_info": dict(got.meta_info)}

    if is_own_request:
        body = {"input_ids": [20, 7], "sampling_params": {"max_new_tokens": 99}}
        more: dict[str, Any] = {"tokenizer": Bytes(), "most_tokens": most}
        got = asyncio.run(answered(Engine().send, body, lambda: False, lambda: None, **more))[
            "text"
        ]
    else:
        given = {"max_new_tokens": 99, "request_tokens": most, "tokenizer": Bytes()}
        got = generate_once(sample_at(), Engine(), **given).response
    assert got == text


def test_weight_versions_of_tokens_follow_the_engines_spans() -> None:
    sample = Sample(tokens=[1])
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "4",
        "token_weight_versions": [[0, 3], [2, 4]],
    }
    sample.append_response_tokens(
        tokens=[7, 8, 9], log_probs=[-1.0, -2.0, -3.0], meta_info=meta, text="abc"
    )
    assert [(s.start, s.end, s.weight_version) for s in sample.token_spans] == [
        (0, 2, 3),
        (2, 3, 4),
    ]
    assert (
        sample.response == "abc"
        and sample.weight_versions == ["4"]
        and sample.status is SampleStatus.COMPLETED
    )
    meta["token_weight_versions"] = [[0, 5]]
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta, text="d")
    assert [(s.start, s.end, s.weight_version) for s in sample.token_spans][-1] == (3, 4, 5)
    assert sample.rollout_log_probs == [-1.0, -2.0, -3.0, -1.0]


# -- limits ----------------------------------------------------------------------------------------


def test_functions_that_post_by_themselves_get_the_version_of_every_token() -> None:
    meta = {"token_weight_versions": [[0, "3"], [2, "4"]], "weight_version": "4"}
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[7, 8, 9], log_probs=[-1.0] * 3, meta_info=meta)
    assert [(span.start, span.end, span.weight_version) for span in sample.token_spans] == [
        (0, 2, 3),
        (2, 3, 4),
    ]
    assert sample.token_versions() == (3, 4)


def test_context_limit_caps_the_response() -> None:
    client = FakeClient()
    sample = generate_once(sample_at(3), client, max_context_len=5)
    assert client.calls[0]["params"]["max_new_tokens"] == 3 and len(sample.tokens) <= 5


def test_a_prompt_without_room_is_truncated_counted_and_told_once(fresh_log: None) -> None:
    async def main() -> None:
        client = FakeClient()
        state = make_state(client, max_context_len=2)
        bind_state(state)
        sample = await generate(state.args, sample_at(), state.params_for(sample_at()))
        assert sample.status is SampleStatus.TRUNCATED and sample.response_length == 0
        assert state.counts["prompt_too_long"] == 1 and not client.calls
        await generate(state.args, sample_at(1), state.params_for(sample_at(1)))

    untold()
    asyncio.run(main())
    [said] = untold()
    assert "the limit is 2" in said and "--rollout-max-prompt-len leaves such prompts out" in said


def test_the_engines_own_context_limit_truncates_too() -> None:
    async def main() -> None:
        async with FakeEngine() as engine, RolloutClient(engine.url, max_concurrency=1) as client:
            state = make_state(client)
            bind_state(state)
            engine.refuse = (
                "The input (90 tokens) is longer than the model's context length (64 tokens)."
            )
            sample = await generate(state.args, sample_at(), state.params_for(sample_at()))
            assert sample.status is SampleStatus.TRUNCATED and state.counts["prompt_too_long"] == 1
            engine.refuse = "stop must be a list"
            with pytest.raises(RequestRefused, match="stop must be a list"):
                await generate(state.args, sample_at(), state.params_for(sample_at()))

    asyncio.run(main())


def test_min_new_tokens_counts_what_is_there() -> None:
    async def main() -> None:
        client = FakeClient()
        state = make_state(client, max_new_tokens=6)
        bind_state(state)
        sample = sample_at()
        sample.append(tokens=[9, 9], log_probs=[0.0, 0.0])
        sample.status = SampleStatus.ABORTED
        await generate(state.args, sample, {**state.params_for(sample), "min_new_tokens": 5})
        assert client.calls[0]["params"]["min_new_tokens"] == 3
        assert client.calls[0]["params"]["max_new_tokens"] == 4

    asyncio.run(main())


def test_aborted_for_ever_is_an_error() -> None:
    class Aborting(FakeClient):
        async def generate(
            self, input_ids: list[int], params: dict[str, Any], **kwargs: Any
        ) -> GenerateResult:
            return GenerateResult([], [], "", "abort", {"finish_reason": {"type": "abort"}})

    async def no_pause(seconds: float) -> None:
        return None

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(EngineError, match="was aborted 64 times"),
    ):
        patch.setattr("slime.rollout.generate._pause", no_pause)
        generate_once(sample_at(), Aborting())


def test_context_limit_takes_the_smallest_that_is_set() -> None:
    assert context_limit(None, 30, 20) == 20 and context_limit(None, None) is None


# -- parameters and seeds --------------------------------------------------------------------------


def test_sampling_params_are_spelt_for_the_engine_and_never_shared() -> None:
    params = sampling_params(temperature=0.5, max_new_tokens=4, stop=("a",), stop_token_ids=(5,))
    assert params == {
        "temperature": 0.5,
        "max_new_tokens": 4,
        "stop": ["a"],
        "stop_token_ids": [5],
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    state = make_state(FakeClient())
    state.sampling_params = params
    mine = state.params_for(sample_at())
    mine["stop"].append("b")
    assert params["stop"] == ["a"] and "sampling_seed" in mine and "sampling_seed" not in params


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter 'temprature'; nearest: 'temperature'"),
        (
            {"repetition_penalty": 3.0},
            "repetition_penalty must be a finite number above 0 and at most 2, got 3.0",
        ),
        (
            {"max_new_tokens": 4, "min_new_tokens": 5},
            "min_new_tokens must be at most max_new_tokens",
        ),
    ],
)
def test_what_engines_would_refuse_is_refused_before_they_are_asked(
    params: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        sampling_params(**params)


def test_seeds_differ_by_sample_and_rollout_seed() -> None:
    seeds = {sample_seed(rollout_seed, index) for rollout_seed in range(4) for index in range(2000)}
    assert len(seeds) == 8000 and all(0 <= seed < 2**31 for seed in seeds)


def test_no_seed_is_sent_unless_deterministic() -> None:
    client = FakeClient()
    generate_once(sample_at(), client, deterministic=False)
    assert "sampling_seed" not in client.calls[0]["params"]


def test_generate_outside_a_rollout_is_explained() -> None:
    async def main() -> None:
        with pytest.raises(UserError, match="no rollout here"):
            await generate(hook_args(), sample_at(), {"max_new_tokens": 1})

    asyncio.run(main())


def test_complete_tokens_of_a_sample_built_from_text() -> None:
    sample = Sample(prompt="ab", response="cde")
    complete_tokens(sample, FakeTokenizer(), [])
    assert sample.tokens == [97, 98, 99, 100, 101] and sample.response_length == 3
    drawn = Sample(prompt="ab", tokens=[7, 8], response="cde")
    complete_tokens(drawn, FakeTokenizer(), [7, 8])
    assert drawn.tokens == [7, 8, 99, 100, 101]
    with_bos = FakeTokenizer()
    with_bos.bos_token_id = 9
    for own, prompt in ([], [9, 97, 98]), ([97, 98], [97, 98]), ([9, 97, 98], [9, 97, 98]):
        sample = Sample(prompt="ab", tokens=own, response="c")
        assert complete_tokens(sample, with_bos, []) and sample.tokens == [*prompt, 99], (
            "a function's own stay"
        )
    with pytest.raises(UserError, match="a response and 5 tokens, but response_length 0"):
        complete_tokens(
            Sample(prompt="ab", tokens=[97, 98, 99, 100, 101], response="cde"), FakeTokenizer(), []
        )


@pytest.mark.parametrize(
    ("ends", "params", "evaluation", "is_told"),
    [
        ({5}, {}, False, True),
        ({ord("e")}, {}, False, False),  # the text keeps its end
        ({5}, {"stop_token_ids": [ord("e")]}, False, False),
        ({5}, {"stop": ["de"]}, False, False),
        (set(), {"stop": ["x"]}, False, True),
        (set(), {}, False, False),  # nothing is known to end an answer
        ({5}, {}, True, False),  # nothing is trained
    ],
)
def test_text_alone_without_its_end_is_told_once(
    ends: set[int],
    params: dict[str, Any],
    evaluation: bool,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    fresh_log: None,
) -> None:
    state = make_state(
        FakeClient(),
        args=hook_args(custom_generate_function_path=HOOKS + "from_text"),
        end_tokens=frozenset(ends),
    )
    state.sampling_params |= params
    for _ in range(2):
        group = GroupRun.of([sample_at(0), sample_at(1)])
        asyncio.run(
            GroupRunner(state, FakeRewards(), rollout_id=0, evaluation=evaluation).run(group)
        )
        assert [sample.tokens for sample in group.samples] == [[97, 98, 99, 100, 101]] * 2, (
            "no token is added"
        )
    said = [message for message in caplog.messages if "text alone" in message]
    assert len(said) == int(is_told)
    assert all(
        "rollout_hooks.from_text' (--custom-generate-function-path) returns" in m
        and "append_response_tokens" in m
        for m in said
    )


def test_an_answer_that_was_cut_has_no_end_to_miss(
    caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    state = make_state(FakeClient(), end_tokens=frozenset({5}))
    sample = Sample(
        prompt="ab",
        response="cde",
        tokens=[97, 98, 99],
        response_length=1,
        status=SampleStatus.TRUNCATED,
    )
    warn_of_missing_end_token([sample], "mine.cut", state)
    assert not caplog.messages


# -- users' generate functions ---------------------------------------------------------------------


def test_multi_turn_masks_tool_tokens_and_changes_no_other_sample() -> None:
    client = FakeClient()
    group = run_group(
        [sample_at(0), sample_at(1)],
        client=client,
        custom_generate_function_path=HOOKS + "two_turns",
    )
    for sample in group.samples:
        start = sample.loss_mask.index(0) if sample.loss_mask else -1
        assert sample.tokens[2 + start : 4 + start] == [50, 51] and sample.loss_mask[
            start : start + 2
        ] == [0, 0]
        assert any(span.weight_version is None for span in sample.token_spans)
    first_calls = [
        call["params"]["max_new_tokens"] for call in client.calls if len(call["input_ids"]) == 2
    ]
    assert first_calls == [8, 8]


@pytest.mark.parametrize("evaluation", [False, True])
def test_evaluation_is_passed_to_those_who_accept_it(evaluation: bool) -> None:
    run_group(
        [sample_at(4)],
        evaluation=evaluation,
        custom_generate_function_path=HOOKS + "with_evaluation",
    )
    [(_, (index, was_evaluation, params))] = rollout_hooks.calls
    assert (index, was_evaluation) == (4, evaluation) and params["sampling_seed"] == sample_seed(
        42, 4
    )


def test_a_samples_own_function_wins() -> None:
    sample = sample_at()
    sample.generate_function_path = HOOKS + "from_text"
    group = run_group([sample], custom_generate_function_path=HOOKS + "raises")
    [result] = group.samples
    assert (
        result.response == "cde"
        and result.response_length == 3
        and result.index == 0
        and result.group_index == 0
    )
    assert result.status is SampleStatus.COMPLETED and result.reward is not None


def test_fan_out_is_one_execution_scored_together() -> None:
    rewards = FakeRewards()
    group = run_group(
        [sample_at(5), sample_at(6)],
        rewards=rewards,
        custom_generate_function_path=HOOKS + "fan_out",
    )
    assert [len(trajectory.samples) for trajectory in group.trajectories] == [2, 2]
    assert [[s.rollout_id for s in e.samples] for e in group.trajectories] == [[5, 5], [6, 6]]
    assert sorted(rewards.groups) == [[5, 5], [6, 6]] and not rewards.scored
    made = group.to_group()
    assert made.num_trajectories == 2 and len(made.samples) == 4
    again = GroupRun.of(made.samples)  # put back flat, taken up again
    assert [len(trajectory.samples) for trajectory in again.trajectories] == [
        2,
        2,
    ] and again.is_scored


def test_a_mask_over_all_tokens_is_cut_and_other_lengths_are_refused() -> None:
    [sample] = run_group(
        [sample_at()], custom_generate_function_path=HOOKS + "with_mask_over_all_tokens"
    ).samples
    assert sample.loss_mask == [1] * sample.response_length
    group = run_group([sample_at()], custom_generate_function_path=HOOKS + "with_wrong_mask")
    assert "with_wrong_mask' (--custom-generate-function-path) returned a sample" in str(
        group.failure
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("returns_nothing", "returned a NoneType"),
        ("not_async", "is not async"),
        ("fan_out_with_different_ids", "different rollout_id"),
    ],
)
def test_mistakes_in_generate_functions_cost_their_sample(name: str, said: str) -> None:
    group = run_group([sample_at()], custom_generate_function_path=HOOKS + name)
    assert isinstance(group.failure, FunctionFailed) and said in str(group.failure)
    assert group.samples[0].status is SampleStatus.FAILED


def test_a_generate_function_that_is_not_there_stops_the_run() -> None:
    with pytest.raises(UserError, match="has no 'absent'"):
        run_group([sample_at()], custom_generate_function_path=HOOKS + "absent")


@pytest.mark.parametrize(
    ("name", "built"), [("runs_out_of_room", True), ("runs_out_of_room_half_built", False)]
)
def test_a_function_whose_request_finds_no_room_gives_a_truncated_sample(
    name: str, built: bool
) -> None:
    """As the built-in function does: counted, scored, and no failure of the run."""
    state = make_state(FakeClient(), args=hook_args(custom_generate_function_path=HOOKS + name))
    group = GroupRun.of([sample_at()])
    asyncio.run(GroupRunner(state, FakeRewards(), rollout_id=0).run(group))
    [sample] = group.samples
    assert (
        group.failure is None
        and sample.status is SampleStatus.TRUNCATED
        and sample.reward is not None
    )
    assert state.counts["prompt_too_long"] == 1
    if built:
        assert sample.tokens[-2:] == [50, 51] and sample.response_length == len(sample.tokens) - 2
    else:
        assert (sample.tokens, sample.response_length) == ([20, 7], 0)
    sample.validate()


def test_another_refusal_of_a_functions_request_is_a_failure() -> None:
    group = run_group([sample_at()], custom_generate_function_path=HOOKS + "is_refused")
    assert isinstance(group.failure, RequestRefused)


def in_an_abort(sample: Sample, rewards: Any = None, **flags: Any) -> GroupRun:
    """The group of ``sample`` after a run during which the rollout ends."""

    async def main() -> GroupRun:
        client = FakeClient()
        group = GroupRun.of([sample])
        runner = GroupRunner(
            make_state(client, args=hook_args(**flags)), rewards or FakeRewards(), rollout_id=7
        )
        task = asyncio.create_task(runner.run(group))
        while not group.trajectories[0].samples[0].response_length:
            await asyncio.sleep(0)
        with client.abort_scope():
            await asyncio.wait_for(task, timeout=10)
        return group

    return asyncio.run(main())


def test_a_function_that_stumbles_over_an_abort_is_put_back_as_it_was() -> None:
    group = in_an_abort(sample_at(), custom_generate_function_path=HOOKS + "stumbles_over_an_abort")
    [sample] = group.samples
    assert group.failure is None and (sample.status, sample.tokens) == (
        SampleStatus.ABORTED,
        [20, 7],
    )
    sample.validate()


def test_a_reward_that_stumbles_over_an_abort_is_left_for_the_next_rollout() -> None:
    class Stumbling(FakeRewards):
        async def score(self, sample: Sample) -> float:
            raise UserError("the reward function 'mine' failed", why="KeyError: 'choices'")

    done = Sample(index=0, tokens=[20, 7, 8], response_length=1, status=SampleStatus.COMPLETED)
    group = in_an_abort(done, Stumbling())
    assert group.failure is None and group.is_generated and not group.is_scored
    with pytest.raises(UserError, match="'mine' failed"):
        run_group([done], rewards=Stumbling())


def test_a_failure_stays_with_its_sample() -> None:
    broken, fine = sample_at(0), sample_at(1)
    broken.generate_function_path = HOOKS + "raises"
    rewards = FakeRewards()
    group = run_group([broken, fine], rewards=rewards)
    assert isinstance(group.failure, OSError) and group.samples[0].status is SampleStatus.FAILED
    assert fine.reward is not None and rewards.scored == [1]


def test_status_failed_from_user_code_is_not_scored() -> None:
    rewards = FakeRewards()
    group = run_group(
        [sample_at()], rewards=rewards, custom_generate_function_path=HOOKS + "gives_up"
    )
    assert not group.is_generated and not rewards.scored


# -- sample hooks and rewards ----------------------------------------------------------------------


def test_sample_hooks_run_in_order_before_the_reward_with_what_they_accept() -> None:
    paths = [HOOKS + "note_sample", HOOKS + "replace_sample"]
    [sample] = run_group([sample_at(9)], evaluation=True, rollout_sample_hook_path=paths).samples
    assert rollout_hooks.calls == [("note_sample", (9, None)), ("replace_sample", (9, 7, True))]
    assert sample.metadata["hooked"] and sample.reward is not None


def test_a_sample_hook_that_returns_something_else_is_named() -> None:
    group = run_group([sample_at()], rollout_sample_hook_path=[HOOKS + "text_of_sample"])
    assert isinstance(
        group.failure, FunctionFailed
    ) and "text_of_sample' (--rollout-sample-hook-path) returned a str" in str(group.failure)


def test_finished_samples_are_neither_generated_nor_hooked_nor_scored_again() -> None:
    done = sample_at()
    done.append(tokens=[9], log_probs=[0.0])
    done.status, done.reward = SampleStatus.COMPLETED, 1.0
    client, rewards = FakeClient(), FakeRewards()
    run_group(
        [done], client=client, rewards=rewards, rollout_sample_hook_path=[HOOKS + "note_sample"]
    )
    assert not client.calls and not rewards.scored and not rollout_hooks.calls


def test_a_reward_set_by_the_generate_function_is_kept() -> None:
    class Setting(FakeClient):
        async def generate(
            self, input_ids: list[int], params: dict[str, Any], **kwargs: Any
        ) -> GenerateResult:
            sample.reward = 0.25
            return await super().generate(input_ids, params, **kwargs)

    sample = sample_at()
    run_group([sample], client=Setting())
    assert sample.reward == 0.25


def test_offpolicy_tokens_of_a_resumed_sample_are_masked_when_asked() -> None:
    async def main() -> None:
        state = make_state(FakeClient(), max_new_tokens=20)
        sample = sample_at(8)
        sample.append(tokens=[9, 9], log_probs=[0.0, 0.0])
        sample.status = SampleStatus.ABORTED
        runner = GroupRunner(state, FakeRewards(), rollout_id=1, mask_offpolicy=True)
        await runner.run(GroupRun.of([sample]))
        assert sample.loss_mask is not None and sample.response_length > 2
        assert sample.loss_mask == [0, 0] + [1] * (sample.response_length - 2)

    asyncio.run(main())


def test_every_sample_has_a_trace_of_its_phases() -> None:
    [sample] = run_group([sample_at()]).samples
    assert sample.trace is not None
    names = [event["name"] for event in sample.trace["events"] if event["type"] == "span_start"]
    assert names == ["generate_and_rm_group", "generate_and_rm", "generate", "reward_model"]
