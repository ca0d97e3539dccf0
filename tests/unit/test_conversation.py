"""Every wire form of a conversation becomes the one form, or is refused by name."""

from __future__ import annotations

import contextlib
import datetime
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.prompts.chat_template import render_messages
from slime.prompts.conversation import (
    ConversationError,
    UnreadKeys,
    conversation_in,
    read_messages,
    read_tools,
    unread_keys,
    without_nulls,
)
from slime.prompts.problems import RowProblem
from slime.prompts.row_format import RowFormat, read_prompt
from tests.support.prompt_fixtures import CHATML, make_tokenizer

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def said(content: Any, role: str = "user") -> str:
    [message] = read_messages([{"role": role, "content": content}])
    return str(message["content"])


@pytest.mark.parametrize(
    "content",
    [
        "ab",
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}],
        [{"type": "text", "text": "ab", "image": None, "image_url": None}],
        [{"text": "a"}, {"text": "b"}],
        ["a", "b"],
        {"type": "text", "text": "ab"},
    ],
)
def test_content_is_text_whatever_its_parts(content: Any) -> None:
    assert said(content) == "ab"


@pytest.mark.parametrize("key", ["content", "value"])
def test_words_of_a_part_under_another_key_are_refused_and_not_dropped(key: str) -> None:
    with pytest.raises(ConversationError, match=rf"its keys are: type, {key}"):
        said([{"type": "text", key: "what?"}])
    assert said([{"type": "text", "text": None, "image": None}]) == ""


def test_calls_and_results_of_gemini_are_those_of_tools() -> None:
    wire = [
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]},
        {"role": "function", "parts": [{"functionResponse": {"name": "f", "response": {"y": 2}}}]},
        {"role": "user", "parts": [{"function_response": {"name": "f", "response": "3"}}]},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert read_messages(wire, drops_nulls=True) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"y": 2}', "name": "f"},
        {"role": "tool", "content": "3", "name": "f"},
    ]


def test_thoughts_of_gemini_are_reasoning() -> None:
    parts = [{"text": "hm", "thought": True}, {"text": "4", "thought": None}]
    assert read_messages([{"role": "model", "parts": parts}]) == [
        {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "1.png"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video"},
        {"type": "input_file", "file_id": "1"},
        {"image": "1.png"},
    ],
)
def test_images_and_other_media_are_refused_by_name(part: dict[str, Any]) -> None:
    name = part.get("type", "image")
    with pytest.raises(
        ConversationError, match=rf"messages\[1\]\.content\[1\]: a part of the type '{name}'"
    ):
        read_messages(
            [USER, {"role": "user", "content": [{"type": "text", "text": "what?"}, part]}]
        )


@pytest.mark.parametrize(
    "message",
    [
        CALLS,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"role": "assistant", "tool_calls": json.dumps([{"name": "f", "arguments": {"x": 1}}])},
        {"role": "assistant", "tool_calls": [json.dumps({"name": "f", "parameters": {"x": 1}})]},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"x": 1}'},
        },
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
        {"type": "function_call", "name": "f", "arguments": '{"x": 1}'},
        {"role": "assistant", "tool_calls": [{"name": "f", "args": {"x": 1}, "type": "tool_call"}]},
        CALLS | {"function_call": {"name": "f", "arguments": '{"x": 1}'}},
        CALLS | {"content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
    ],
)
def test_a_call_is_the_same_in_each_form(message: dict[str, Any]) -> None:
    assert read_messages([message]) == [CALLS]


def test_calls_that_differ_are_all_read() -> None:
    call = {"name": "f", "arguments": {}, "cache_control": {"type": "ephemeral"}}
    other = {"name": "g"}
    [message] = read_messages([CALLS | {"tool_calls": [call, call], "function_call": other}])
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["f", "f", "g"]


def test_arguments_under_an_unknown_name_are_refused_and_not_left_out() -> None:
    call = {"name": "f", "kwargs": {"x": 1}}
    with pytest.raises(ConversationError, match="arguments are under another name") as caught:
        read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert "kwargs" in caught.value.detail


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3))
def test_arguments_as_text_are_decoded_once_and_as_they_are(arguments: dict[str, Any]) -> None:
    call = {"name": "f", "arguments": json.dumps(arguments)}
    once = read_messages([{"role": "assistant", "tool_calls": [call]}], drops_nulls=True)
    assert once[0]["tool_calls"][0]["function"]["arguments"] == arguments
    assert read_messages(once) == once, "the one form stays as it is"


