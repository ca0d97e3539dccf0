"""Calls of tools in what models write: every family's way, whole and as it grows."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime.embedded.engine import Engine, Hub
from slime.embedded.generate_request import RequestLimits
from slime.embedded.generate_routes import ServerState
from slime.embedded.openai_request import OpenAIRequest, parse_chat, render_chat
from slime.embedded.openai_routes import _chat_choice, _chat_chunks
from slime.embedded.sequence import Sequence
from slime.engines.request_fields import BadRequest
from slime.engines.tool_calls import (
    FORMATS,
    Call,
    Reply,
    ToolFormat,
    chat_template,
    tool_format,
    tool_schemas,
)
from slime.models import FAMILIES, family_name
from tests.support.embedded_models import EOS, VOCAB, byte_tokenizer, no_adapters
from tests.support.written_calls import ADD, TOOLS, WEATHER, WRITTEN, written_as


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_text_and_calls_of_a_whole_answer(name: str, text: str) -> None:
    said = "" if name == "llama" else "Let me look."
    assert FORMATS[name].read(text, TOOLS, ended=True) == Reply(said, (WEATHER, ADD))


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_an_answer_that_is_cut_has_whole_calls_or_none(name: str, text: str) -> None:
    for length in range(len(text)):
        calls = FORMATS[name].read(text[:length], TOOLS, ended=True).calls
        assert calls == (WEATHER, ADD)[: len(calls)]


def test_glm4_writes_one_call_without_marks() -> None:
    read = FORMATS["glm4"].read
    assert read('\nweather\n{"city": "Zürich", "days": 2}', TOOLS, ended=True) == Reply(
        "", (WEATHER,)
    )
    assert read("weather\nis what we talk about", TOOLS, ended=True) == Reply(
        "weather\nis what we talk about"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b, and <tool_box> is no mark "),
        ("hermes", '<tool_call>{"name": "weather", "arg'),  # cut short
        ("hermes", "<tool_call>weather please</tool_call>"),
        ("llama", '{"name": "John", "age": 3}'),  # JSON that was asked for, not a call
        ("llama", 'Use {"name": "weather", "parameters": {}}'),
        ("glm4", "wea"),
        ("mistral", "[TOOL_CALLS]nothing"),
        ("qwen3_coder", "<tool_call>\n<function=weather\n</function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>'),
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(name: str, text: str) -> None:
    assert FORMATS[name].read(text, TOOLS, ended=True) == Reply(text)


_CALL = '{"name": "add", "arguments": {"a": 1}}'
_PIECES = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<function=", "<function=add>", "</function>", "<parameter=a>", "</parameter>", ">"),
    *("<|start|>assistant", "<|channel|>commentary", "<|channel|>analysis", " to=functions.add"),
    *("<|channel|>final", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|", "<|en"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "function",
        "add",
        "weather",
        "text",
        "1",
        ";",
        ",",
        "{",
        "}",
        "\n```json\n",
        "\n```",
        "\n",
        " ",
    ),
    *('{"a": 1}', _CALL, f"[{_CALL}]"),
)
ANSWERS = st.one_of(
    st.sampled_from(WRITTEN),
    st.tuples(
        st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(_PIECES), max_size=9).map("".join)
    ),
    st.tuples(
        st.sampled_from(list(FORMATS)), st.text('<tool_cal>{"name": }[TOOLCS]weathr\n', max_size=40)
    ),
)


@given(ANSWERS)
@example(("glm4", 'add\n{"a": 1} or so'))
def test_as_an_answer_grows_its_text_grows_and_calls_are_added(answer: tuple[str, str]) -> None:
    """Pieces that were streamed add up to the answer, wherever it is cut into pieces."""
    name, text = answer
    replies = [
        FORMATS[name].read(text[:count], TOOLS, ended=False) for count in range(len(text) + 1)
    ]
    replies.append(FORMATS[name].read(text, TOOLS, ended=True))
    for earlier, later in pairwise(replies):
        assert later.text.startswith(earlier.text)
        assert later.calls[: len(earlier.calls)] == earlier.calls


@given(ANSWERS)
def test_arguments_are_json_objects(answer: tuple[str, str]) -> None:
    for call in FORMATS[answer[0]].read(answer[1], TOOLS, ended=True).calls:
        assert isinstance(json.loads(call.arguments), dict)


DEEP = "[" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud83d"}',
        f'{{"a": {DEEP}',
        '"{',
        "[]",
    ],
)
def test_a_call_with_arguments_that_not_everybody_can_read_is_text(arguments: str) -> None:
    """Half a character, what only Python takes for JSON, and more brackets than it can follow."""
    for name, text in [
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'),
        ("llama", f'{{"name": "add", "parameters": {arguments}}}'),
        ("glm4", f"add\n{arguments}"),
        ("deepseek", f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"),
        ("mistral", f"[TOOL_CALLS]add{arguments}"),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}}}]'),
    ]:
        assert FORMATS[name].read(text, TOOLS, ended=True) == Reply(text), name
    value = arguments.partition(": ")[2].rstrip("}")
    text = f"<tool_call>add<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    for call in FORMATS["glm45"].read(text, TOOLS, ended=True).calls:
        assert orjson.loads(call.arguments) == {"a": value}
    text = f"<tool_call><function=add><parameter=a>{value}</parameter></function></tool_call>"
    for call in FORMATS["qwen3_coder"].read(text, TOOLS, ended=True).calls:
        assert orjson.loads(call.arguments) == {"a": value}


def argument(name: str, value: str, wanted: Any, **schema: Any) -> Any:
    tools = {"run": {"type": "object", "properties": {"x": wanted}, **schema}}
    (call,) = FORMATS[name].read(written_as(name, value), tools, ended=True).calls
    return json.loads(call.arguments)["x"]


STRINGS = [
    {"type": "string"},
    {"enum": ["42", "true"]},
    {"const": "42"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"$ref": "#/$defs/Code"},
]


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(
    "value", ['{"a": 1}', "42", "true", "[1]", '"quoted"', "x = 1\n\n  y = 2", " two ", ""]
)
def test_a_value_stays_text_where_the_tool_wants_text(name: str, value: str) -> None:
    for wanted in STRINGS:
        assert argument(name, value, wanted, **{"$defs": {"Code": {"type": "string"}}}) == value, (
            wanted
        )


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(
    ("value", "wanted", "read"),
    [
        ("42", {"type": "integer"}, 42),
        ("0.5", {"type": "number"}, 0.5),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("true", {"type": "boolean"}, True),
        # Qwen3-Coder's template writes former calls as Python does
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("None", {}, "None"),
        ("many", {"type": "integer"}, "many"),  # the tool says what is wrong with it
        ("42", {}, 42),
        ("42", {"$ref": "#/$defs/Missing"}, 42),
        ("42", "no schema", 42),
    ],
)
def test_other_values_are_read_as_the_tool_wants_them(
    name: str, value: str, wanted: Any, read: Any
) -> None:
    assert argument(name, value, wanted) == read


def test_a_schema_that_never_ends_and_one_of_no_form_say_nothing() -> None:
    assert (
        argument("glm45", "42", {"$ref": "#/$defs/A"}, **{"$defs": {"A": {"$ref": "#/$defs/A"}}})
        == 42
    )
    for schema in ({}, {"properties": None}, {"properties": {"x": {"type": {}}}}):
        (call,) = (
            FORMATS["glm45"].read(written_as("glm45", "42"), {"run": schema}, ended=True).calls
        )
        assert json.loads(call.arguments) == {"x": 42}
    assert tool_schemas(
        [{"function": {"name": "f"}}, {"name": "g", "parameters": {"type": "object"}}, 1]
    ) == {
        "f": {},
        "g": {"type": "object"},
    }


def test_a_name_that_is_half_a_character_is_text() -> None:
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert FORMATS["hermes"].read(text, TOOLS, ended=True) == Reply(text)


def test_a_value_may_hold_the_marks_of_another_format() -> None:
    text = (
        "<tool_call>add<arg_key>a</arg_key>\n"
        "<arg_value>x</arg_key>[TOOL_CALLS]</arg_value></tool_call>"
    )
    assert FORMATS["glm45"].read(text, TOOLS, ended=True).calls == (
        Call("add", '{"a": "x</arg_key>[TOOL_CALLS]"}'),
    )


def format_of(directory: Path) -> ToolFormat | None:
    return tool_format(chat_template(directory), family_name(directory))


def test_each_family_has_a_format_or_none_and_templates_decide_first(tmp_path: Path) -> None:
    known = {family for row in FORMATS.values() for family in row.families}
    assert known <= {family.name for family in FAMILIES}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert format_of(tmp_path) is None  # without a chat template there are no turns, and no tools
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert format_of(tmp_path) is FORMATS["llama"]
    (tmp_path / "chat_template.jinja").write_text("… <tool_call></tool_call> …")
    assert format_of(tmp_path) is FORMATS["hermes"]
    (tmp_path / "chat_template.jinja").write_text("… <tool_call>name<arg_key> …")
    assert format_of(tmp_path) is FORMATS["glm45"]
    (tmp_path / "chat_template.jinja").write_text("… <tool_call>\\n<function=' + name …")
    assert format_of(tmp_path) is FORMATS["qwen3_coder"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "<tool_call></tool_call>"
    )
    assert format_of(tmp_path) is FORMATS["hermes"]


@pytest.mark.parametrize(
    ("call", "parser"),
    [
        (
            "tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n' "
            "+ arguments + '\\n' + '```'",
            "deepseekv3",
        ),
        ("name + '<｜tool▁sep｜>' + arguments", "deepseekv31"),
        (None, "deepseekv3"),
    ],
)
def test_deepseek_v3_and_v31_are_told_apart_by_their_templates(
    tmp_path: Path, call: str | None, parser: str
) -> None:
    """SGLang's parser of one reads nothing of what the other writes."""
    taught = (
        f"{{{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + {call} + '<｜tool▁call▁end｜>' }}}}"
        if call
        else "{{ bos }}"
    )
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": taught}))
    found = format_of(tmp_path)
    assert found is not None and found.sglang_parser == parser and found.special_marks


