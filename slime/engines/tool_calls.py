"""Calls of tools in what a model writes: one row per way of writing them, and what is text and what is a call.

>>> FORMATS["hermes"].read('Let me look.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', ["f"], ended=True)
Reply(text='Let me look.', calls=(Call(name='f', arguments='{"x": 1}'),))

`ToolFormat.read` is a function of the text so far: as that grows, the reply's text only grows and its calls are only
added to, which is all that streaming needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.errors import UserError
from slime.models import family_of, read_hf_config


@dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is a JSON object as text, as OpenAI has it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What an answer says to people, and the calls in it."""

    text: str
    calls: tuple[Call, ...] = ()


#: The calls in a text that begins where the first of them does; ends with a ValueError where one is not complete.
Parse = Callable[[str], Iterator[Call]]


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls.

    Attributes:
        begins: what the first call begins with; (): the tool's name and a line break.
        at_start: calls are the whole answer, or there are none.
        parse: reads them.
        in_template: a chat template that has all of these teaches this way.
        families: of models that know it whatever their template says.
        sglang_parser: SGLang's name for it; "": it cannot read this way.
        special_marks: its marks are special tokens, so that they must not be left out of the text.
        text_arguments: chat templates want the arguments of former calls as text.
    """

    begins: tuple[str, ...]
    parse: Parse
    in_template: tuple[str, ...]
    families: tuple[str, ...]
    sglang_parser: str
    at_start: bool = False
    special_marks: bool = False
    text_arguments: bool = False

    def read(self, text: str, tools: Collection[str], *, ended: bool) -> Reply:
        """Text and complete calls of an answer, or of its beginning. What follows the first call is calls.

        Args:
            tools: names that may be called. Without marks only an answer that begins with one of them is a call.
            ended: nothing will follow; until then, what may become a call is held back. What looked like a call and
                cannot be read is text then.
        """
        marks = self.begins or tuple(f"{name}\n" for name in tools)
        start = self._start(text, marks)
        if start is None:
            return Reply(text if ended else text[: len(text) - self._held(text, marks)])
        calls = tuple(_until_broken(self.parse(text[start:])))
        if self.at_start and calls and calls[0].name not in tools:
            calls = ()
        return Reply(text if ended and not calls else text[:start].rstrip(), calls)

    def _start(self, text: str, marks: tuple[str, ...]) -> int | None:
        """Where the first call begins."""
        if self.at_start:
            lead = len(text) - len(text.lstrip())
            return lead if any(text.startswith(mark, lead) for mark in marks) else None
        found = [at for mark in marks if (at := text.find(mark)) >= 0]
        return min(found, default=None)

    def _held(self, text: str, marks: tuple[str, ...]) -> int:
        """Characters at the end that a call may begin with, and blanks before them, which a call takes away."""
        if self.at_start:
            start = text.lstrip()
            return len(text) if any(mark.startswith(start) for mark in marks) else 0
        for count in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
            if any(mark.startswith(text[-count:]) for mark in marks):
                return len(text) - len(text[:-count].rstrip())
        return len(text) - len(text.rstrip())


def _until_broken(calls: Iterator[Call]) -> Iterator[Call]:
    try:
        for call in calls:
            orjson.dumps([[[[[[[[call.name, orjson.loads(call.arguments)]]]]]]]])  # within an answer, as objects
            yield call
    except (ValueError, orjson.JSONEncodeError, RecursionError):
        return  # cut short, no JSON, half a character (\ud83d), or brackets without end: what came before it counts


# -- the ways ------------------------------------------------------------------------------------------------------


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no JSON, or too large")
    return value


#: As strict as those who will read the arguments: by itself it takes NaN and Infinity.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _object(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, blanks before it skipped, and where it ends.

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
    if isinstance(arguments, str):  # written as text once more
        arguments = _DECODER.decode(arguments)
    return Call(value["name"], _arguments(arguments))


def _arguments(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return json.dumps(value, ensure_ascii=False)


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """What stands between each pair of marks. A model that repeats the first one to its limit costs no more than any
    other."""
    at = 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[start + len(begin) : stop]
        at = stop + len(end)


def _hermes(text: str) -> Iterator[Call]:
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        yield _call(_DECODER.decode(inner))


def _glm45(text: str) -> Iterator[Call]:
    """<tool_call>name <arg_key>k</arg_key><arg_value>v</arg_value> … </tool_call>; values are JSON, or else text."""
    for inner in _between(text, "<tool_call>", "</tool_call>"):
        name = inner.partition("<arg_key>")[0].strip()
        values: dict[str, Any] = {}
        for pair in _between(inner, "<arg_key>", "</arg_value>"):
            key, closed, rest = pair.partition("</arg_key>")
            before, opened, value = rest.partition("<arg_value>")
            if closed and opened and not before.strip():
                values[key.strip()] = _json_or_text(value)
        yield Call(name, _arguments(values))


def _json_or_text(value: str) -> Any:
    try:
        return _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def _llama(text: str) -> Iterator[Call]:
    """{"name": …, "parameters": {…}}, several parted by semicolons."""
    at = 0
    while text[at:].strip():
        value, at = _object(text, at)
        yield _call(value)
        at += len(re.match(r"[\s;]*", text[at:]).group())  # type: ignore[union-attr]  # it matches nothing, too


def _glm4(text: str) -> Iterator[Call]:
    """The tool's name on a line of its own, its arguments below it."""
    name, found, rest = text.strip().partition("\n")
    if found and rest.strip():
        value, _ = _object(rest, 0)  # a call that was streamed cannot be taken back for what follows it
        yield Call(name.strip(), _arguments(value))


