"""Agents' endpoints over HTTP, asked by the clients that agents use: the packages openai and
anthropic, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from benchmarks.agent_clients import anthropic_of, openai_of
from slime.agents import server as agent_server
from slime.agents.endpoint import AgentEndpoint, agent_endpoint
from slime.agents.server import close_server
from slime.rollout.generate import bind_state
from slime.samples.types import Sample
from tests.support.agents import Play
from tests.support.embedded_models import EOS

THOUGHT = "<think>\nhm\n</think>\n\nHello<|im_end|>"
CALL = 'Let me look. <tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call><|im_end|>'
LINES = [THOUGHT, CALL, "It is 42.<|im_end|>"]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}


def one_sample(play: Play, endpoint: AgentEndpoint) -> Sample:
    """All turns are one conversation whose tokens are the engine's."""
    (sample,) = endpoint.samples()
    sample.validate()
    assert sample.tokens == play.model.asked[-1] + play.model.said[-1]
    assert play.trained(sample) == [token for said in play.model.said for token in said]
    for asked, said, after in zip(play.model.asked, play.model.said, play.model.asked[1:]):
        assert after[: len(asked) + len(said)] == asked + said
    return sample


# -- what agents do, in three protocols ------------------------------------------------------------


async def chats(endpoint: AgentEndpoint, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    said = []
    async with openai_of(endpoint) as client:
        for _ in LINES:
            if stream:
                options: Any = {"include_usage": True}
                async with client.chat.completions.stream(
                    model="m", messages=messages, tools=tools, stream_options=options
                ) as events:
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(
                    model="m", messages=messages, tools=tools
                )
            message = answer.choices[0].message
            messages.append(message)
            if message.tool_calls:
                messages.append(
                    {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
                )
            else:
                messages.append({"role": "user", "content": "More"})
            reasoning = getattr(message, "reasoning_content", None)
            calls = [json.loads(call.function.arguments) for call in message.tool_calls or []]
            said.append((reasoning, message.content, calls, answer.choices[0].finish_reason))
            assert answer.usage.total_tokens == endpoint.turns[-1].length
    assert [end for *_, end in said] == ["stop", "tool_calls", "stop"]
    return [rest for *rest, _ in said]


async def responds(endpoint: AgentEndpoint, stream: bool) -> list[Any]:
    tools: Any = [
        {"type": "function", "name": "f", "parameters": PARAMETERS},
        {"type": "web_search"},
    ]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    said = []
    async with openai_of(endpoint) as client:
        for _ in LINES:
            asked: Any = {"model": "m", "input": items, "tools": tools, "instructions": "Be kind."}
            if stream:
                async with client.responses.stream(**asked) as events:
                    answer: Any = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            items += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            if calls:
                items.append(
                    {"type": "function_call_output", "call_id": calls[0].call_id, "output": "42"}
                )
            else:
                items.append({"role": "user", "content": "More"})
            reasoning = [item.content[0].text for item in answer.output if item.type == "reasoning"]
            arguments = [json.loads(call.arguments) for call in calls]
            said.append([reasoning[0] if reasoning else None, answer.output_text, arguments])
            assert (
                answer.status == "completed"
                and answer.usage.total_tokens == endpoint.turns[-1].length
            )
    return said


async def messages(endpoint: AgentEndpoint, stream: bool) -> list[Any]:
    tools: Any = [{"name": "f", "input_schema": PARAMETERS}]
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    said, ends = [], []
    async with anthropic_of(endpoint) as client:
        for _ in LINES:
            body: Any = {
                "model": "m",
                "max_tokens": 300,
                "system": [{"type": "text", "text": "Be kind."}],
            }
            body |= {"messages": asked, "tools": tools}
            if stream:
                async with client.messages.stream(**body) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**body)
            asked.append({"role": "assistant", "content": answer.content})
            by_type: dict[str, Any] = {block.type: block for block in answer.content}
            if call := by_type.get("tool_use"):
                result = {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "42"}],
                }
                asked.append({"role": "user", "content": [result]})
            else:
                asked.append({"role": "user", "content": "More"})
            thinking = by_type["thinking"].thinking if "thinking" in by_type else None
            said.append([thinking, by_type["text"].text, [call.input] if call else []])
            ends.append(answer.stop_reason)
            read = answer.usage.cache_read_input_tokens or 0
            tokens = answer.usage.input_tokens + read + answer.usage.output_tokens
            assert tokens == endpoint.turns[-1].length
        counted = await client.messages.count_tokens(
            model="m", system="Be kind.", messages=asked, tools=tools
        )
        assert counted.input_tokens > endpoint.turns[-1].length
    assert ends == ["end_turn", "tool_use", "end_turn"]
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "agent", [chats, responds, messages], ids=["chat", "responses", "messages"]
)
def test_every_protocol_tells_the_same_and_keeps_the_same_tokens(agent: Any, stream: bool) -> None:
    play = Play(LINES)
    said: list[Any] = []

    async def talk(endpoint: AgentEndpoint) -> None:
        said.extend(await agent(endpoint, stream))

    sample = one_sample(play, play.run(talk))
    assert said == [
        ["hm", "Hello", []],
        [None, "Let me look.", [{"x": 1}]],
        [None, "It is 42.", []],
    ]
    assert "<tool_response>\n42\n</tool_response>" in play.text(sample.tokens)
    assert play.text(sample.tokens).count("Be kind.") == 1