# -- in answers of the server ----------------------------------------------------------------------


class Scripted:
    """In the place of the engine and its hub: the model writes this text, a token at a time."""

    def __init__(self, text: str, reason: str = "stop") -> None:
        self.ids, self.reason = byte_tokenizer().encode(text), reason

    def write(self, sequence: Sequence, count: int) -> None:
        sequence.output_ids[:] = self.ids[:count]

    async def stream(
        self, engine: Engine, sequences: list[Sequence]
    ) -> AsyncIterator[tuple[int, bool]]:
        for count in range(1, len(self.ids) + 1):
            self.write(sequences[0], count)
            yield 0, False
        sequences[0].finish_reason = {"type": self.reason}
        yield 0, True


def asked_for(body: dict[str, Any], name: str) -> OpenAIRequest:
    tokenizer, limits = (
        byte_tokenizer(),
        RequestLimits(VOCAB, 512, frozenset({EOS}), None, random.Random(0), no_adapters()),
    )
    messages = [{"role": "user", "content": "Hi"}]
    return parse_chat(
        {"messages": messages, "tools": SCHEMAS, **body}, limits, tokenizer, "tiny", FORMATS[name]
    )


def state_with(name: str, scripted: Scripted) -> ServerState:
    state = object.__new__(ServerState)
    state.tokenizer, state.tool_format = byte_tokenizer(), FORMATS[name]
    state.hub, state.engine = cast(Hub, scripted), cast(Engine, None)
    return state