def _deepseek(text: str) -> Iterator[Call]:
    """V3: function<sep>name, then a block of JSON; V3.1: name<sep>{…}."""
    for inner in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        kind, _, rest = inner.partition("<｜tool▁sep｜>")
        name, fence, block = rest.rstrip().partition("\n```json\n")
        if fence and block.endswith("\n```"):
            yield Call(name.strip(), _arguments(_DECODER.decode(block.removesuffix("\n```"))))
        else:
            yield Call(kind.strip(), _arguments(_DECODER.decode(rest)))


def _mistral(text: str) -> Iterator[Call]:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} for each, also with [ARGS] between."""
    for part in text.split("[TOOL_CALLS]")[1:]:
        name = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?", part)
        value, _ = _object(part, name.end() if name else 0)
        if name:
            yield Call(name.group(1), _arguments(value))
        else:
            yield from map(_call, value if isinstance(value, list) else [value])


_DEEPSEEK_BEGINS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
#: Where the marks of several are in a template, the first of them is meant.
FORMATS: dict[str, ToolFormat] = {
    "glm45": ToolFormat(("<tool_call>",), _glm45, ("<tool_call>", "<arg_key>"), ("glm4_moe",), "glm45"),
    "hermes": ToolFormat(("<tool_call>",), _hermes, ("<tool_call>",), ("qwen2", "qwen3", "qwen3_moe"), "qwen25"),
    "deepseek": ToolFormat(  # V3, R1
        _DEEPSEEK_BEGINS, _deepseek, ("<｜tool▁calls▁begin｜>", "```json"), ("deepseek_v3",),
        "deepseekv3", special_marks=True, text_arguments=True,
    ),
    "deepseek31": ToolFormat(  # of the same family and other templates; SGLang reads each with a parser of its own
        _DEEPSEEK_BEGINS, _deepseek, ("<｜tool▁calls▁begin｜>",), (),
        "deepseekv31", special_marks=True, text_arguments=True,
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",), _mistral, ("[TOOL_CALLS]",), ("mistral",), "mistral", special_marks=True
    ),
    "llama": ToolFormat(
        ('{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{"type"'), _llama, ('"parameters"', "<|eot_id|>"),
        ("llama",), "llama3", at_start=True,
    ),
    "glm4": ToolFormat((), _glm4, ("<|observation|>", "<|assistant|>"), ("glm4",), "", at_start=True),
}  # fmt: skip


def tool_format(directory: Path, template: str | None = None) -> ToolFormat | None:
    """How a model writes calls, by its chat template, else by its family; None where neither tells.

    Args:
        template: instead of the directory's own.
    """
    template = template or chat_template(directory)
    if template is None:
        return None
    taught = (found for found in FORMATS.values() if all(mark in template for mark in found.in_template))
    try:
        family = family_of(read_hf_config(directory)).name
    except UserError:  # a model that only another engine knows
        family = ""
    return next(taught, None) or next((found for found in FORMATS.values() if family in found.families), None)


def chat_template(directory: Path) -> str | None:
    """The text of a model's chat template (all of them, where it has several), read without transformers."""
    for file in (directory / "chat_template.jinja", directory / "chat_template.json"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    found = orjson.loads(file.read_bytes()).get("chat_template") if file.is_file() else None
    return None if not found else found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def tool_names(tools: list[Any]) -> list[str]:
    """Names in ``tools`` of a request, of OpenAI's form or bare."""
    functions = (tool.get("function", tool) for tool in tools)
    return [str(function.get("name")) for function in functions if isinstance(function, Mapping)]
