"""Normalise every wire form of a conversation to the messages that `slime.prompts.chat_template`
renders.

Wire forms: OpenAI's chat completions and Responses, Anthropic's messages, ShareGPT
(``from``/``value``), Gemini's ``parts``, a whole conversation as JSON text, and each of these as
columnar files store it.

A normalised message has ``role``, ``content`` (text), and optionally: ``reasoning_content`` (text),
``tool_calls`` (``id``, ``type``, ``function`` with ``name`` and ``arguments`` as an object),
``tool_call_id``, ``name``, and ``step_loss_mask`` 0 for a turn that is not trained. Other keys stay
as they are: a template may read them. Reading normalised messages changes nothing.

>>> read_messages([{"from": "human", "value": "hi"},
...                {"role": "assistant", "content": [{"text": "hello"}]}])
[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}]
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.errors import UserError, a_type
from slime.files import repeated_key

Messages = list[dict[str, Any]]

#: Names that other systems give to roles → ours. Other roles stay unchanged.
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_OUR_ROLES = ("system", "developer", "user", "assistant", "tool")
#: Keys that name the speaker, and keys of the content.
_SPEAKERS = ("role", "from")
_SAID = ("content", "value", "parts", "tool_calls", "function_call")
#: Roles of assistant messages whose text is a tool call (ShareGPT).
_CALLING_ROLES = ("function_call", "tool_call")
#: Keys under which systems keep reasoning, in order of preference.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Keys that tell whether an assistant turn is trained; 0 and false: it is not.
LOSS_KEYS = ("step_loss_mask", "weight", "loss", "loss_mask", "train", "trainable")
#: Keys under which an object has its messages, and keys that hold messages or words.
_MESSAGES = ("messages", "conversations", "conversation")
_TALKS = (*_MESSAGES, "prompt", "chat", "dialog", "dialogue", "turns")
#: Keys under which it has answers beside them.
_ANSWERS = ("completion", "response", "answer", "chosen", "rejected")
#: Keys of a normalised message.
_KEYS = (
    "role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "step_loss_mask"
)  # fmt: skip
#: Keys of wire forms that are dropped after the message is read.
_CONSUMED = ("from", "value", "parts", "function_call", *REASONING_KEYS, *LOSS_KEYS)
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text")
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")
_MEDIA = ("image", "audio", "video", "file", "document", "pdf")
_ITEMS = ("function_call", "function_call_output", "reasoning", "message")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
#: Keys under which other systems keep the words of a message.
_FOREIGN_WORDS = ("text", "message", "utterance", "body", "response", "completion", "refusal")
#: Keys of an item or a part that are read, or that only concern the server that wrote it.
_PART_KEYS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "reasoning", "reasoning_text", "thought"),
        *("id", "call_id", "tool_use_id", "name", "content", "output", "status", "role"),
        *("arguments", "parameters", "input", "args", "signature", "cache_control"),
        *("functionCall", "function_call", "functionResponse", "function_response"),
        *("image", "image_url", "source", "url", "path", "base64", "bytes", "data", "detail"),
    }
)
#: Keys of a call that hold its arguments; "args" is LangChain's.
_ARGUMENTS = ("arguments", "parameters", "input", "args")
#: Parts of content that are images.
_IMAGE_PARTS = ("image", "image_url", "input_image")
#: Marks the place of an image from a row's column in a text.
IMAGE_MARK = "<image>"
#: Keys that hold the words of a message, in order of preference.
_WORDS = ("content", "value", "parts")
_LOOKS_LIKE_PARTS = re.compile(
    r"""\s*\[\s*\{[^{]*?['"]type['"]\s*:\s*['"](?:\w*(?:text|image|audio|video)\w*|thinking|"""
    r"""reasoning)['"]""",
    re.DOTALL,
)
#: Messages that `repr` wrote of a NumPy array.
_ARRAY = re.compile(r"""\s*(?:np\.)?array\(\[\s*\{[^{}]*?['"](?:role|from)['"]\s*:""", re.DOTALL)
_LOOKS_LIKE_MESSAGES = re.compile(
    r"""\s*\[\s*\{.*?['"](role|from|content|value)['"]\s*:""", re.DOTALL
)


class ConversationError(UserError):
    """A message, a call or a tool cannot be understood.

    Args:
        kind: a noun phrase without places and values; rows of one kind are counted together.
        where: the place, e.g. ``messages[3].tool_calls[0]``.
        detail: what was found there.
    """

    def __init__(self, kind: str, where: str, detail: str = "", fix: str = "") -> None:
        super().__init__(f"{where}: {kind}", detail, fix)
        self.args = (kind, where, detail, fix)  # pickling calls the class with them
        self.kind = kind
        self.where = where
        self.detail = detail

    def sentence(self) -> str:
        """Return the error on one line, for a server's answers."""
        return f"{self.what}: {self.detail}" if self.detail else self.what


@dataclass
class ImageParts:
    """Collects the images of messages for a model that reads images.

    Args:
        placeholder: text that replaces each image.
        reads_marks: `IMAGE_MARK` in a text also marks an image.
    Attributes:
        sources: of each image, in order: text (a path, URL, data URI or base64), bytes, an object
            with "bytes" or "path", or None for the next image of the row's column.
    """

    placeholder: str
    reads_marks: bool = False
    sources: list[Any] = field(default_factory=list)

    def text(self, text: str) -> str:
        """Return a text with placeholders for its marks."""
        if not self.reads_marks or IMAGE_MARK not in text:
            return text
        self.sources += [None] * text.count(IMAGE_MARK)
        return text.replace(IMAGE_MARK, self.placeholder)

    def part(self, part: Mapping[str, Any]) -> str:
        """Record the image of a part; return its placeholder."""
        source = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
        if isinstance(source, Mapping) and "bytes" not in source and "path" not in source:
            source = source.get("url") or source.get("data")
        self.sources.append(source)
        return self.placeholder


#: Keys of an image part that may hold the image: those of Hugging Face, OpenAI and Anthropic.
_IMAGE_KEYS = ("image", "image_url", "source", "url", "path", "base64", "bytes", "data")


# -- a conversation --------------------------------------------------------------------------------


def conversation_in(value: Any, where: str = "messages") -> tuple[list[Any], Any] | None:
    """Return the messages, still in their wire form, and the tools of a value that is a
    conversation; else None.

    A list of objects, an object with ``messages``, ``conversations`` or ``prompt`` (and ``tools``),
    one message, a struct of lists (what columnar files make of a sequence of structs), or any of
    these as JSON text.

    Raises:
        ConversationError: the text looks like a conversation and is not valid JSON, or the object
            has answers beside its messages.
    """
    if isinstance(value, str):
        value = _from_text(value, where)
    if isinstance(value, Mapping):
        for key in _TALKS:
            if value.get(key) is not None and (key in _MESSAGES or _are_spoken(value[key])):
                _check_only_talk(value, key, where)
                inner = conversation_in(value[key], where)
                if inner is None:
                    return None
                messages = _with_system(inner[0], value.get("system"), where)
                return messages, inner[1] or value.get("tools")
        if any(isinstance(value.get(key), list) for key in ("role", "from")):
            return _of_columns(value, where), None
        return ([value], None) if "role" in value or "from" in value else None
    is_list = isinstance(value, list | tuple) and bool(value)
    if is_list and all(isinstance(item, Mapping) for item in value):
        return list(value), None
    return None


def _are_spoken(value: Any) -> bool:
    """Tell whether a value is a list of messages with their speakers."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(one, Mapping) and _speaks(one) for one in value)
    )


def _check_only_talk(value: Mapping[str, Any], key: str, where: str) -> None:
    """Check that an object has one conversation.

    Raises:
        ConversationError: there are answers under another key, which would be left out.
    """
    others = [name for name in _ANSWERS if value.get(name)]
    others += [name for name in _TALKS if name != key and _are_spoken(value.get(name))]
    if others:
        raise ConversationError(
            "an object with messages and answers under several keys",
            where,
            f"its keys are: {', '.join(map(str, value))}",
            f"write {', '.join(map(repr, others))} into columns of their own, or at the end of "
            f"'{key}'",
        )


def _with_system(messages: list[Any], system: Any, where: str) -> list[Any]:
    """Put the system prompt that stands beside the messages of an object before them.

    Raises:
        ConversationError: the messages have another one.
    """
    if not isinstance(system, str) or not system.strip():
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if str(first.get("role", first.get("from"))).lower() != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content", first.get("value")) == system:
        return messages
    raise ConversationError(
        "two system prompts: one beside the messages, and another in them",
        where,
        f"beside them: {system[:80]!r}",
        "keep one of them",
    )


def _of_columns(value: Mapping[str, Any], where: str) -> list[Any]:
    """Return the messages of a struct of lists.

    Raises:
        ConversationError: the lists differ in length.
    """
    columns = {key: column for key, column in value.items() if isinstance(column, list)}
    sizes = {key: len(column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ConversationError(
            "lists of different lengths in place of messages",
            where,
            ", ".join(f"{size} of {key}" for key, size in sizes.items()),
            "write as many of each as there are messages",
        )
    return [dict(zip(columns, item)) for item in zip(*columns.values(), strict=True)]


def _listed(value: Mapping[str, Any], where: str) -> list[Any]:
    """Return the parts or calls of a single one, or of a struct of lists.

    Raises:
        ConversationError: as `_of_columns`.
    """
    are_lists = bool(value) and all(isinstance(column, list) for column in value.values())
    return _of_columns(value, where) if are_lists else [value]


def _is_void(value: Any) -> bool:
    """Tell whether there is nothing but null in a record, at any depth."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_void, value.values()))
    return value is None


def _from_text(text: str, where: str) -> Any:
    """Parse text that is a JSON list or object of messages; None for other text."""
    start = text.lstrip()[:1]
    if start == '"':  # a column that was encoded twice
        inner = _text_in(text)
        return None if inner is None else _from_text(inner, where)
    if start not in ("[", "{") and not _ARRAY.match(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        is_almost = _LOOKS_LIKE_MESSAGES.match(text) or _ARRAY.match(text)
        if not is_almost and not _are_lines_of_messages(text):
            return None
        raise ConversationError(
            "a conversation as text that is not valid JSON",
            where,
            f"{error}: {text[:80]!r}",
            "write it with json.dumps, not with str()",
        ) from error
    if isinstance(found, Mapping) and not any(isinstance(found.get(key), str) for key in _SPEAKERS):
        return found
    items = found if isinstance(found, list) else [found]
    are_messages = all(
        isinstance(item, Mapping)
        and (not item.keys().isdisjoint(_SPEAKERS) or item.get("type") in _ITEMS)
        for item in items
    )
    return found if are_messages and any(map(_speaks, items)) else None


def _are_lines_of_messages(text: str) -> bool:
    """Tell whether each of several lines is the JSON text of a message."""
    lines = text.strip().splitlines()
    try:
        items = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return False
    return len(items) > 1 and all(isinstance(item, Mapping) and _speaks(item) for item in items)


def _text_in(text: str) -> str | None:
    """Decode the JSON text of a list or an object that was encoded once more; None for other
    text."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) and found.lstrip()[:1] in ("[", "{") else None


def _speaks(item: Mapping[str, Any]) -> bool:
    """Tell whether somebody says something in it: other JSON has roles and places of departure,
    too."""
    role = str(item.get("role", item.get("from"))).lower()
    return role in (*_ROLES, *_OUR_ROLES) and not item.keys().isdisjoint(_SAID)


def read_messages(
    messages: Iterable[Any],
    *,
    where: str = "messages",
    tools: list[dict[str, Any]] | None = None,
    drops_nulls: bool = False,
    images: ImageParts | None = None,
) -> Messages:
    """Normalise messages of any wire form.

    Args:
        where: name of the list, for errors.
        tools: as `read_tools` returns them: their schemas say where null is a value.
        drops_nulls: keys of calls' arguments (given as objects, not as JSON text) that are null are
            absent, unless the tool's schema allows null there. Columnar files fill each record up
            to the union of all keys. For rows of data, where words under the key of another system,
            a key twice in a call's arguments, and parts of content in an order that templates do
            not keep are refused too.
        images: collects images; None: they are refused.
    Raises:
        ConversationError: a message cannot be understood, or has images or other media; names the
            place.
    """
    reader = _MessageReader(_schemas(tools), drops_nulls, images)
    for number, message in enumerate(messages):
        reader.add(message, f"{where}[{number}]")
    return reader.messages


def read_text(content: Any, where: str, *, join: str = "") -> str:
    """Join content that is text or a list of text parts.

    Args:
        join: separator between two parts.
    Raises:
        ConversationError: anything else.
    """
    return _MessageReader({}, False).content(content, where, role="user", join=join).text


def reading_loss_keys(message: Mapping[str, Any], where: str) -> int | None:
    """0 or 1 from the `LOSS_KEYS` of a message; None if it has none.

    Raises:
        ConversationError: a value is neither 0 nor 1, or keys contradict each other.
    """
    said: dict[str, int] = {}
    for key in LOSS_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ConversationError(
                f"a '{key}' that is neither 0 nor 1",
                where,
                f"found {value!r}; a turn is trained or it is not",
                f"write 0 or 1 (false or true), or leave '{key}' out",
            )
        said[key] = int(value)
    if len(set(said.values())) > 1:
        given = ", ".join(f"{key}: {value}" for key, value in said.items())
        raise ConversationError(
            "keys of the loss that contradict each other", where, given, "keep one of them"
        )
    return next(iter(said.values()), None)


class _MessageReader:
    """Collects messages. One wire message may become several, and several items of Responses may
    become one."""

    def __init__(
        self, schemas: Mapping[str, Any], drops_nulls: bool, images: ImageParts | None = None
    ) -> None:
        self.messages: Messages = []
        self._images = images
        self._schemas = schemas
        self._drops_nulls = drops_nulls
        self._open: dict[str, Any] | None = None
        """The assistant message to which further items of Responses are added."""

    def add(self, message: Any, where: str) -> None:
        if not isinstance(message, Mapping):
            raise ConversationError(
                "a message that is not an object",
                where,
                f"found {_named(message)}",
                "a message is {'role': …, 'content': …}",
            )
        given = {key: value for key, value in message.items() if value is not None}
        kind = given.get("type")
        is_item = (
            kind in _ITEMS and ("role" not in given or kind == "message") and "from" not in given
        )
        if is_item and (kind in ("reasoning", "function_call") or given.get("role") == "assistant"):
            self._add_item(given, where)
            return
        self._open = None
        if is_item and kind == "function_call_output":
            output = self.content(_list_of_parts(given.get("output")), where, role="tool")
            self.messages.append(
                {"role": "tool", "content": output.text} | _pick(given, call_id="tool_call_id")
            )
            return
        if is_item:
            given.pop("type")
        elif isinstance(kind, str) and "role" not in given and "from" not in given:
            raise ConversationError(
                f"an item of the type {kind!r}, which is not supported",
                where,
                f"its keys are: {', '.join(map(str, given))}",
                "write it as a message, {'role': …, 'content': …}, or remove these rows",
            )
        self._add_message(given, where)

    def _add_item(self, item: dict[str, Any], where: str) -> None:
        """Add an item; consecutive reasoning, text and calls form one assistant message."""
        said = self._open
        kind = item["type"]
        if said is not None and kind != "function_call":
            has_thought = kind == "reasoning" and "reasoning_content" in said
            if said["content"] or "tool_calls" in said or has_thought:
                said = None
        if said is None:
            said = {"role": "assistant", "content": ""}
            self._open = said
            self.messages.append(said)
        if kind == "reasoning":
            content = self.content(item.get("content"), where, role="assistant")
            said["reasoning_content"] = content.text + content.reasoning
        elif kind == "message":
            said["content"] = self.content(item.get("content"), where, role="assistant").text
        else:
            call = {"id": item.get("call_id")}
            call |= {key: item.get(key) for key in ("name", "arguments")}
            said.setdefault("tool_calls", []).append(self._call(call, where))

    def _add_message(self, given: dict[str, Any], where: str) -> None:
        if self._drops_nulls:
            _check_said_once(given, where)
        wire_role = given.get("role", given.get("from"))
        wire_role = wire_role.strip() if isinstance(wire_role, str) else None
        if not wire_role:
            keys = ", ".join(map(str, given)) or "none"
            raise ConversationError(
                "a message without a role",
                where,
                f"its keys are: {keys}",
                "a message is {'role': …, 'content': …}",
            )
        role = _ROLES.get(wire_role.lower(), wire_role.lower())
        if role not in _OUR_ROLES:
            role = wire_role
        wire = next(
            (given[key] for key in _WORDS if given.get(key) not in _NOTHING),
            given.get("content", given.get("value", _list_of_parts(given.get("parts")))),
        )
        if role != "tool" and self._drops_nulls:
            wire = _parts_as_text(wire, where, role)
        calls = self._calls(given, where)
        if wire_role.lower() in _CALLING_ROLES and isinstance(wire, str):
            calls = [*self._calls({"tool_calls": wire}, where), *calls]
            wire = None
        content = self.content(wire, where, role=role)
        said: dict[str, Any] = {"role": role, "content": content.text}
        reasoning = self._reasoning(given, content.reasoning, where)
        if reasoning:
            said["reasoning_content"] = reasoning
        calls = _each_once(calls, content.calls)
        if calls:
            said["tool_calls"] = calls
        for key in ("tool_call_id", "name"):
            if given.get(key) not in _NOTHING:
                said[key] = given[key]
        if self._drops_nulls and wire is None and not calls and not reasoning:
            _check_words(given, where)
        loss = reading_loss_keys(given, where)
        if role == "assistant" and loss == 0:
            said["step_loss_mask"] = 0
        # only assistant turns are trained: keep the keys, so that they are reported as unread
        elif role != "assistant" and loss == 1:
            said |= {key: given[key] for key in LOSS_KEYS[1:] if key in given}
        known = (*_KEYS, *_CONSUMED)
        said |= {
            key: value for key, value in given.items() if key not in known and value not in _NOTHING
        }
        self.messages += content.results
        if not content.results or content.has_text or reasoning or calls:
            self.messages.append(said)

    @staticmethod
    def _reasoning(given: Mapping[str, Any], in_parts: str, where: str) -> str:
        found = {"parts of content": in_parts} if in_parts else {}
        for key in REASONING_KEYS:
            value = given.get(key)
            if value in _NOTHING:
                continue
            if not isinstance(value, str):
                raise ConversationError(
                    f"a '{key}' that is not text", where, f"found {_named(value)}"
                )
            found[key] = value
        if len({text.strip() for text in found.values()}) > 1:
            kind = "reasoning in several places that differ"
            raise ConversationError(kind, where, f"found in {', '.join(found)}", "keep one of them")
        return next(reversed(found.values()), "")

    # -- content -----------------------------------------------------------------------------------

    def content(self, content: Any, where: str, *, role: str, join: str = "") -> _Content:
        found = _Content()
        if content is None:
            return found
        if isinstance(content, list | tuple):
            content = [_of_gemini(part) for part in content]
        if isinstance(content, str):
            found.add(self._text(content))
            return found
        if role == "tool" and not _is_parts(content):
            value = without_nulls(content) if self._drops_nulls else content
            try:
                found.add(json.dumps(value, ensure_ascii=False))
            except (TypeError, ValueError) as error:
                raise ConversationError(
                    "a tool's result that JSON cannot write", where, str(error)
                ) from error
            return found
        parts = _listed(content, where) if isinstance(content, Mapping) else content
        if not isinstance(parts, list | tuple):
            raise ConversationError(
                "content that is neither text nor a list of parts",
                where,
                f"found {_named(content)}",
                "write it as a string, or a list of parts such as {'type': 'text', 'text': …}",
            )
        last = ""
        for number, part in enumerate(parts):
            self._part(part, f"{where}.content[{number}]", found, join)
            kind = _place_of(part)
            if self._drops_nulls and kind and last and _PLACES.get(kind, 1) < _PLACES.get(last, 1):
                raise ConversationError(
                    f"a part of the type {kind!r} behind one of the type {last!r}",
                    f"{where}.content[{number}]",
                    "chat templates write results of tools or reasoning, then text, then calls",
                    "write what follows as a message of its own, or the reasoning between the "
                    "model's marks within one text",
                )
            last = kind or last
        return found

    def _part(self, part: Any, where: str, found: _Content, join: str) -> None:
        if isinstance(part, str):
            found.add(self._text(part), join)
            return
        if not isinstance(part, Mapping):
            raise ConversationError(
                "a part of content that is not an object", where, f"found {_named(part)}"
            )
        given = {key: value for key, value in part.items() if value is not None}
        kind = given.get("type")
        if kind is None:
            media = next((key for key in given if _is_media(key)), None)
            kind = media or ("text" if "text" in given else None)
        if kind in _TEXT_PARTS and given.get("thought") is True:  # Gemini's
            kind = "reasoning"
        if kind in _TEXT_PARTS:
            text = given.get("text", "")
            words = [key for key, value in given.items() if key != "type" and value not in _NOTHING]
            if "text" not in given and any(isinstance(given[key], str) for key in words):
                raise ConversationError(
                    "a part of text whose words are under another key",
                    where,
                    f"its keys are: {', '.join(given)}",
                    "write it as {'type': 'text', 'text': …}",
                )
            if not isinstance(text, str):
                raise ConversationError(
                    "a part of text that is not text", where, f"found {_named(text)}"
                )
            found.add(self._text(text), join)
        elif kind in _IMAGE_PARTS and self._images is not None:
            found.has_image = True
            found.add(self._images.part(given), join)
        elif kind == "refusal":
            found.add(str(given.get("refusal", "")), join)
        elif kind in _REASONING_PARTS:
            thought = given.get(kind, given.get("text", ""))
            inner = self.content(thought, where, role="assistant")
            found.reasoning += inner.text
        elif kind == "redacted_thinking":
            return
        elif kind == "tool_use":
            found.calls.append(self._call(given, where))
        elif kind == "tool_result" and found.has_image:
            raise ConversationError(
                "an image before a tool result, and results come first",
                where,
                "",
                "write results of tools first in a message",
            )
        elif kind == "tool_result":
            output = _list_of_parts(given.get("content"))
            inner = self.content(output, where, role="tool", join="\n")
            result = {"role": "tool", "content": inner.text} | _pick(
                given, tool_use_id="tool_call_id", name="name"
            )
            found.results.append(result)
        elif isinstance(kind, str) and _is_media(kind):
            raise ConversationError(
                f"a part of the type {kind!r}: only text is taken here",
                where,
                "audio, video and files are not supported in this version, and images where the "
                "model or the run reads none (--multimodal-keys)",
                "remove these rows, or describe what they show in words",
            )
        else:
            keys = ", ".join(map(str, given)) or "none"
            shown = f"of the type {kind!r}" if kind else "without a type"
            raise ConversationError(
                f"a part {shown}: only text is taken here",
                where,
                f"its keys are: {keys}",
                "write text as {'type': 'text', 'text': …}, and calls under 'tool_calls' of the "
                "message",
            )

    def _text(self, text: str) -> str:
        return text if self._images is None else self._images.text(text)

    # -- calls of tools ----------------------------------------------------------------------------

    def _calls(self, given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        calls = _decoded(given.get("tool_calls"), f"{where}.tool_calls")
        legacy = _decoded(given.get("function_call"), f"{where}.function_call")
        found = _listed(calls, f"{where}.tool_calls") if isinstance(calls, Mapping) else calls or []
        if not isinstance(found, list | tuple):
            raise ConversationError(
                "tool_calls that are not a list", f"{where}.tool_calls", f"found {_named(calls)}"
            )
        if self._drops_nulls:
            found = [call for call in found if not _is_void(call)]
        read = [
            self._call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(found)
        ]
        if isinstance(legacy, Mapping) and any(value is not None for value in legacy.values()):
            read = _each_once(read, [self._call(legacy, f"{where}.function_call")])
        return read

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        call = _decoded(call, where)
        function = call.get("function") if isinstance(call, Mapping) else None
        if function is None and isinstance(call, Mapping):
            function = call
        function = _decoded(function, where)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConversationError(
                "a call without the name of its tool",
                where,
                f"found {str(call)[:200]}",
                "a call is {'type': 'function', 'function': {'name': …, 'arguments': …}}",
            )
        arguments: Any = next(
            (function[key] for key in _ARGUMENTS if function.get(key) is not None), {}
        )
        unread = [key for key, value in function.items() if isinstance(value, Mapping)]
        if unread and function.keys().isdisjoint(_ARGUMENTS):
            raise ConversationError(
                "a call whose arguments are under another name",
                where,
                f"that of {name} has {', '.join(map(str, unread))}",
                f"name them {_ARGUMENTS[0]}",
            )
        if isinstance(arguments, str):
            kind = "arguments of a call that are not valid JSON"
            once = _each_key_once if self._drops_nulls else None
            arguments = _json(arguments, kind, where, once) if arguments.strip() else {}
        elif self._drops_nulls:
            arguments = without_nulls(arguments, self._schemas.get(name, {}))
        if fault := _not_of_json(arguments):
            raise ConversationError(
                "arguments of a call that JSON cannot write",
                where,
                f"those of {name} have {fault}",
                "write text, or a number, in its place",
            )
        if not isinstance(arguments, Mapping):
            raise ConversationError(
                "arguments of a call that are not a JSON object",
                where,
                f"those of {name} are {_named(arguments)}: {str(arguments)[:200]}",
                "write them as an object, or as the JSON text of one, encoded once",
            )
        given_id = call.get("id")
        read: dict[str, Any] = {} if given_id in _NOTHING else {"id": given_id}
        return read | {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


#: Parts of a message in the order in which a template writes them; all others are text.
_PLACES = dict.fromkeys((*_REASONING_PARTS, "tool_result"), 0) | {"tool_use": 2}


def _of_gemini(part: Any) -> Any:
    """Return a call or a result of a tool in Gemini's form as a block of Anthropic; other parts as
    they are."""
    given = part if isinstance(part, Mapping) else {}
    call = given.get("functionCall") or given.get("function_call")
    if isinstance(call, Mapping):
        return {"type": "tool_use", **call}
    result = given.get("functionResponse") or given.get("function_response")
    if isinstance(result, Mapping):
        known = _pick(result, id="tool_use_id", name="name", response="content")
        return {"type": "tool_result", **known}
    return part


def _place_of(part: Any) -> str:
    """Return the type of a part, as far as its place in a message matters; "" if it is blank."""
    if isinstance(part, str):
        return "text" if part.strip() else ""
    kind = "reasoning" if part.get("thought") is True else str(part.get("type") or "text")
    is_blank = kind in _TEXT_PARTS and not str(part.get("text") or "").strip()
    return "" if is_blank or kind == "redacted_thinking" else kind


def _check_said_once(given: Mapping[str, Any], where: str) -> None:
    """Check that the keys of two wire forms in one message do not contradict each other.

    Raises:
        ConversationError: they do.
    """
    roles = {_ROLES.get(name, name) for name in _names_of(given, _SPEAKERS)}
    words = {_plain(given[key]) for key in _WORDS if given.get(key) not in _NOTHING}
    if len(roles) < 2 and len(words) < 2:
        return
    keys = _SPEAKERS if len(roles) > 1 else _WORDS
    found = ", ".join(f"'{key}': {given[key]!r:.60}" for key in keys if key in given)
    raise ConversationError(
        "a message with several keys for one thing, which differ", where, found, "keep one of them"
    )


def _plain(content: Any) -> str:
    """Return the words of content for a comparison; a part that is not text counts as a word."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text", part) if isinstance(part, Mapping) else part for part in parts)
    return "".join(map(str, texts)).strip()


def _names_of(given: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [given[key].strip().lower() for key in keys if isinstance(given.get(key), str)]


def _parts_as_text(content: Any, where: str, role: str) -> Any:
    """Decode content that is the JSON text of a list of parts, as columnar files hold it; return
    other content as it is.

    Raises:
        ConversationError: it is a list of parts that `str` wrote.
    """
    if not isinstance(content, str) or not _LOOKS_LIKE_PARTS.match(content):
        return content
    for decode in (json.loads, ast.literal_eval):
        try:
            parts = decode(content)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if not _are_parts(parts, with_media=role != "assistant"):
            return content
        if decode is json.loads:
            return parts
        raise ConversationError(
            "content that is a list of parts as Python's text",
            where,
            f"found {content[:80]!r}",
            "write it with json.dumps, not with str()",
        )
    return content


def _are_parts(value: Any, *, with_media: bool) -> bool:
    """Tell whether a decoded text is a list of parts. Media count in a question alone: an answer
    may well be JSON with pictures in it."""
    if not isinstance(value, list) or not value:
        return False
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind in (*_TEXT_PARTS, *_REASONING_PARTS)
        if is_text and not isinstance(part.get("text", part.get(kind)), str):
            return False
        if not is_text and not (with_media and isinstance(kind, str) and _is_media(kind)):
            return False
    return True


def _check_words(given: Mapping[str, Any], where: str) -> None:
    """Check a message without content.

    Raises:
        ConversationError: its words are under the key of another system.
    """
    key = next((key for key in _FOREIGN_WORDS if isinstance(given.get(key), str)), None)
    if key is not None and given[key].strip():
        raise ConversationError(
            "a message whose words are under another key",
            where,
            f"under '{key}': {given[key][:80]!r}",
            "write them under 'content'",
        )


@dataclass
class _Content:
    """Text, reasoning and calls in the parts of a message's content."""

    text: str = ""
    has_text: bool = False
    has_image: bool = False
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: Messages = field(default_factory=list)

    def add(self, text: str, join: str = "") -> None:
        self.text += (join if self.has_text else "") + text
        self.has_text = True


def _each_once(calls: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of one message, which clients write in the form of today and in that of another
    system."""
    functions = [call["function"] for call in calls]
    return calls + [call for call in again if call["function"] not in functions]


def _is_parts(content: Any) -> bool:
    """Tell whether a tool's result is a list of parts rather than a plain value."""
    if content == []:
        return False  # OpenAI's tool messages have at least one part
    parts = [content] if isinstance(content, Mapping) else content
    kinds = (*_TEXT_PARTS, "tool_result")
    return isinstance(parts, list | tuple) and all(
        isinstance(part, Mapping)
        and (
            part.get("type") in kinds
            or (isinstance(part.get("type"), str) and _is_media(part["type"]))
            or [key for key, value in part.items() if value is not None] == ["text"]
        )
        for part in parts
    )


def _list_of_parts(content: Any) -> Any:
    """Return the content of a protocol whose lists are lists of parts, also empty ones: [] says
    nothing."""
    return None if content == [] else content


def _is_media(kind: str) -> bool:
    words = re.split(r"[_\W]+", kind.lower())
    return any(word.removesuffix("s") in _MEDIA for word in words)


def _pick(given: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {
        ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) not in _NOTHING
    }


def _named(value: Any) -> str:
    return "null" if value is None else a_type(value)


def _decoded(value: Any, where: str) -> Any:
    """Decode JSON text: columnar files often hold nested values in this form."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    return _json(value, "calls or tools as text that is not valid JSON", where)


def _json(
    text: str,
    kind: str,
    where: str,
    pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    try:
        found = json.loads(
            text, parse_constant=_not_json, parse_float=_finite, object_pairs_hook=pairs_hook
        )
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be written
        return found
    except (ValueError, RecursionError) as error:
        raise ConversationError(
            kind,
            where,
            f"{error}: {text[:200]!r}",
            "write them as an object, or as the JSON text of one",
        ) from error


def _not_of_json(value: Any) -> str:
    """Name the first value in nested records that JSON has no form for; "" without one."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(_not_of_json, items)), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"the number {value}"
    return "" if value is None or isinstance(value, str | int) else _named(value)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_json(text)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key '{repeated_key(pairs)}' twice in one object")
    return found


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not a number that JSON can write")


# -- tools -----------------------------------------------------------------------------------------


def read_tools(
    value: Any, *, where: str = "tools", drops_nulls: bool = False
) -> list[dict[str, Any]]:
    """Tools in OpenAI's form ``{"type": "function", "function": {"name": …, "parameters": …}}``.

    They may be given in this form, bare, in Anthropic's form (``input_schema``), and together or
    singly as JSON text.

    Args:
        drops_nulls: keys that are null in nested records are absent.
    Raises:
        ConversationError: a tool is not a function with a name.
    """
    value = _decoded(value, where)
    if isinstance(value, Mapping):
        value = [value]
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ConversationError("tools that are not a list", where, f"found {_named(value)}")
    return [
        _tool(tool, f"{where}[{number}]", drops_nulls)
        for number, tool in enumerate(value)
        if tool is not None
    ]


def tools_of(metadata: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a sample from its metadata; None if it has none, or other values of the
    user's under their key."""
    try:
        return read_tools(metadata.get("tools")) or None
    except ConversationError:
        return None


def _tool(tool: Any, where: str, drops_nulls: bool) -> dict[str, Any]:
    tool = _decoded(tool, where)
    function = _decoded(tool.get("function"), where) if isinstance(tool, Mapping) else None
    is_bare = function is None and isinstance(tool, Mapping)
    if is_bare and tool.get("type") in (None, "function", "custom"):
        function = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            "a tool that is not a function with a name",
            where,
            f"found {str(tool)[:200]}",
            "a tool is {'type': 'function', 'function': {'name': …, 'parameters': …}}",
        )
    function = {
        key: value for key, value in function.items() if value is not None or not drops_nulls
    }
    for key in ("input_schema", "inputSchema"):  # Anthropic's, and MCP's
        if key in function:
            function["parameters"] = function.pop(key)
    if isinstance(function.get("parameters"), str):
        function["parameters"] = _decoded(function["parameters"], where)
    if drops_nulls:
        function = without_nulls(function)
    return {"type": "function", "function": function}


def _schemas(tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the schema of each tool's arguments, by name."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def without_nulls(value: Any, schema: Any = None, root: Any = None) -> Any:
    """Remove keys that are null, at any depth, except where ``schema`` allows null. Lists keep
    nulls.

    Args:
        root: where references in ``schema`` lead; None: in itself.

    Example:
        >>> without_nulls({"a": None, "b": {"c": None, "d": [None]}})
        {'b': {'d': [None]}}
        >>> without_nulls(
        ...     {"a": None, "b": None}, {"properties": {"a": {"type": ["string", "null"]}}})
        {'a': None}
    """
    root = schema if root is None else root
    branches = list(_branches(schema, root))
    if isinstance(value, Mapping):
        schemas = {key: {"anyOf": [_of_key(part, key) for part in branches]} for key in value}
        return {
            key: without_nulls(item, schemas[key], root)
            for key, item in value.items()
            if item is not None or allows_null(schemas[key], root)
        }
    if isinstance(value, list | tuple):
        items = {"anyOf": [part.get("items") for part in branches]}
        return [without_nulls(item, items, root) for item in value]
    return value


def allows_null(schema: Any, root: Any = None) -> bool:
    """Tell whether a JSON schema allows null as a type or value.

    Args:
        root: the schema that ``$ref`` refers to; default: ``schema``.
    """
    for part in _branches(schema, schema if root is None else root):
        kinds = part.get("type")
        values = part.get("enum")
        if "null" in ([kinds] if isinstance(kinds, str) else kinds or []):
            return True
        if part.get("nullable") is True or (isinstance(values, list) and None in values):
            return True
    return False


def _branches(schema: Any, root: Any, seen: tuple[int, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, the one that it refers to, and those that it combines."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    yield schema
    parts = [_referred(schema.get("$ref"), root)]
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        parts += choices if isinstance(choices, list) else []
    for part in parts:
        yield from _branches(part, root, (*seen, id(schema)))


def _referred(reference: Any, root: Any) -> Any:
    """Return the part of a schema that ``#/$defs/…`` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def _of_key(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of an object's value under a key."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


# -- keys that nothing reads -----------------------------------------------------------------------


def foreign_roles(messages: Messages) -> list[str]:
    """Return the roles that are none of those that chat templates usually know."""
    return sorted({message["role"] for message in messages}.difference(_OUR_ROLES))


def unread_keys(messages: Messages, template: str | None, *, writes_names: bool = True) -> set[str]:
    """Keys of normalised messages that neither this system nor the chat template reads.

    Args:
        template: its source; a key that it names (``.key``, ``'key'``) counts as read.
        writes_names: whether the template writes the ``name`` of a message that is not a tool's.
    """
    found = {
        f"{key} (of the role {message['role']})"
        for message in messages
        for key in LOSS_KEYS[1:]
        if key in message
    }
    found |= {
        f"tool_calls (of the role {message['role']})"
        for message in messages
        if message["role"] != "assistant" and message.get("tool_calls")
    }
    is_named = any("name" in message and message["role"] != "tool" for message in messages)
    if is_named and not writes_names:
        found.add("name")
    others = {key for message in messages for key in message if key not in (*_KEYS, *LOSS_KEYS)}
    return found | {
        key
        for key in others
        if not (
            template and re.search(rf"\.{re.escape(key)}\b|['\"]{re.escape(key)}['\"]", template)
        )
    }


def unread_part_keys(wire: Iterable[Any]) -> set[str]:
    """Keys in parts of content and in items of Responses that are not read.

    Args:
        wire: messages in their wire form, which `read_messages` takes.
    """
    found = set()
    for message in wire:
        role = str(message.get("role") or message.get("from")).strip().lower()
        if message.get("type") == "reasoning" and role == "none":
            found |= {f"{key} (of an item of reasoning)" for key in _unread(message)}
        content = message.get("content")
        if _ROLES.get(role, role) == "tool" and not _is_parts(content):
            continue  # a plain value
        for part in content if isinstance(content, list | tuple) else []:
            if not isinstance(part, Mapping):
                continue
            kind = part.get("type", "text")
            if kind in _TEXT_PARTS:
                media = (key for key in _IMAGE_KEYS if without_nulls(part.get(key)) not in _NOTHING)
                found |= {f"{key} (of a part of {kind})" for key in media}
            if kind == "redacted_thinking":
                found.add("data (of a part of redacted_thinking)")
            found |= {f"{key} (of a part of {kind})" for key in _unread(part)}
    return found


def _unread(part: Mapping[str, Any]) -> list[str]:
    given = (key for key, value in part.items() if value not in _NOTHING and value is not False)
    return [str(key) for key in given if key not in _PART_KEYS]


def empty_roles(messages: Messages) -> list[str]:
    """Return the roles of messages that say nothing: neither text nor reasoning nor calls.

    Tools may return nothing.
    """
    return sorted(
        {
            str(message["role"])
            for message in messages
            if message["role"] != "tool"
            and not message["content"].strip()
            and not message.get("tool_calls")
            and not str(message.get("reasoning_content", "")).strip()
        }
    )


def misplaced_result(messages: Messages) -> str:
    """Say which result of a tool does not follow its call; "" if all do.

    Many chat templates write no ids, so that the place of a result says which call it answers.
    Messages without ids are not looked at.
    """
    calls: list[Any] = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [call.get("id") for call in message["tool_calls"]]
        elif message["role"] != "tool":
            calls = []
        given = message.get("tool_call_id")
        if message["role"] != "tool" or given is None:
            continue
        if given not in calls:
            is_known = not calls or None not in calls
            if is_known:
                return f"message {number} answers {given!r}, and no call before it has this id"
        elif calls.index(given):
            return f"message {number} answers {given!r} before {calls[0]!r}, which was called first"
        else:
            calls.pop(0)
    return ""


@dataclass
class UnreadKeys:
    """Counts rows by the keys in them that nothing reads.

    Example:
        >>> unread = UnreadKeys()
        >>> unread.add(columns=["id"], keys=["citations"])
        >>> unread.add(columns=["id"], keys=[])
        >>> print(unread.warning("a", 2))
        a: nothing reads the columns id (2 of 2 rows), nor the message keys citations (1 of 2 rows)
    """

    columns: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)

    def add(self, columns: Iterable[str], keys: Iterable[str]) -> None:
        """Count one row."""
        self.columns.update(columns)
        self.keys.update(keys)

    def merge(self, other: UnreadKeys) -> None:
        self.columns.update(other.columns)
        self.keys.update(other.keys)

    def warning(self, path: str, num_rows: int) -> str:
        """Return one sentence; "" if every key is read."""
        said = []
        for what, found in (("columns", self.columns), ("message keys", self.keys)):
            if found:
                counts = (f"{key} ({n} of {num_rows} rows)" for key, n in found.most_common())
                said.append(f"the {what} {', '.join(counts)}")
        return f"{path}: nothing reads {', nor '.join(said)}" if said else ""
