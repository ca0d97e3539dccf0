"""Conversations of agents as a tree of exact tokens: what continues, what branches, and what is
trained."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agents.conversation import AgentRequest, clean, key_of
from slime.agents.turns import Turn, samples_of
from slime.prompts.chat_template import (
    _PAST_PROBE,
    _PROBE,
    Messages,
    TemplateRefuses,
    between_turns,
)
from slime.samples.types import SampleStatus
from tests.support.agent_sessions import check, session_of, talk, user
from tests.support.agents import Play, tokenizer
from tests.support.embedded_models import EOS

SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call>'


# -- what continues --------------------------------------------------------------------------------


def test_a_conversation_is_one_sample_with_the_turns_between_masked() -> None:
    play = Play(["Yes?<|im_end|>", "Four<|im_end|>"])
    session = talk(play, [SYSTEM, user("Hi")], [SYSTEM, user("Hi"), 0, user("2+2")])
    (sample,) = check(play, session)
    assert play.text(sample.tokens) == (
        "<|im_start|>system\nBe "
        "short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "Yes?<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\nFour<|im_end|>"
    )
    assert play.text(play.trained(sample)) == "Yes?<|im_end|>Four<|im_end|>"
    assert sample.response == "Yes?\n2+2\nFour" and sample.status is SampleStatus.COMPLETED
    assert sample.weight_versions == ["1", "1"] and sample.metadata["agent"]["answer"] == "Four"
    assert sample is play.sample and sample.prefix_cache_info.total_prompt_tokens == sum(
        map(len, play.model.asked)
    )


def test_an_answer_of_several_requests_does_not_count_itself_as_cached() -> None:
    turn = Turn(None, [1] * 10, [2] * 30, [0.0] * 30, SampleStatus.COMPLETED)
    turn.cache.cached_tokens = 25  # 0 of the first request, 25 of the second
    assert turn.cached_tokens == 10


def test_history_is_kept_once_however_often_it_is_sent() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"])
    session = talk(play, [user("x" * 50)], [user("x" * 50), 0, user("2")])  # type: ignore[list-item]
    first, second = session.tree.turns
    assert second.ask.messages[0] is first.ask.messages[0] and len(second.ask.messages) == 3


def test_every_token_keeps_what_it_was_drawn_from() -> None:
    """Two branches with a turn in common; nobody has drawn what lies between turns."""
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    play.model.tells_masks = True
    start: Messages = [user("1")]
    session = talk(play, start, [*start, 0, user("2")], [*start, 0, user("3")])  # type: ignore[list-item]
    samples = check(play, session)
    assert len(samples) == 2
    for sample, last in zip(samples, (1, 2), strict=True):
        offsets = sample.rollout_top_p_token_offsets
        ids = sample.rollout_top_p_token_ids
        response = sample.tokens[sample.prompt_length :]
        rows = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        drawn = [token for token, row in zip(response, rows, strict=True) if row]
        assert drawn == play.model.said[0] + play.model.said[last]
        assert [row for row in rows if row] == [[token, token + 1] for token in drawn]


def test_every_token_keeps_the_version_of_its_turn() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    conversation: Messages = [user("1")]
    talked = [
        conversation,
        [*conversation, 0, user("2")],
        [*conversation, 0, user("2"), 1, user("3")],
    ]
    (sample,) = check(play, talk(play, *talked))
    sampled = [span for span in sample.token_spans if span.weight_version is not None]
    assert [(span.end - span.start, span.weight_version) for span in sampled] == [
        (2, 1),
        (2, 1),
        (2, 2),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "plain<|im_end|>",
        "  blanks at its ends \n<|im_end|>",
        f"<think>\nhm\n</think>\n\nLet me see. {CALL}<|im_end|>",
        f"{CALL}\n{CALL}<|im_end|>",
        "<think>\n\n</think>\n\nNothing thought.<|im_end|>",
        [104, 250, 251, 105, EOS],  # bytes that are no character
    ],
)
def test_what_comes_back_goes_on_with_its_tokens(line: Any) -> None:
    play = Play([line, "b<|im_end|>"])
    first = AgentRequest([user("Hi")], tools=TOOLS)
    session = talk(play, first, AgentRequest([user("Hi"), 0, user("on")], tools=TOOLS))  # type: ignore[list-item]
    (sample,) = check(play, session)
    assert session.tree.turns[1].parent is session.tree.turns[0]
    assert sample.tokens[sample.prompt_length :][: len(play.model.said[0])] == play.model.said[0]


def test_an_answer_without_an_end_gets_one_that_is_not_trained() -> None:
    play = Play(["too lo", "b<|im_end|>"])
    (sample,) = check(play, talk(play, [user("Hi")], [user("Hi"), 0, user("on")]))
    assert "too lo<|im_end|>\n" in play.text(sample.tokens)
    assert play.text(play.trained(sample)) == "too lob<|im_end|>"


def test_how_arguments_are_written_does_not_matter_but_what_they_say_does() -> None:
    def call(arguments: str, name: str = "f") -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": function}],
        }

    assert key_of(call('{"x": 1, "y": 2}')) == key_of(call('{"y":2,"x":1}'))
    assert key_of(call('{"x": [5.0]}')) == key_of(call('{"x":[5]}')), (
        "as clients in JavaScript send it back"
    )
    assert len({key_of(call("{}")), key_of(call('{"x": 1}')), key_of(call("{}", "g"))}) == 3


# -- what branches ---------------------------------------------------------------------------------


def test_a_second_try_shares_its_beginning_which_is_trained_once() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    again: Messages = [user("1"), 0, user("2")]  # type: ignore[list-item]
    first, second = check(play, talk(play, [user("1")], again, again))
    assert play.text(play.trained(first)) == "a<|im_end|>b<|im_end|>"
    assert play.text(play.trained(second)) == "c<|im_end|>"
    assert second.metadata["agent"]["turns"] == 2 and second.metadata["agent"]["trained_turns"] == 1
    assert first.label == second.label and first.index == second.index


def test_compacted_history_is_a_branch_in_which_what_is_left_keeps_its_tokens() -> None:
    play = Play(["a<|im_end|>", [98, 255, 32, EOS], "c<|im_end|>"])
    session = talk(
        play,
        [user("1")],
        [user("1"), 0, user("2")],  # type: ignore[list-item]
        [user("in short: 1 and a, then 2"), 1, user("3")],  # type: ignore[list-item]
    )
    _, second = check(play, session)
    assert second.prompt_length > 0 and play.text(play.trained(second)) == "c<|im_end|>"
    prompt = second.tokens[: second.prompt_length]
    assert any(prompt[i : i + 4] == [98, 255, 32, EOS] for i in range(len(prompt)))


def test_an_answer_of_reasoning_alone_keeps_its_tokens_in_a_branch() -> None:
    play = Play(["a<|im_end|>", [*tokenizer().encode("<think>never"), 255], "c<|im_end|>"])
    session = talk(play, [user("1")], [user("1"), 0, user("2")], [user("in short"), 1, user("3")])  # type: ignore[list-item]
    check(play, session)
    assert session.tree.turns[2].parent is None and _holds(play.model.asked[2], play.model.said[1])


def test_messages_may_say_what_we_ask_the_template_with() -> None:
    """An agent that reads this repository."""
    play = Play(["a<|im_end|>", "b<|im_end|>"])
    told = user(f"before {_PROBE} and {_PAST_PROBE} after")
    session = talk(play, [told], [told, 0, told])  # type: ignore[list-item]
    (sample,) = check(play, session)
    assert play.text(sample.tokens).count(told["content"]) == 2


def test_a_client_that_drops_reasoning_branches_and_keeps_the_tokens_of_the_rest() -> None:
    play = Play(["<think>\nlong\n</think>\n\nYes<|im_end|>", "b<|im_end|>"])
    bare = {"role": "assistant", "content": "Yes"}
    session = talk(play, [user("1")], [user("1"), bare, user("2")])
    assert len(check(play, session)) == 2
    assert play.text(play.model.asked[1]) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    play = Play(["<think>\nlong\n</think>\n\nYes<|im_end|>", "b<|im_end|>"])
    session = talk(play, [user("1")], [user("1"), bare, user("2")], dropped_reasoning="continue")
    assert len(check(play, session)) == 1 and "long" in play.text(play.model.asked[1])


def test_other_tools_are_another_conversation() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"])
    session = talk(play, [user("1")], AgentRequest([user("1"), 0, user("2")], tools=TOOLS))  # type: ignore[list-item]
    assert len(check(play, session)) == 2


def test_a_template_that_wants_turns_to_alternate_takes_results_before_a_past_answer() -> None:
    """As Mistral's, which count neither calls nor results."""
    strict = copy.copy(tokenizer())
    strict.chat_template = (
        "{% for m in messages if m.role != 'tool' %}{% if (m.role == 'user') != (loop.index0 % 2 "
        "== 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>{% "
        "endif %}{% endfor %}"
    )
    result = {"role": "tool", "content": "42"}
    assert (
        between_turns(strict, result, to_past=True)
        == between_turns(strict, result)
        == "</s>[tool]42"
    )


