"""Calls of tools as each family of models writes them."""

from __future__ import annotations

from typing import Any

from slime.engines.tool_calls import Call

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
}
WEATHER = Call("weather", '{"city": "Zürich", "days": 2}')
ADD = Call("add", '{"a": [1, 2]}')
_DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Zürich", "days": '
    "2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": [1, 2]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
_DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich", "days": '
    "2}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": [1, 2]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
#: (format, what a model writes: text before, then both calls)
WRITTEN = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": '
        "2}}\n</tool_call>\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>',
    ),
    (
        "glm45",
        "Let me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>add\n<arg_key>a</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
    ),
    (
        "qwen3_coder",
        "Let me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n<parameter=a>\n[1, "
        "2]\n</parameter>\n</function>\n</tool_call>",
    ),
    ("deepseek", f"Let me look.{_DEEPSEEK_V3}"),
    ("deepseek", f"Let me look.{_DEEPSEEK_V31}"),
    ("deepseek31", f"Let me look.{_DEEPSEEK_V3}"),
    ("deepseek31", f"Let me look.{_DEEPSEEK_V31}"),
    (
        "mistral",
        'Let me look.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}, '
        '{"name": "add", "arguments": {"a": [1, 2]}}]',
    ),
    (
        "mistral",
        'Let me look.[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]add{"a": '
        "[1, 2]}",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>They want both.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|>'
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"a": [1, 2]}<|call|>',
    ),
    (
        "llama",
        '{"name": "weather", "parameters": {"city": "Zürich", "days": 2}}; '
        '{"name": "add", "parameters": {"a": [1, 2]}}',
    ),
]


def written_as(name: str, value: str) -> str:
    """A call of "run" with an argument "x", in one of the ways that write values without quotes."""
    if name == "glm45":
        return f"<tool_call>run\n<arg_key>x</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    return (
        f"<tool_call>\n<function=run>\n<parameter=x>\n{value}\n"
        "</parameter>\n</function>\n</tool_call>"
    )