def test_templates_write_numbers_of_arguments_in_their_shortest_form() -> None:
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    text = '{"a": 5.10, "b": 1e5, "c": -0, "d": 12345678901234567890123}'
    for arguments in (text, json.loads(text)):
        calls = [{"name": "f", "arguments": arguments}]
        assert (
            render_messages(make_tokenizer(template), [{"role": "assistant", "tool_calls": calls}])
            == '{"a": 5.1, "b": 100000.0, "c": 0, "d": 12345678901234567890123}'
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not valid JSON"),
        ('{"x": NaN}', "not valid JSON"),
        ('{"x": "\\ud83d"}', "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ('"{}"', "not a JSON object"),
        ([1], "not a JSON object"),
    ],
)
def test_arguments_that_are_no_object_are_refused_with_their_place(
    arguments: Any, words: str
) -> None:
    with pytest.raises(ConversationError, match=words) as caught:
        read_messages(
            [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
        )
    assert caught.value.where == "messages[1].tool_calls[0]"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.kind) == (str(caught.value), caught.value.kind)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "4", "reasoning_content": "hm"},
        {"role": "assistant", "content": "4", "reasoning": "hm"},
        {"role": "assistant", "content": "4", "thinking": "hm"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}],
        },
        {"from": "gpt", "value": "4", "thinking": "hm", "weight": None},
    ],
)
def test_reasoning_has_one_key(message: dict[str, Any]) -> None:
    assert read_messages([message]) == [
        {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    ]


def test_roles_of_other_systems() -> None:
    told = [
        ("human", "user"),
        ("prompter", "user"),
        (" User ", "user"),
        ("gpt", "assistant"),
        ("observation", "tool"),
        ("system", "system"),
        ("Critic", "Critic"),
    ]
    assert [m["role"] for m in read_messages([{"from": a, "value": "x"} for a, _ in told])] == [
        b for _, b in told
    ]
    gemini = {"role": "model", "parts": [{"text": "x"}]}
    assert read_messages([gemini]) == [{"role": "assistant", "content": "x"}]


def test_results_of_tools_keep_their_ids_and_objects_become_json() -> None:
    result = {
        "role": "tool",
        "content": {"temp": 20, "unit": None},
        "tool_call_id": "c1",
        "name": "f",
    }
    assert read_messages([result]) == [result | {"content": '{"temp": 20, "unit": null}'}]
    blocks = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}]}
    ]
    assert read_messages([{"role": "user", "content": blocks}]) == [
        {"role": "tool", "content": "a", "tool_call_id": "c1"}
    ]


def test_an_empty_list_is_a_tools_value_except_where_lists_are_of_parts() -> None:
    values = [{"role": "tool", "content": []}, {"from": "observation", "value": []}]
    assert [message["content"] for message in read_messages(values)] == ["[]", "[]"]
    part = {"type": "tool_result", "tool_use_id": "c1", "content": []}
    parts = [
        {"role": "user", "content": [part]},
        {"type": "function_call_output", "call_id": "c1", "output": []},
        {"role": "tool", "parts": []},
    ]
    assert [message["content"] for message in read_messages(parts)] == ["", "", ""]


@pytest.mark.parametrize(
    "value",
    [
        [USER],
        json.dumps([USER]),
        {"messages": [USER]},
        json.dumps({"conversations": [{"from": "human", "value": "hi"}]}),
        {"role": ["user"], "content": ["hi"]},
        USER,
        {"prompt": [USER]},
        json.dumps({"prompt": [USER], "id": 3}),
        json.dumps({"chat": [{"from": "human", "value": "hi"}]}),
    ],
)
def test_a_whole_conversation_is_found_in_one_value(value: Any) -> None:
    found = conversation_in(value)
    assert found is not None and read_messages(found[0]) == [USER]


def test_a_system_prompt_beside_the_messages_is_read() -> None:
    system = {"role": "system", "content": "be brief"}
    for messages in ([USER], [system, USER]):
        found = conversation_in({"conversations": messages, "system": "be brief"})
        assert found is not None and found[0] == [system, USER]
    with pytest.raises(ConversationError, match="two system prompts"):
        conversation_in({"messages": [system, USER], "system": "be long"})