def test_responses_that_name_the_one_before_need_no_history() -> None:
    play = Play(LINES)

    async def talk(endpoint: AgentEndpoint) -> None:
        tools: Any = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
        async with openai_of(endpoint) as client:
            ask = {"model": "m", "tools": tools, "instructions": "Be kind."}
            one: Any = await client.responses.create(input="Hi", **ask)  # type: ignore[call-overload]
            two = await client.responses.create(input="More", previous_response_id=one.id, **ask)  # type: ignore[call-overload]
            call = next(item for item in two.output if item.type == "function_call")
            output: Any = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            ]
            three = await client.responses.create(input=output, previous_response_id=two.id, **ask)  # type: ignore[call-overload]
            assert three.output_text == "It is 42." and three.previous_response_id == two.id

    one_sample(play, play.run(talk))


Turn = Callable[[list[Any]], Awaitable[list[Any]]]


def plain(items: Sequence[Any]) -> list[Any]:
    """As agents keep their history; the packages take a hundred of their own objects apart at each
    request."""
    return [item.model_dump(exclude_none=True) for item in items]


def chat_turn(client: Any, stream: bool) -> Turn:
    async def turn(asked: list[Any]) -> list[Any]:
        # see `response_turn`
        body: Any = {"model": "m", "messages": [], "extra_body": {"messages": asked}}
        if not stream:
            return plain([(await client.chat.completions.create(**body)).choices[0].message])
        async with client.chat.completions.stream(**body) as events:
            return plain([(await events.get_final_completion()).choices[0].message])

    return turn


def response_turn(client: Any, stream: bool) -> Turn:
    async def turn(asked: list[Any]) -> list[Any]:
        # the history goes past the package's own look at every item, which takes 20 s for a hundred
        # turns
        body: Any = {"model": "m", "input": [], "extra_body": {"input": asked}}
        if not stream:
            return plain((await client.responses.create(**body)).output)
        async with client.responses.stream(**body) as events:
            return plain((await events.get_final_response()).output)

    return turn


def message_turn(client: Any, stream: bool) -> Turn:
    async def turn(asked: list[Any]) -> list[Any]:
        body: Any = {"model": "m", "max_tokens": 300, "messages": asked}
        if not stream:
            return [
                {
                    "role": "assistant",
                    "content": plain((await client.messages.create(**body)).content),
                }
            ]
        async with client.messages.stream(**body) as events:
            return [
                {"role": "assistant", "content": plain((await events.get_final_message()).content)}
            ]

    return turn


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("client_of", "protocol"),
    [(openai_of, chat_turn), (openai_of, response_turn), (anthropic_of, message_turn)],
    ids=["chat", "responses", "messages"],
)
def test_forty_turns_and_no_token_is_made_twice(
    client_of: Any, protocol: Any, stream: bool
) -> None:
    """Answers that a tokenizer would write in another way: broken characters, blanks, cut calls."""
    odd = [[230, 150], [32, 32, 9], [255], [104, 257], [60, 116, 104]]
    play = Play([[33 + number % 90, *odd[number % 5], number % 200, EOS] for number in range(40)])

    async def talk(endpoint: AgentEndpoint) -> None:
        asked: list[Any] = [{"role": "user", "content": "Begin"}]
        async with client_of(endpoint) as client:
            turn = protocol(client, stream)
            for number in range(40):
                asked += [*await turn(asked), {"role": "user", "content": f"{number}"}]

    sample = one_sample(play, play.run(talk))
    assert sample.metadata["agent"] | {"answer": ""} == {
        "branch": 0, "branches": 1, "turns": 40, "trained_turns": 40, "model": "m", "answer": "",
    }  # fmt: skip


