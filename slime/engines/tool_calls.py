"""Separate tool calls from text in a model's output, for each format of calls.

>>> text = 'Let me look.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
>>> FORMATS["hermes"].read(text, {"f": {}}, ended=True)
Reply(text='Let me look.', calls=(Call(name='f', arguments='{"x": 1}'),))

`ToolFormat.read` is a function of the text so far: as the text grows, the reply's text and calls
only grow, so replies can be streamed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from slime.engines import harmony
from slime.files import read_object


@dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is a JSON object as text, as in OpenAI's API."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """The text and the calls of an answer."""

    text: str
    calls: tuple[Call, ...] = ()


#: Tool name → JSON schema of its arguments; {} if the client gave no tools.
Tools = Mapping[str, Mapping[str, Any]]
#: Yields the calls in a text that begins with the first call; raises ValueError at an incomplete
#: one.
Parse = Callable[[str, Tools], Iterator[Call]]


@dataclass(frozen=True)
class ToolFormat:
    """One format of calls.

    Attributes:
        begins: what the first call begins with; (): the tool's name and a line break.
        at_start: an answer consists only of calls, or has none.
        parse: reads them.
        in_template: a chat template that contains all these texts uses this format.
        families: model families that use it if their template does not tell.
        sglang_parser: SGLang's name of the format; "": SGLang cannot parse it.
        special_marks: its marks are special tokens, which decoding must keep.
    """

    begins: tuple[str, ...]
    parse: Parse
    in_template: tuple[str, ...]
    families: tuple[str, ...]
    sglang_parser: str
    at_start: bool = False
    special_marks: bool = False

    def read(self, text: str, tools: Tools, *, ended: bool) -> Reply:
        """Return text and complete calls of an answer, or of its beginning. Only calls may follow
        the first call.

        Args:
            tools: the tools that may be called. Formats without marks recognise a call by a tool's
                name at the start. For values without quotes, the schemas tell which are text.
            ended: the answer is complete. Before that, text that may become a call is held back; at
                the end, unreadable calls become text.
        """
        marks = self.begins or tuple(f"{name}\n" for name in tools)
        start = self._start(text, marks)
        if start is None:
            return Reply(text if ended else text[: len(text) - self._held(text, marks)])
        calls = tuple(_until_broken(self.parse(text[start:], tools)))
        if self.at_start and calls and calls[0].name not in tools:
            calls = ()
        return Reply(text if ended and not calls else text[:start].rstrip(), calls)

    def _start(self, text: str, marks: tuple[str, ...]) -> int | None:
        """Return the index of the first call; None if there is none."""
        if self.at_start:
            lead = len(text) - len(text.lstrip())
            return lead if any(text.startswith(mark, lead) for mark in marks) else None
        found = [at for mark in marks if (at := text.find(mark)) >= 0]
        return min(found, default=None)

    def _held(self, text: str, marks: tuple[str, ...]) -> int:
        """Count the characters at the end that may begin a call, and the blanks before them, which
        a call removes."""
        if self.at_start:
            start = text.lstrip()
            return len(text) if any(mark.startswith(start) for mark in marks) else 0
        for count in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
            if any(mark.startswith(text[-count:]) for mark in marks):
                return len(text) - len(text[:-count].rstrip())
        return len(text) - len(text.rstrip())


class ChannelToolFormat(ToolFormat):
    """Calls as messages to a tool (`slime.engines.harmony`). The text omits reasoning, which has
    its own channel."""

    def read(self, text: str, tools: Tools, *, ended: bool) -> Reply:
        found = list(harmony.messages(text))
        before = list(takewhile(lambda one: not one.recipient, found))
        behind = found[len(before) :]
        said = "".join(one.content for one in before if not one.is_reasoning)
        calls = tuple(_until_broken(self.parse(text, tools)))
        if ended:
            if not found and harmony.may_be_a_head(text):
                said = text
            elif not calls:
                said += "".join(one.written() for one in behind)
            return Reply(said, calls)
        if not any(one.channel for one in found) and harmony.may_be_a_head(text):
            said = ""
        elif found and not (behind or found[-1].is_whole or found[-1].is_reasoning):
            said = said[: len(said) - harmony.held_back(found[-1].content)]
        return Reply(said, calls[: sum(one.is_whole for one in behind)])


def _until_broken(calls: Iterator[Call]) -> Iterator[Call]:
    try:
        for call in calls:
            # nested as deeply as in a response
            orjson.dumps([[[[[[[[call.name, orjson.loads(call.arguments)]]]]]]]])
            yield call
    except (ValueError, orjson.JSONEncodeError, RecursionError):
        # cut short, not JSON, half a character (\ud83d), or nested too deeply: keep the calls
        # before it
        return


# -- formats ---------------------------------------------------------------------------------------


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not JSON, or too large")
    return value


#: Rejects NaN and Infinity, which json accepts by default but readers of the arguments do not.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _object(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at ``at``, after blanks, and the index of its end.

    Raises:
        ValueError: there is none, or only its beginning.
    """
    at += len(text[at:]) - len(text[at:].lstrip())
    return _DECODER.raw_decode(text, at)