@pytest.mark.parametrize("key", ["completion", "answer", "messages"])
def test_answers_beside_the_messages_of_an_object_are_refused(key: str) -> None:
    with pytest.raises(ConversationError, match=f"its keys are: prompt, {key}"):
        conversation_in(json.dumps({"prompt": [USER], key: [USER]}))


_THINKS = {"type": "thinking", "thinking": "hm"}
_SAYS = {"type": "text", "text": "4"}
_CALLS = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


@pytest.mark.parametrize(
    ("role", "parts", "said"),
    [
        ("assistant", [_SAYS, _THINKS], "'thinking' behind one of the type 'text'"),
        ("assistant", [_THINKS, _SAYS, _THINKS, _SAYS], "'thinking' behind"),
        ("assistant", [_SAYS, {"text": "hm", "thought": True}], "'reasoning' behind"),
        ("assistant", [_CALLS, _SAYS], "'text' behind one of the type 'tool_use'"),
        ("user", [_SAYS, _RESULT], "'tool_result' behind one of the type 'text'"),
        ("assistant", [{"type": "text", "text": "\n"}, _THINKS, _THINKS, _SAYS, _CALLS], ""),
        ("user", [_RESULT, _RESULT, _SAYS], ""),
    ],
)
def test_parts_that_a_template_would_reorder_are_refused(role: str, parts: Any, said: str) -> None:
    message = {"role": role, "content": parts}
    read_messages([message])
    with pytest.raises(ConversationError, match=said) if said else contextlib.nullcontext():
        read_messages([message], drops_nulls=True)


def test_lists_of_different_lengths_are_refused_and_no_message_is_dropped() -> None:
    value = {"role": ["user", "assistant"], "content": ["hi"]}
    with pytest.raises(ConversationError, match="2 of role, 1 of content"):
        conversation_in(value)


@pytest.mark.parametrize("value", ["hi", "[1, 2]", "{", '{"a": 1}', "[{x", [], [1], None, 5])
def test_what_is_no_conversation_is_left_alone(value: Any) -> None:
    assert conversation_in(value) is None


