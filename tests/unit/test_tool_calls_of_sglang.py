"""Calls of tools as SGLang's own parsers read them, where it is installed: the same calls with the
same arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.engines.tool_calls import FORMATS
from tests.support.written_calls import TOOLS, WRITTEN, written_as

_parsers = pytest.importorskip(
    "sglang.srt.function_call.function_call_parser",
    reason="SGLang is not installed, and its parsers cannot be imported without the rest of it",
    exc_type=ImportError,
)
_protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol", exc_type=ImportError)


def of_sglang(name: str, text: str, tools: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    given = [
        _protocol.Tool(type="function", function={"name": tool, "parameters": schema})
        for tool, schema in tools.items()
    ]
    detector = _parsers.FunctionCallParser.ToolCallParserEnum[FORMATS[name].sglang_parser]()
    return [
        (call.name, json.loads(call.parameters))
        for call in detector.detect_and_parse(text, given).calls
    ]


def of_ours(name: str, text: str, tools: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    return [
        (call.name, json.loads(call.arguments))
        for call in FORMATS[name].read(text, tools, ended=True).calls
    ]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_sglang_reads_the_same_calls(name: str, text: str) -> None:
    if ("[ARGS]" in text and "[TOOL_CALLS]add{" in text) or (name == "deepseek") is (
        "sep｜>weather\n" not in text
    ):
        pytest.skip("two ways in one row: SGLang has a parser for each")
    # without the blank SGLang 0.5.23 reads nothing
    text = text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    assert of_ours(name, text, TOOLS) == of_sglang(name, text, TOOLS)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[("string", value) for value in ('{"a": 1}', "42", "true", "[1]", "x = 1\n  y = 2")],
        ("integer", "42"),
        ("number", "0.5"),
        ("boolean", "true"),
        ("array", "[1, 2]"),
        ("object", '{"a": [1]}'),
    ],
)
def test_sglang_reads_a_value_as_the_same_type(name: str, kind: str, value: str) -> None:
    tools = {"run": {"type": "object", "properties": {"x": {"type": kind}}}}
    text = written_as(name, value)
    if (name, kind, value) == ("glm45", "string", "true"):
        pytest.skip("SGLang 0.5.23 makes 'True' of it")
    assert of_ours(name, text, tools) == of_sglang(name, text, tools)