def test_an_answer_cut_by_its_limit_or_a_stop_string_says_so() -> None:
    play = Play(["too long<|im_end|>", "too long<|im_end|>", "two STOP", "two STOP"])

    async def talk(endpoint: AgentEndpoint) -> None:
        hi: Any = [{"role": "user", "content": "Hi"}]
        async with openai_of(endpoint) as client, anthropic_of(endpoint) as other:
            chat = await client.chat.completions.create(
                model="m", messages=hi, max_completion_tokens=3
            )
            assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == (
                "length",
                "too",
            )
            response = await client.responses.create(model="m", input=hi, max_output_tokens=3)
            assert response.status == "incomplete" and response.output_text == "too"
            assert response.incomplete_details is not None
            message = await other.messages.create(
                model="m", max_tokens=9, messages=hi, stop_sequences=["STOP"]
            )
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
            chat = await client.chat.completions.create(model="m", messages=hi, stop="STOP")
            assert (
                chat.choices[0].message.content == "two "
                and chat.choices[0].finish_reason == "stop"
            )

    play.run(talk)


# -- who may ask, and what is refused --------------------------------------------------------------


def test_a_request_needs_the_key_of_its_sample_and_only_while_that_is_generated() -> None:
    play = Play(["a<|im_end|>"] * 4)
    hi: Any = [{"role": "user", "content": "Hi"}]

    async def run() -> None:
        bind_state(play.state)
        samples = [Sample(index=i, prompt="p") for i in range(2)]
        params = play.state.params_for(play.sample)
        async with agent_endpoint(play.state.args, samples[0], params) as one:
            async with agent_endpoint(play.state.args, samples[1], params) as two:
                assert one.port == two.port and one.api_key != two.api_key
                assert (
                    one.environ["OPENAI_BASE_URL"] == two.environ["OPENAI_BASE_URL"] == one.base_url
                )
                async with openai_of(one) as client:
                    await client.chat.completions.create(model="m", messages=hi)
                async with openai_of(two, base_url=two.keyed_base_url, api_key="none") as client:
                    await client.chat.completions.create(model="m", messages=hi)
                assert [len(one.turns), len(two.turns)] == [1, 1]
                for wrong in ("", "none", one.api_key[:-1], one.api_key + "x", "sk-slime-\u00e4"):
                    headers = {"x-api-key": wrong}
                    url = f"{one.base_url}/chat/completions"
                    async with (
                        aiohttp.ClientSession(headers=headers) as http,
                        http.post(url, json={}) as answer,
                    ):
                        assert answer.status == 401, wrong
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: \xff\xfe\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()
            async with anthropic_of(one, api_key=two.api_key) as late:
                with pytest.raises(anthropic.AuthenticationError):
                    await late.messages.create(model="m", max_tokens=9, messages=hi)
        await close_server()

    asyncio.run(run())
    assert len(play.model.asked) == 2


CHAT_REFUSED = [
    ({"messages": []}, "at least one message"),
    ({"n": 2}, "n must be 1"),
    ({"tool_choice": "required"}, "constrained decoding"),
    ({"response_format": {"type": "json_object"}}, "constrained decoding"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "only text",
    ),
    ({"logprobs": True}, "not supported"),
]


def test_what_cannot_be_served_is_refused_in_the_words_of_each_protocol() -> None:
    play = Play([])
    hi: Any = [{"role": "user", "content": "Hi"}]
    prefill: Any = [*hi, {"role": "assistant", "content": "I"}]

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client, anthropic_of(endpoint) as other:
            for body, said in CHAT_REFUSED:
                with pytest.raises(openai.BadRequestError, match=said):
                    await client.chat.completions.create(**({"model": "m", "messages": hi} | body))  # type: ignore[call-overload]
            with pytest.raises(openai.BadRequestError, match="no response 'resp_x'"):
                await client.responses.create(model="m", input="Hi", previous_response_id="resp_x")
            with pytest.raises(openai.BadRequestError, match="of the type 'item_reference'"):
                await client.responses.create(
                    model="m", input=[{"type": "item_reference", "id": "x"}]
                )
            with pytest.raises(
                anthropic.BadRequestError, match=r"invalid_request_error.*last message"
            ):
                await other.messages.create(model="m", max_tokens=9, messages=prefill)
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="x")
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await other.models.retrieve("claude")).id == "claude"
        assert not endpoint.turns

    play.run(talk)


_USER = {"role": "user", "content": "Hi"}


def _history(**said: Any) -> dict[str, Any]:
    return {"messages": [_USER, {"role": "assistant", "content": "x"} | said, _USER]}


def _input(*items: Any) -> dict[str, Any]:
    return {"input": [*items, _USER]}