@pytest.mark.parametrize(
    "value",
    [
        {"from": "Paris", "to": "Rome"},
        [{"from": "EUR", "to": "USD", "value": 3}],
        {"role": "user", "name": "Bob"},
        [{"role": "admin", "name": "Bob"}, {"role": "user", "name": "Al"}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        {"prompt": "hi"},
        {"prompt": [{"role": "admin", "content": "hi"}]},
    ],
)
def test_other_json_with_roles_and_places_of_departure_is_text(value: Any) -> None:
    assert conversation_in(json.dumps(value)) is None


def test_items_of_responses_may_be_text() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [USER, call, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    found = conversation_in(json.dumps(items))
    assert found is not None
    assert [message["role"] for message in read_messages(found[0])] == ["user", "assistant", "tool"]


def test_a_conversation_written_by_str_is_refused_and_not_taken_as_words() -> None:
    line = json.dumps(USER)
    for text in (str([USER]), f"array([{USER}], dtype=object)", f"{line}\n{line}"):
        with pytest.raises(ConversationError, match="not valid JSON"):
            conversation_in(text)
    assert conversation_in(f"{line}\nWhat is this?") is None


@pytest.mark.parametrize(
    "keys", [{"weight": 0}, {"loss": False}, {"loss_mask": 0}, {"train": False}, {"trainable": 0}]
)
def test_a_turn_can_be_left_out_of_the_loss(keys: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "x"}
    assert read_messages([message | keys]) == [message | {"step_loss_mask": 0}]
    assert read_messages([message | {next(iter(keys)): 1}]) == [message]


@pytest.mark.parametrize(
    "keys", [{"weight": 0.5}, {"loss": "no"}, {"loss_mask": [0, 1]}, {"weight": 1, "train": 0}]
)
def test_an_unusable_loss_weight_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConversationError, match=r"messages\[0\]"):
        read_messages([{"role": "assistant", "content": "x"} | keys])


def test_tools_may_be_wrapped_bare_or_text() -> None:
    bare = {"name": "f", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": bare}]
    flat = {"type": "function", **bare}
    anthropic = {"name": "f", "input_schema": {"type": "object"}}
    for tools in (
        wrapped,
        [bare],
        [flat],
        [anthropic],
        json.dumps(wrapped),
        [json.dumps(bare)],
        bare,
    ):
        assert read_tools(tools) == wrapped
    with pytest.raises(
        ConversationError, match=r"tools\[0\]: a tool that is not a function with a name"
    ):
        read_tools([{"type": "web_search"}])


def test_nulls_that_a_columnar_file_fills_in_are_absent() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": ["string", "null"]}, "c": None}
    tools = read_tools(
        [{"name": "f", "description": None, "parameters": {"properties": properties}}],
        drops_nulls=True,
    )
    assert tools[0]["function"] == {
        "name": "f",
        "parameters": {"properties": {k: properties[k] for k in "ab"}},
    }
    call = {
        "name": "f",
        "arguments": {"a": None, "b": None, "other": None, "deep": {"x": None, "y": [None]}},
    }
    [message] = read_messages(
        [{"role": "assistant", "tool_calls": [call]}], tools=tools, drops_nulls=True
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {"b": None, "deep": {"y": [None]}}


def test_null_stays_where_a_schema_allows_it_by_reference_or_by_choice() -> None:
    """As pydantic writes nested models."""
    point = {
        "properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "y": {}},
        "type": "object",
    }
    parameters = {
        "properties": {
            "one": {"$ref": "#/$defs/Point"},
            "all": {"allOf": [{"$ref": "#/$defs/Point"}]},
            "maybe": {"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
            "map": {"additionalProperties": {"$ref": "#/$defs/Word"}},
            "word": {"$ref": "#/$defs/Word"},
            "tree": {"$ref": "#"},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
        "$defs": {
            "Point": point,
            "Word": {"enum": ["a", None]},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
        },
    }
    filled: dict[str, Any] = {"x": None, "y": None}
    value: dict[str, Any] = {
        **dict.fromkeys(("one", "all", "maybe"), filled),
        "list": [filled],
        "map": {"k": None},
        "word": None,
        "tree": {"word": None, "one": None},
        "loop": None,
        "lost": None,
    }
    kept = {"x": None}
    assert without_nulls(value, parameters) == {
        **dict.fromkeys(("one", "all", "maybe"), kept),
        "list": [kept],
        "map": {"k": None},
        "word": None,
        "tree": {"word": None},
    }
    assert without_nulls({"maybe": None}, parameters) == {"maybe": None}


@given(JSON)
def test_without_nulls_leaves_no_key_null(value: Any) -> None:
    def has_null(one: Any) -> bool:
        if isinstance(one, dict):
            return any(inner is None or has_null(inner) for inner in one.values())
        return isinstance(one, list) and any(map(has_null, one))

    assert not has_null(without_nulls(value))


def test_keys_that_nothing_reads_are_found_by_name() -> None:
    messages = read_messages(
        [USER | {"citations": ["a"], "id": "1", "empty": []}, CALLS | {"tool_plan": "p"}]
    )
    assert unread_keys(messages, CHATML) == {"citations", "id", "tool_plan"}
    assert unread_keys(messages, "{{ m.tool_plan }}") == {"citations", "id"}, (
        "a template may read them"
    )
    row = {"input": messages, "source": "web", "nothing": None, "metadata": {}}
    prompt = read_prompt(row, RowFormat(raw=True), make_tokenizer())
    assert (prompt.unread_columns, prompt.unread_keys) == (
        ("source",),
        ("citations", "id", "tool_plan"),
    )
    unread = UnreadKeys()
    unread.add(prompt.unread_columns, prompt.unread_keys)
    assert UnreadKeys().warning("a", 1) == "" and "source (1 of 2 rows)" in unread.warning("a", 2)


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("{% if tools %}{{ tools }}{% endif %}", {"tools"}),
        ("{{ m.tools }}", set()),
        ("{{ m['tools'] }}", set()),
        ("{{ m.get('tools') }}", set()),
        ("these tools exist", {"tools"}),
    ],
)
def test_a_key_is_read_if_the_template_takes_it_from_a_message(
    template: str, unread: set[str]
) -> None:
    assert unread_keys([USER | {"tools": [1]}], template) == unread


def test_a_row_names_what_is_wrong_and_where() -> None:
    row = {"input": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}
    with pytest.raises(RowProblem) as caught:
        read_prompt(row, RowFormat(), make_tokenizer())
    assert caught.value.kind == "have arguments of a call that are not valid JSON"
    assert caught.value.detail.startswith("input[1].tool_calls[0]: ")


def test_names_and_weights_that_nothing_reads_are_reported() -> None:
    said = [
        {"role": "user", "content": "hi", "name": "bob", "weight": 1},
        {"role": "assistant", "content": "a"},
    ]
    tokenizer = make_tokenizer(CHATML)
    prompt = read_prompt({"input": said}, RowFormat(raw=True), tokenizer)
    assert prompt.unread_keys == ("name", "weight (of the role user)")
    named = make_tokenizer(CHATML.replace("m['role'] +", "m['role'] + (m['name'] or '') +"))
    assert read_prompt({"input": said[:1]}, RowFormat(raw=True), named).unread_keys == (
        "weight (of the role user)",
    )


def test_a_number_that_no_float_holds_is_refused_in_arguments() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1e400}'}}
    with pytest.raises(ConversationError, match="arguments of a call that are not valid JSON"):
        read_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", datetime.date(2024, 1, 2)])
def test_values_of_columnar_files_that_json_has_no_form_for_are_refused(value: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"a": [{"b": value}]}}}
    with pytest.raises(ConversationError, match="arguments of a call that JSON cannot write"):
        read_messages([{"role": "assistant", "tool_calls": [call]}])


