"""Agents at their limits: full contexts, turns, stop strings, seeds; and what they thought."""

from __future__ import annotations

import asyncio
import copy
import sys

import openai
import pytest

from benchmarks.agent_clients import openai_of
from slime.agents.conversation import AgentRequest, clean
from slime.agents.endpoint import AgentEndpoint, AgentError
from slime.agents.session import Refusal
from slime.engines.reasoning import FORMATS, THINK, SplitReasoning, reasoning_format
from slime.engines.request_fields import BadRequest
from slime.samples.types import SampleStatus
from tests.support.agent_sessions import check, samples, session_of, talk, user
from tests.support.agents import Play


def test_a_full_context_refuses_and_its_branch_is_truncated() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"], max_context_len=60)
    session = session_of(play)

    async def run() -> None:
        turn = await session.answer(AgentRequest(clean([user("1")])))
        with pytest.raises(Refusal, match="too long") as refused:
            await session.answer(
                AgentRequest(clean([user("1"), turn.reading.message(), user("2" * 60)]))
            )
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")

    asyncio.run(run())
    (sample,) = check(play, session)
    assert sample.status is SampleStatus.TRUNCATED


def full_context(*then: str, rewritten: bool = False) -> list[SampleStatus]:
    """Of the branches of an agent that is refused for its length, then asks what is left, shorter
    than before."""
    play = Play(["a<|im_end|>", "b<|im_end|>"], max_context_len=60)
    session = session_of(play)

    async def run() -> None:
        turn = await session.answer(AgentRequest(clean([user("1")])))
        with pytest.raises(Refusal, match="too long"):
            before = user("a summary") if rewritten else user("1")
            await session.answer(
                AgentRequest(clean([before, turn.reading.message(), user("2" * 60)]))
            )
        for text in then:
            await session.answer(AgentRequest(clean([user(text)])))

    asyncio.run(run())
    return [sample.status for sample in check(play, session)]


def test_a_full_context_truncates_the_branch_also_where_the_history_was_rewritten() -> None:
    assert full_context(rewritten=True) == [SampleStatus.TRUNCATED]


def test_an_agent_that_went_on_with_less_was_not_cut_short() -> None:
    assert full_context("less") == [SampleStatus.COMPLETED] * 2
    assert full_context("less", rewritten=True) == [SampleStatus.COMPLETED] * 2


def test_of_branches_the_one_that_was_too_long_is_truncated() -> None:
    """Also if another agent of the sample was answered last, or was waiting for its answer
    meanwhile."""
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"], max_context_len=60)
    session = session_of(play)

    async def run() -> None:
        first = await session.answer(AgentRequest(clean([user("1")])))
        await session.answer(AgentRequest(clean([user("2")])))
        play.model.held = asyncio.Event()
        waiting = asyncio.create_task(session.answer(AgentRequest(clean([user("3")]))))
        while len(play.model.asked) < 3:
            await asyncio.sleep(0)
        with pytest.raises(Refusal, match="too long"):
            await session.answer(
                AgentRequest(clean([user("1"), first.reading.message(), user("2" * 60)]))
            )
        play.model.held.set()
        await waiting

    asyncio.run(run())
    found = [sample.status for sample in check(play, session)]
    assert found == [SampleStatus.TRUNCATED, SampleStatus.COMPLETED, SampleStatus.COMPLETED]
    assert session.cut_short(session.tree.turns[1:]) is None, "it is left out"


def test_a_request_that_the_template_refuses_is_no_turn() -> None:
    play = Play(["a<|im_end|>"])
    play.model.tokenizer = play.state.tokenizer = copy.copy(play.model.tokenizer)
    play.model.tokenizer.chat_template = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool begins') }}{% endif %}"
        + play.model.tokenizer.chat_template
    )
    session = session_of(play, max_turns=1)

    async def run() -> None:
        with pytest.raises(BadRequest, match="no tool begins"):
            await session.answer(AgentRequest(clean([{"role": "tool", "content": "4"}])))
        await session.answer(AgentRequest(clean([user("1")])))
        with pytest.raises(Refusal, match="may take 1 turns"):
            await session.answer(AgentRequest(clean([user("1")])))

    asyncio.run(run())