def test_results_are_written_by_templates_that_want_them_behind_their_calls() -> None:
    """As Gemma 4's, which writes a result with the call before it, and would drop it elsewhere."""
    behind = copy.copy(tokenizer())
    behind.chat_template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}<|im_end|>"
        "{% for r in messages if r.role == 'tool' and r.tool_call_id == c.id %}"
        "{{ r.name }}={{ r.content }}{% endfor %}{% else %}<|im_end|>{% endfor %}{% endfor %}"
    )
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}]
    assert between_turns(behind, result, calls=calls) == "<|im_end|>add=42"
    assert between_turns(behind, result | {"name": "sub"}) == "<|im_end|>sub=42"
    with pytest.raises(TemplateRefuses, match="'name' of its tool"):
        between_turns(behind, result)


def test_the_same_told_in_another_way_is_found_by_its_tokens() -> None:
    """The first message is two here: no history is the same, its tokens are."""
    play = Play(["a<|im_end|>", "b<|im_end|>"])
    whole = user("1<|im_end|>\n<|im_start|>user\n2")
    session = talk(play, [user("1"), user("2")], [whole, 0, user("3")])  # type: ignore[list-item]
    (sample,) = check(play, session)
    assert (
        play.text(play.trained(sample)) == "a<|im_end|>b<|im_end|>" and sample.response == "a\n3\nb"
    )