# -- what looks right and says nothing -------------------------------------------------------------


def remarks_of(messages: list[dict[str, Any]]) -> list[str]:
    prompt = read_prompt({"input": messages}, RowFormat(raw=True), make_tokenizer())
    return [f"{one.kind}; {one.detail}" for one in prompt.remarks]


@pytest.mark.parametrize("key", ["text", "message", "refusal"])
def test_words_under_the_key_of_another_system_are_refused(key: str) -> None:
    with pytest.raises(ConversationError, match=f"words are under another key.*\n.*'{key}'"):
        read_messages(
            [USER, {"role": "assistant", "content": None, key: "words"}], drops_nulls=True
        )


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": " \n"}])
def test_messages_that_say_nothing_are_told(message: dict[str, Any]) -> None:
    (told,) = remarks_of([USER, message, {"role": "assistant", "content": "a"}])
    assert "say nothing" in told and repr(message["role"]) in told
    assert remarks_of([USER, CALLS, {"role": "tool", "content": ""}]) == []


def call(*ids: str) -> dict[str, Any]:
    calls = [{"id": one, "function": {"name": "f", "arguments": {}}} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str | None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "r"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([call("a", "b"), result("b"), result("a")], "'b' before 'a'"),
        ([call("a"), result("z")], "no call before it has this id"),
        ([call("a"), result("a"), result("a")], "no call before it has this id"),
        ([result("a")], "no call before it has this id"),
        ([call("a", "b"), result("a"), result("b"), call("a"), result("a")], ""),
        ([call("a", "b"), result("a")], ""),
        ([call("a"), result(None)], ""),
        ([{**CALLS}, result("a")], ""),
    ],
)
def test_results_that_do_not_follow_their_calls_are_told(
    messages: list[dict[str, Any]], said: str
) -> None:
    told = remarks_of([USER, *messages])
    assert said in told[0] if said else told == []


def test_a_key_twice_in_arguments_is_refused() -> None:
    given = {"name": "f", "arguments": '{"x": 1, "x": 2}'}
    with pytest.raises(ConversationError, match="the key 'x' twice"):
        read_messages([USER, {"role": "assistant", "tool_calls": [given]}], drops_nulls=True)
    told = read_messages([USER, {"role": "assistant", "tool_calls": [given]}])  # of a client
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2}


def test_keys_of_parts_and_items_that_nothing_reads_are_told() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "bad", "is_error": True}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "T"}]}
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": []}
    messages = [
        USER,
        {"role": "user", "content": [result]},
        thought,
        {"role": "assistant", "content": [hidden, said]},
    ]
    names = {key: None for message in messages for key in message}
    filled = [names | message for message in messages]  # as a columnar file has them
    for rows in (messages, filled):
        prompt = read_prompt({"input": rows}, RowFormat(raw=True), make_tokenizer())
        assert prompt.unread_keys == (
            "data (of a part of redacted_thinking)",
            "is_error (of a part of tool_result)",
            "summary (of an item of reasoning)",
        )