def _call(value: Any) -> Call:
    """{"name": …, "arguments" or "parameters": {…}}

    Raises:
        ValueError: not of this form.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # encoded twice
        arguments = _DECODER.decode(arguments)
    return Call(value["name"], _arguments(arguments))


def _arguments(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return json.dumps(value, ensure_ascii=False)


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield the text between each pair of marks. Takes linear time even if a model repeats the
    first mark endlessly."""
    at = 0
    while (start := text.find(begin, at)) >= 0 and (
        stop := text.find(end, start + len(begin))
    ) >= 0:
        yield text[start + len(begin) : stop]
        at = stop + len(end)


def _hermes(text: str, tools: Tools) -> Iterator[Call]:
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        yield _call(_DECODER.decode(inner))


def _glm45(text: str, tools: Tools) -> Iterator[Call]:
    """<tool_call>name <arg_key>k</arg_key><arg_value>v</arg_value> … </tool_call>; see `_value`."""
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        name = inner.partition("<arg_key>")[0].strip()
        values: dict[str, Any] = {}
        for pair in _between(inner, "<arg_key>", "</arg_value>"):
            key, closed, rest = pair.partition("</arg_key>")
            before, opened, value = rest.partition("<arg_value>")
            if closed and opened and not before.strip():
                values[key.strip()] = _value(value, tools.get(name, {}), key.strip())
        yield Call(name, _arguments(values))


def _qwen3_coder(text: str, tools: Tools) -> Iterator[Call]:
    """<function=name> <parameter=k>, the value on lines of its own, </parameter> … </function>; see
    `_value`."""
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        functions = list(_between(inner, "<function=", "</function>"))
        if not functions:
            raise ValueError("no call")
        for function in functions:
            name, closed, body = function.partition(">")
            values: dict[str, Any] = {}
            for pair in _between(body, "<parameter=", "</parameter>"):
                key, _, value = pair.partition(">")
                # the template adds one line break at each end; others belong to the value
                value = value.removeprefix("\n").removesuffix("\n")
                values[key.strip()] = _value(value, tools.get(name.strip(), {}), key.strip())
            if not closed:
                raise ValueError("a call without the end of its name")
            yield Call(name.strip(), _arguments(values))