ODD = [
    ("chat/completions", _history(reasoning_content=5), "a 'reasoning_content' that is not text"),
    (
        "chat/completions",
        _history(reasoning_content=["hm"]),
        "a 'reasoning_content' that is not text",
    ),
    (
        "chat/completions",
        _history(tool_calls=5),
        "messages[1].tool_calls: tool_calls that are not a list",
    ),
    ("chat/completions", _history(tool_calls="ab"), "not valid JSON"),
    (
        "chat/completions",
        _history(tool_calls=[{"function": {}}]),
        "tool_calls[0]: a call without the name",
    ),
    (
        "chat/completions",
        _history(tool_calls=[{"function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}]),
        "not valid JSON",
    ),
    (
        "chat/completions",
        _history(tool_calls=[{"function": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}]),
        "surrogates not allowed",
    ),
    (
        "chat/completions",
        {"messages": [_USER], "chat_template_kwargs": {"tools": []}},
        "must be without tools",
    ),
    (
        "chat/completions",
        {"messages": [_USER], "chat_template_kwargs": {"messages": []}},
        "must be without messages",
    ),
    (
        "chat/completions",
        {"messages": [_USER], "chat_template_kwargs": {"continue_final_message": True}},
        "refused",
    ),
    ("responses", {"input": []}, "at least one item"),
    ("responses", _input({"role": "alien", "content": "x"}), "the role of input"),
    (
        "responses",
        _input({"type": "reasoning", "summary": [], "content": 7}),
        "neither text nor a list",
    ),
    (
        "messages",
        {"messages": [_USER], "output_config": {"format": {"type": "json_schema"}}},
        "constrained decoding",
    ),
    (
        "messages",
        {"messages": [_USER], "output_format": {"type": "json_schema"}},
        "constrained decoding",
    ),
    (
        "messages",
        _history(content=[{"type": "tool_use", "id": "a", "input": {}}]),
        "a call without the name",
    ),
    (
        "messages",
        _history(content=[{"type": "tool_use", "id": "a", "name": "f", "input": "x"}]),
        "not valid JSON",
    ),
]


def test_what_is_of_no_form_is_refused_and_not_an_error_of_ours() -> None:
    play = Play([])

    async def talk(endpoint: AgentEndpoint) -> None:
        headers = {"x-api-key": endpoint.api_key}
        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/", headers=headers) as http:
            for path, body, words in ODD:
                async with http.post(path, json=body) as answer:
                    said = (await answer.json())["error"]["message"]
                    assert (answer.status, words in said) == (400, True), (path, body, said)

    play.run(talk)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_no_client_could_read_comes_as_text(stream: bool) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": NaN, "y": "\\ud83d"}}\n</tool_call>'
    play = Play([f"{call}<|im_end|>"] * 2)

    async def talk(endpoint: AgentEndpoint) -> None:
        body: Any = {"model": "m", "max_tokens": 300, "messages": [_USER]}
        body["tools"] = [{"name": "f", "input_schema": PARAMETERS}]
        async with anthropic_of(endpoint) as client:
            if stream:
                async with client.messages.stream(**body) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**body)
            assert (answer.stop_reason, [block.type for block in answer.content]) == (
                "end_turn",
                ["text"],
            )
            assert answer.content[0].text == call

    play.run(talk)


def test_no_tools_and_an_empty_list_of_them_are_the_same() -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"])

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client:
            asked: list[Any] = [_USER]
            answer = await client.chat.completions.create(model="m", messages=asked, tools=[])
            asked += [answer.choices[0].message, _USER]
            await client.chat.completions.create(model="m", messages=asked)

    one_sample(play, play.run(talk))


def test_bodies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_server, "_LARGEST_BODY", 1000)

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * 2000}]
                )
            assert refused.value.status_code == 413

    Play([]).run(talk)


def test_a_body_that_does_not_come_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.ENDPOINT_REQUEST_BODY", 0.05)

    async def talk(endpoint: AgentEndpoint) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        head = (
            "POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: "
            f"{endpoint.api_key}\r\nContent-Length: 50\r\n\r\n"
        )
        writer.write(head.encode())
        assert b" 408 " in await reader.readline()
        writer.close()

    Play([]).run(talk)


def test_headers_that_do_not_come_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.ENDPOINT_KEEPALIVE", 0.05)

    async def talk(endpoint: AgentEndpoint) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: ")
        assert await reader.read() == b""
        writer.close()

    Play([]).run(talk)


def test_more_turns_than_allowed_are_refused_and_not_tried_again() -> None:
    play = Play(["a<|im_end|>"])

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client:
            await client.responses.create(model="m", input="Hi")
            with pytest.raises(openai.BadRequestError, match="may take 1 turns"):
                await client.responses.create(model="m", input="Hi")

    assert len(play.run(talk, max_turns=1).samples()) == 1