async def collect(chunks: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk async for chunk in chunks]


SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_the_server_answers_with_tool_calls_whole_and_streamed(name: str, text: str) -> None:
    asked, scripted = asked_for({}, name), Scripted(text)
    state = state_with(name, scripted)
    chunks = asyncio.run(collect(_chat_chunks(asked, state)))
    deltas = [chunk["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content") or "" for delta in deltas) == (
        "" if name == "llama" else "Let me look."
    )
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
    assert [Call(**call["function"]) for call in calls] == [WEATHER, ADD]
    assert chunks[-1]["finish_reason"] == "tool_calls" and {
        chunk["finish_reason"] for chunk in chunks[:-1]
    } == {None}
    whole = _chat_choice(0, asked, state)
    assert [Call(**call["function"]) for call in whole["message"]["tool_calls"]] == [WEATHER, ADD]
    assert whole["message"]["content"] == (None if name == "llama" else "Let me look.")
    assert whole["finish_reason"] == "tool_calls" and all(
        call["type"] == "function" for call in calls
    )


def test_with_tool_choice_none_and_without_tools_calls_stay_text() -> None:
    text = WRITTEN[0][1]
    for body in ({"tool_choice": "none"}, {"tools": None}):
        asked = asked_for(body, "hermes")
        choice_chunks = asyncio.run(
            collect(_chat_chunks(asked, state_with("hermes", Scripted(text))))
        )
        assert "".join(chunk["delta"].get("content") or "" for chunk in choice_chunks) == text
        assert choice_chunks[-1]["finish_reason"] == "stop"


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": SCHEMAS}
    with pytest.raises(BadRequest, match="has no place for tools"):
        render_chat(body, tokenizer)
    assert render_chat({**body, "tool_choice": "none"}, tokenizer) == tokenizer.encode("Hi")


def test_a_call_that_is_cut_short_is_text_and_ends_as_the_answer_did() -> None:
    asked, text = asked_for({}, "hermes"), 'So: <tool_call>{"name": "add", "argum'
    chunks = asyncio.run(
        collect(_chat_chunks(asked, state_with("hermes", Scripted(text, "length"))))
    )
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == text
    assert chunks[-1]["finish_reason"] == "length"


def test_marks_that_are_special_tokens_are_kept_in_the_text() -> None:
    assert not asked_for({}, "mistral").generate.jobs[0].sequence.params.skip_special_tokens
    assert (
        asked_for({"tools": None}, "mistral").generate.jobs[0].sequence.params.skip_special_tokens
    )
    assert asked_for({}, "hermes").generate.jobs[0].sequence.params.skip_special_tokens


def test_arguments_of_former_calls_reach_the_template_as_objects() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    )
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert tokenizer.decode(render_chat(body, tokenizer)) == "Bern"
    broken = {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        ]
    }
    with pytest.raises(
        BadRequest, match=r"messages\[0\].tool_calls\[0\]: arguments of a call that are not valid"
    ):
        render_chat(broken, tokenizer)