def test_what_belongs_to_a_prompt_in_a_column_of_media_is_told() -> None:
    row = {"input": [USER], "images": ["a.png"], "video": None, "audio": ""}
    prompt = read_prompt(row, RowFormat(raw=True), make_tokenizer())
    assert [one.kind for one in prompt.remarks] == [
        "have something in the column 'images', which nothing reads"
    ]


def test_tokens_that_the_tokenizer_lacks_are_refused() -> None:
    with pytest.raises(RowProblem, match="token ids that the tokenizer lacks"):
        read_prompt({"input": [1, 10**6]}, RowFormat(), make_tokenizer())


@pytest.mark.parametrize("prompt", ["nan", [{"role": "user", "content": "None"}]])
def test_a_prompt_that_is_the_name_of_a_missing_value_is_told(prompt: Any) -> None:
    [told] = read_prompt({"input": prompt}, RowFormat(), make_tokenizer()).remarks
    assert told.kind == "have a prompt that is the name of a missing value"


# -- one wire form within another ------------------------------------------------------------------


def read_rows(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return read_messages(messages, drops_nulls=True)


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_parts_as_text_are_parts(kind: str) -> None:
    parts = json.dumps([{"text": "a", "type": kind}, {"text": "b", "type": kind}])
    [message] = read_rows({"role": "user", "content": parts})
    assert message["content"] == "ab"
    with pytest.raises(ConversationError, match="as Python's text"):
        read_rows({"role": "user", "content": str(json.loads(parts))})
    with pytest.raises(ConversationError, match="type 'image_url'"):
        read_rows({"role": "user", "content": '[{"type": "image_url", "image_url": {}}]'})


@pytest.mark.parametrize(
    "content",
    [
        '[{"type": "text"}]',
        '[{"type": "textile", "text": "a"}]',
        '[{"type": "text", "text": "a"}] is a list',
        '{"type": "text", "text": "a"}',
        '[{"type": "image", "url": "a.png"}, {"type": "text", "text": "a"}]',
    ],
)
def test_an_answer_may_be_other_json(content: str) -> None:
    [message] = read_rows({"role": "assistant", "content": content})
    assert message["content"] == content


def test_a_conversation_that_was_encoded_twice_is_one() -> None:
    found = conversation_in(json.dumps(json.dumps([USER])))
    assert found is not None and found[0] == [USER]
    assert conversation_in('"hi"') is None and conversation_in('"[1]" is text') is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a", "value": "b"},
        {"role": "user", "from": "gpt", "content": "a"},
        {"role": "user", "content": "a", "parts": [{"text": "a"}, {"type": "file", "url": "b"}]},
    ],
)
def test_keys_of_two_forms_that_contradict_each_other_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ConversationError, match="several keys for one thing"):
        read_rows(message)


def test_keys_of_two_forms_that_agree_or_are_empty_are_read() -> None:
    said = {"role": "user", "from": "human", "content": "hi"}
    for more in ({"value": "hi"}, {"value": ""}, {"parts": [{"type": "text", "text": "hi"}]}):
        assert read_rows(said | more) == [USER]
    assert read_rows({"role": "user", "content": "", "value": "hi"}) == [USER]


def test_calls_and_parts_as_lists_of_their_fields_are_read() -> None:
    calls = {key: [CALL[key]] for key in CALL}
    assert read_rows({"role": "assistant", "tool_calls": calls}) == [CALLS]
    parts = {"type": ["text", "text"], "text": ["h", "i"]}
    assert read_rows({"role": "user", "content": parts}) == [USER]


@pytest.mark.parametrize(
    "calls", [[None], {"type": [], "function": []}, {"function": {"name": None, "arguments": None}}]
)
def test_calls_that_a_columnar_file_fills_in_are_absent(calls: Any) -> None:
    assert read_rows(USER | {"tool_calls": calls}) == [USER]


def test_images_and_calls_at_a_place_that_nothing_reads_are_told() -> None:
    text = {"type": "text", "text": "hi", "image": "a.png", "image_url": {"url": None}}
    listed = [{"a": 1}, {"a": 2}]
    results = [{"role": role, "content": listed} for role in ("tool", "observation")]
    messages = [CALLS | {"role": "user", "content": [text]}, *results]
    prompt = read_prompt({"input": messages}, RowFormat(raw=True), make_tokenizer())
    assert prompt.unread_keys == ("image (of a part of text)", "tool_calls (of the role user)")