def test_a_twin_of_what_was_said_goes_on_from_its_own_call() -> None:
    play = Play([f"{CALL}<|im_end|>", f"{CALL} <|im_end|>", "c<|im_end|>"])
    ask = AgentRequest([user("1")], tools=TOOLS)
    session = talk(play, ask, ask, AgentRequest([user("1"), 0, user("2")], tools=TOOLS))  # type: ignore[list-item]
    assert session.tree.turns[2].parent is session.tree.turns[0]
    check(play, session)


def test_chosen_branches_train_what_they_share() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    again: Messages = [user("1"), 0, user("2")]  # type: ignore[list-item]
    session = talk(play, [user("1")], again, again)
    (only,) = samples_of(session.sample, session.tree.branches()[1:])
    assert play.text(play.trained(only)) == "a<|im_end|>c<|im_end|>"


# -- any tree --------------------------------------------------------------------------------------

_WORDS = st.sampled_from(
    [
        "ok",
        "no ",
        "<think>\nhm\n</think>\n\nyes",
        "<think>never ends",
        CALL,
        f"look {CALL}",
        "\n\n",
        "<|im_start|>",
    ]
)
_BYTES = st.lists(st.integers(0, 255), min_size=1, max_size=6)
#: What a client does with its history before it asks again; the number chooses the turn to go on
#: from.
_STEP = st.tuples(
    st.sampled_from(
        [
            "go on",
            "go on",
            "go on",
            "drop the beginning",
            "edit",
            "drop reasoning",
            "drop tools",
            "anew",
        ]
    ),
    st.integers(0, 30),
    st.one_of(_WORDS, _BYTES),
    st.booleans(),  # whether the answer ends by itself
)


@settings(max_examples=60)
@given(
    st.lists(_STEP, min_size=1, max_size=9), st.sampled_from(["branch", "continue"]), st.booleans()
)
def test_any_tree_trains_each_sampled_token_once_and_is_what_the_engine_saw(
    steps: list[Any], policy: Any, merges: bool
) -> None:
    words = tokenizer(merges)
    ends = {True: [words.eos_token_id], False: []}
    lines = [
        (words.encode(line) if isinstance(line, str) else line) + ends[end]
        for _, _, line, end in steps
    ]
    play = Play(lines, merges=merges)
    session = session_of(play, dropped_reasoning=policy)

    async def run() -> None:
        for number, (what, which, _, _) in enumerate(steps):
            turns = session.tree.turns
            base = turns[which % len(turns)] if turns else None
            await session.answer(_next_ask(what, which, number, base))

    asyncio.run(run())
    check(play, session)
    for turn, asked in zip(session.tree.turns, play.model.asked):
        for message in turn.ask.messages:
            written = [
                known.output for known in session.tree.turns if known.reading.message() == message
            ]
            if message["role"] == "assistant" and message["content"] and written:
                assert any(_holds(asked, output) for output in written), (
                    "an answer was tokenised again"
                )


def _next_ask(what: str, which: int, number: int, base: Turn | None) -> AgentRequest:
    if base is None or what == "anew":
        return AgentRequest(clean([user(f"question {number % 3}")]), tools=TOOLS)
    messages = [*base.ask.messages, base.reading.message(), user(f"more {which % 4}")]
    if what == "drop the beginning":
        messages = [user("in short"), *messages[1 + which % len(messages) :]]
    elif what == "edit":
        messages[which % len(messages)] = user("edited")
    elif what == "drop reasoning":
        messages = [
            {k: v for k, v in message.items() if k != "reasoning_content"} for message in messages
        ]
    return AgentRequest(clean(messages), tools=None if what == "drop tools" else base.ask.tools)


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))