#: As written by Python and by templates that convert a value to text: {{ value | string }}.
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def _value(written: str, schema: Mapping[str, Any], key: str) -> Any:
    """Decode an argument without quotes: as text if the tool accepts only text; otherwise as JSON,
    or as text if it is not JSON.

    >>> [_value("42", {"properties": {"x": {"type": kind}}}, "x") for kind in ("string", "integer")]
    ['42', 42]
    """
    properties = schema.get("properties")
    wanted = _types(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    if wanted == {"string"}:
        return written
    if wanted == {"string", "null"}:
        return None if written.strip() in ("null", "None") else written
    try:
        return _DECODER.decode(written)
    except (ValueError, RecursionError):
        word = written.strip().lower()
        meant = "boolean" if word in ("true", "false") else "null"
        return _WORDS[word] if word in _WORDS and meant in wanted else written


def _types(wanted: Any, schema: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a part of a schema allows; empty if it does not say.

    Args:
        schema: the whole schema, to resolve "$ref": "#/$defs/…".
    """
    if not isinstance(wanted, Mapping) or depth > 4:
        return set()
    kind = wanted.get("type")
    if isinstance(kind, str | list):
        return {kind} if isinstance(kind, str) else {str(one) for one in kind}
    choices = wanted.get("enum", [wanted["const"]] if "const" in wanted else None)
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return {"string"}
    several = wanted.get("anyOf") or wanted.get("oneOf")
    if isinstance(several, list):
        return set().union(*(_types(one, schema, depth + 1) for one in several))
    place, _, name = str(wanted.get("$ref", "")).rpartition("/")
    defined = schema.get(place.removeprefix("#/")) if name else None
    return _types(defined.get(name), schema, depth + 1) if isinstance(defined, Mapping) else set()


def _llama(text: str, tools: Tools) -> Iterator[Call]:
    """{"name": …, "parameters": {…}}, separated by semicolons."""
    at = 0
    while text[at:].strip():
        value, at = _object(text, at)
        yield _call(value)
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1


def _glm4(text: str, tools: Tools) -> Iterator[Call]:
    """The tool's name on a line of its own, its arguments below it."""
    name, found, rest = text.strip().partition("\n")
    if found and rest.strip():
        # ignore what follows: a streamed call cannot be retracted
        value, _ = _object(rest, 0)
        yield Call(name.strip(), _arguments(value))


def _deepseek(text: str, tools: Tools) -> Iterator[Call]:
    """V3: function<sep>name, then a block of JSON; V3.1: name<sep>{…}."""
    for inner in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        kind, _, rest = inner.partition("<｜tool▁sep｜>")
        name, fence, block = rest.rstrip().partition("\n```json\n")
        if fence and block.endswith("\n```"):
            yield Call(name.strip(), _arguments(_DECODER.decode(block.removesuffix("\n```"))))
        else:
            yield Call(kind.strip(), _arguments(_DECODER.decode(rest)))


def _mistral(text: str, tools: Tools) -> Iterator[Call]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} for each, also with
    [ARGS] between."""
    for part in text.split("[TOOL_CALLS]")[1:]:
        name = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?", part)
        value, _ = _object(part, name.end() if name else 0)
        if name:
            yield Call(name.group(1), _arguments(value))
        else:
            yield from map(_call, value if isinstance(value, list) else [value])


def _harmony(text: str, tools: Tools) -> Iterator[Call]:
    """A message to functions.NAME, whose content is its arguments."""
    for message in harmony.messages(text):
        if message.recipient:
            yield Call(message.tool, _arguments(_DECODER.decode(message.content.strip())))


_DEEPSEEK_BEGINS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
#: The first format whose marks are in a template is used.
FORMATS: dict[str, ToolFormat] = {
    "glm45": ToolFormat(
        ("<tool_call>",),
        _glm45,
        ("<tool_call>", "<arg_key>"),
        ("glm4_moe", "glm4_moe_lite"),
        "glm45",
    ),
    "qwen3_coder": ToolFormat(
        ("<tool_call>",),
        _qwen3_coder,
        ("<tool_call>", "<function="),
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "qwen3_coder",
    ),
    "hermes": ToolFormat(
        ("<tool_call>",),
        _hermes,
        ("<tool_call>",),
        (
            *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "mimo"),
            *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        ),
        "qwen25",
    ),
    # DeepSeek-V3 and R1
    "deepseek": ToolFormat(
        _DEEPSEEK_BEGINS,
        _deepseek,
        ("<｜tool▁calls▁begin｜>", "```json"),
        ("deepseek_v3",),
        "deepseekv3",
        special_marks=True,
    ),
    # DeepSeek-V3.1: the same family with another template, for which SGLang has another parser
    "deepseek31": ToolFormat(
        _DEEPSEEK_BEGINS,
        _deepseek,
        ("<｜tool▁calls▁begin｜>",),
        (),
        "deepseekv31",
        special_marks=True,
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        _mistral,
        ("[TOOL_CALLS]",),
        ("mistral", "mixtral"),
        "mistral",
        special_marks=True,
    ),
    "harmony": ChannelToolFormat(
        ("<|start|>assistant to=",),
        _harmony,
        ("<|channel|>", "functions"),
        ("gpt_oss",),
        "gpt-oss",
        special_marks=True,
    ),
    "llama": ToolFormat(
        ('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{"type"'),
        _llama,
        ('"parameters"', "<|eot_id|>"),
        ("llama",),
        "llama3",
        at_start=True,
    ),
    "glm4": ToolFormat(
        (), _glm4, ("<|observation|>", "<|assistant|>"), ("glm", "glm4"), "", at_start=True
    ),
}


def tool_format(template: str | None, family: str) -> ToolFormat | None:
    """Return a model's format of calls, by its chat template, else by its family; None if neither
    tells.

    Args:
        template: None for a model without one, which has no tools.
        family: of `slime.models.family_name`.
    """
    if template is None:
        return None
    taught = (
        found for found in FORMATS.values() if all(mark in template for mark in found.in_template)
    )
    return next(taught, None) or next(
        (found for found in FORMATS.values() if family in found.families), None
    )


def chat_template(directory: Path) -> str | None:
    """Return the text of a model's chat template (all of them, where it has several), read without
    transformers."""
    for file in (directory / "chat_template.jinja", directory / "chat_template.json"):
        if file.is_file():
            named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
            return "\n".join(one.read_text(encoding="utf-8") for one in (file, *named))
    found = read_object(directory / "tokenizer_config.json").get("chat_template")
    if not found:
        return None
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def tool_schemas(tools: list[Any]) -> dict[str, Mapping[str, Any]]:
    """Return ``tools`` of a request, in OpenAI's form or bare, in the form for
    `ToolFormat.read`."""
    functions = (tool.get("function", tool) for tool in tools if isinstance(tool, Mapping))
    found = (
        (one.get("name"), one.get("parameters")) for one in functions if isinstance(one, Mapping)
    )
    return {str(name): schema if isinstance(schema, Mapping) else {} for name, schema in found}