def test_a_stop_string_of_the_run_is_one_string_and_not_its_letters() -> None:
    play = Play(["x TOP y STOP z"])
    session = session_of(play)
    session.params["stop"] = "STOP"
    turn = asyncio.run(session.answer(AgentRequest(clean([user("1")]))))
    assert (turn.reading.text, turn.reading.stop) == ("x TOP y ", "STOP")
    assert play.model.calls[0]["params"]["stop"] == ["STOP"]


def test_who_asks_the_same_twice_gets_two_seeds() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    talk(play, [user("1")], [user("1")], [user("2")])
    seeds = [call["params"]["sampling_seed"] for call in play.model.calls]
    assert seeds[1] == seeds[0] + 1 and seeds[2] == seeds[0]


def test_of_a_clients_sampling_only_fewer_tokens_and_more_stops_count() -> None:
    play = Play(["abc", "x STOP y"], max_new_tokens=50)
    session = talk(
        play,
        AgentRequest([user("1")], max_tokens=2),
        AgentRequest([user("1")], max_tokens=900, stop=("STOP",)),
    )
    first, second = (call["params"] for call in play.model.calls)
    assert (
        first["max_new_tokens"] == 2
        and second["max_new_tokens"] == 50
        and second["stop"] == ["STOP"]
    )
    assert (
        session.tree.turns[1].reading.text == "x " and session.tree.turns[1].reading.stop == "STOP"
    )


def test_an_agent_that_asks_for_nothing_fails_its_sample() -> None:
    async def nothing(endpoint: AgentEndpoint) -> None: ...

    with pytest.raises(AgentError, match="has asked for none"):
        Play([]).run(nothing).samples()


def test_an_agent_that_got_nothing_says_why() -> None:
    async def wrong(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=[])

    async def broken(endpoint: AgentEndpoint) -> None:
        await endpoint.run([sys.executable, "-c", "raise SystemExit('no key')"])

    with pytest.raises(AgentError, match=r"its last request was refused: .*messages"):
        Play([]).run(wrong).samples()
    with pytest.raises(AgentError, match=r"ended with 1; its last line: no key"):
        Play([]).run(broken).samples()


def test_a_reward_of_the_execution_is_that_of_all_its_samples() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"])
    session = talk(play, [user("1")], [user("2")])
    session.sample.reward = 0.5
    assert [sample.reward for sample in samples(session)] == [0.5, 0.5]


# -- reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "thought"),
    [
        ("4", False, SplitReasoning(None, "4")),
        ("<think>\na\n</think>\n\n4", False, SplitReasoning("a", "4")),
        ("<think>\n\n</think>\n\n4", False, SplitReasoning("", "4")),
        ("a\n</think>\n4", True, SplitReasoning("a", "4")),
        ("a", True, SplitReasoning("a", "")),
        ("so <think> is a word", False, SplitReasoning(None, "so <think> is a word")),
    ],
)
def test_reasoning_and_answer(text: str, opened: bool, thought: SplitReasoning) -> None:
    assert THINK.split(text, opened=opened) == thought


def test_the_template_tells_how_a_model_thinks() -> None:
    assert reasoning_format("{{ m.content.split('</think>')[-1] }}") is THINK
    assert (
        reasoning_format("[THINK]{{ x }}[/THINK]") is FORMATS[1]
        and reasoning_format("{{ m.content }}") is None
    )
    assert THINK.opens("assistant\n<think>\n") and not THINK.opens("<think>\n\n</think>\n\n")


def test_a_prompt_that_opens_reasoning_is_seen() -> None:
    play = Play(["hm\n</think>\n\nYes<|im_end|>"])
    play.model.tokenizer = copy.copy(play.model.tokenizer)
    play.model.tokenizer.chat_template += (
        '{% if add_generation_prompt %}{{ "<think>\\n" }}{% endif %}'
    )
    session = talk(play, [user("1")])
    assert session.tree.turns[0].reading.message() == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "hm",
    }
