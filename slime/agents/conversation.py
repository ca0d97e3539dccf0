"""One form for the requests of all protocols; conversion of messages to tokens and back.

Messages have the common form of `slime.prompts.conversation`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from slime.agents.images import AgentImages
from slime.engines.chat_answers import tool_call
from slime.engines.chat_messages import refused, shows_tools
from slime.engines.reasoning import ReasoningFormat, reasoning_format
from slime.engines.request_fields import LIST, BadRequest, optional
from slime.engines.tool_calls import Reply, ToolFormat, tool_format, tool_schemas
from slime.errors import UserError
from slime.log import get_logger
from slime.prompts.chat_template import (
    TemplateRefuses,
    before_past_turn,
    between_turns,
    in_turns,
    render_messages,
    special_tokens,
    takes_any_order,
    template_source,
    without_repeated_end,
)
from slime.prompts.conversation import Messages, read_messages

logger = get_logger(__name__)

#: Tokens at the end of a prompt that are searched for the start marker of reasoning.
_TAIL = 8
_FIELDS = (
    "role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "images"
)  # fmt: skip


@dataclass(frozen=True)
class AgentRequest:
    """A client's request.

    Attributes:
        messages: the result of `clean`.
        tools: in OpenAI's form; None: none may be called.
        max_tokens: limit of the answer; None: the run's own.
        stop: strings that end the answer, in addition to the run's.
        model: the client's name for the model, which may be any text.
        api: "chat", "responses" or "messages".
        options: what the protocol's module needs to format the answer.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    stream: bool = False
    api: str = "chat"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer as a client sees it.

    Attributes:
        reasoning: None if there was none.
        calls: in OpenAI's form, with ids.
        stop: the stop string that ended the answer, which is not in ``text``; "": none did.
    """

    text: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    stop: str = ""

    def message(self) -> dict[str, Any]:
        """Return the message that a client sends back as history."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            said["tool_calls"] = list(self.calls)
        return said if self.reasoning is None else said | {"reasoning_content": self.reasoning}


def clean(messages: Iterable[dict[str, Any]]) -> Messages:
    """Convert messages to the common form of `slime.prompts.conversation`; drop unknown fields.

    Raises:
        BadRequest: a message cannot be read.
    """
    with refused("messages"):
        read = read_messages(messages)
    return [{name: message[name] for name in _FIELDS if name in message} for message in read]


def only_functions(body: Mapping[str, Any], kinds: Collection[str | None]) -> list[dict[str, Any]]:
    """Return the function tools of a body; the model could not call any others.

    Args:
        kinds: values of ``type`` that mean a function in the protocol.
    """
    tools = optional(body, "tools", LIST, [])
    own = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") in kinds]
    if len(own) < len(tools):
        left_out = len(tools) - len(own)
        logger.debug("an agent's tools that are not functions are left out: %d", left_out)
    return own


# -- comparison ------------------------------------------------------------------------------------


def key_of(message: dict[str, Any], *, with_reasoning: bool = True) -> bytes:
    """Return a key that is equal for equivalent messages. For the assistant's messages it ignores
    whitespace at both ends, the JSON formatting of arguments, and ids.

    Example:
        >>> key_of({"role": "assistant", "content": "4\\n"}) == key_of(
        ...     {"role": "assistant", "content": "4"})
        True
    """
    if message["role"] != "assistant":
        images = [message["images"]] if message.get("images") else []
        return orjson.dumps([message["role"], message["content"], *images])
    calls = [_call_key(call) for call in message.get("tool_calls") or ()]
    reasoning = (message.get("reasoning_content") or "").strip() if with_reasoning else ""
    return orjson.dumps(["assistant", message["content"].strip(), reasoning, calls])


def _call_key(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [repr(call)]
    arguments = function.get("arguments")
    try:
        read = orjson.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return [
            function.get("name"),
            orjson.dumps(_whole_numbers(read), option=orjson.OPT_SORT_KEYS).decode(),
        ]
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        return [function.get("name"), repr(arguments)]


def _whole_numbers(value: Any) -> Any:
    """Turn 5.0 into 5: JavaScript clients, which have one number type, send it back so."""
    if isinstance(value, dict):
        return {name: _whole_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(one) for one in value]
    if isinstance(value, float) and abs(value) < 2**53 and value.is_integer():
        return int(value)
    return value


def call_ids(message: dict[str, Any]) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or () if isinstance(call, dict)]


def digest(before: bytes, key: bytes) -> bytes:
    """Return the digest of a conversation from the digest without its last message."""
    return hashlib.blake2b(before + key, digest_size=16).digest()


# -- to tokens, and back ---------------------------------------------------------------------------


class ChatFormat:
    """A model's chat template, tool-call format and reasoning format. Made once per model.

    Args:
        calls: the tool-call format; None: calls stay text.
        end_tokens: ids of tokens that end an answer.
        images: reads images in messages; None: the model reads only text.
    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        calls: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        end_tokens: Collection[int],
        images: AgentImages | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "this model has no chat template, and agents speak in messages",
                fix="take an instruct model, or add a chat_template.jinja to its directory",
            )
        self.tokenizer = tokenizer
        self.images = images
        self.calls = calls
        self.reasoning = reasoning
        self._ends = frozenset(end_tokens)
        self._shows_tools = shows_tools(tokenizer)
        self._takes_any_order = takes_any_order(tokenizer)
        special = set(special_tokens(tokenizer).values())
        self._thinks_in_special = reasoning is not None and any(
            token and token in reasoning.end for token in special
        )

    @staticmethod
    def of(
        tokenizer: Any, family: str, end_tokens: Collection[int], images: AgentImages | None = None
    ) -> ChatFormat:
        """Read the formats of a model from its tokenizer.

        Args:
            family: `slime.models.family_name`, which decides the tool-call format if the template
                does not.
        """
        template = template_source(tokenizer) or None
        calls = tool_format(template, family)
        return ChatFormat(tokenizer, calls, reasoning_format(template), end_tokens, images)

    # -- messages to tokens ------------------------------------------------------------------------

    def check_tools(self, tools: list[dict[str, Any]] | None) -> None:
        """Check that the chat template renders tools.

        Raises:
            BadRequest: there are tools, and the model would not see them.
        """
        if tools and not self._shows_tools:
            raise BadRequest(
                "this model's chat template has no place for tools: it would not see them", "tools"
            )

    def opening(self, ask: AgentRequest, messages: Messages, *, to_past: bool = False) -> list[int]:
        """Return the tokens of a conversation's beginning, up to the start of the answer.

        Raises:
            BadRequest: the chat template refuses the messages.
        """
        render = before_past_turn if to_past else render_messages
        return self._encode(self._rendered(render, ask, messages), messages)

    def between(
        self,
        ask: AgentRequest,
        before: list[int],
        messages: Messages,
        *,
        calls: list[dict[str, Any]] | None = None,
        to_past: bool = False,
    ) -> list[int]:
        """Return the tokens from the end of an answer to the start of the next answer.

        Args:
            before: the answer's tokens.
            calls: its ``tool_calls``.
        Raises:
            BadRequest: the chat template refuses the messages.
        """
        text = self._rendered(between_turns, ask, messages, calls=calls, to_past=to_past)
        return without_repeated_end(before, self._encode(text, messages))

    def _rendered(self, render: Any, ask: AgentRequest, messages: Messages, **options: Any) -> str:
        shown = [
            {key: value for key, value in message.items() if key != "images"}
            for message in messages
        ]
        if not self._takes_any_order:
            shown = in_turns(shown, begins=render is not between_turns)
        try:
            text = str(
                render(self.tokenizer, shown, tools=ask.tools, **options, **ask.template_kwargs)
            )
            text.encode()
        except TemplateRefuses as error:
            raise BadRequest(
                f"the chat template refused the messages: {error.why}", "messages"
            ) from error
        except UnicodeEncodeError as error:
            raise BadRequest("the messages have half a character in them", "messages") from error
        return text

    def _encode(self, text: str, messages: Messages) -> list[int]:
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        return tokens if self.images is None else self.images.expand(tokens, messages)

    # -- tokens to messages ------------------------------------------------------------------------

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Tell whether the prompt ends inside reasoning, so that the answer begins with it."""
        if self.reasoning is None:
            return False
        return self.reasoning.opens(
            self.tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        )

    def read(
        self, tokens: Sequence[int], ask: AgentRequest, *, opened: bool, stop: Sequence[str]
    ) -> ParsedAnswer:
        """Return an answer as a client sees it.

        Args:
            opened: see `opens_reasoning`.
            stop: strings that may have ended the answer.
        """
        tools = tool_schemas(ask.tools or [])
        keep = self._thinks_in_special or bool(
            tools and self.calls is not None and self.calls.special_marks
        )
        ids = list(tokens[:-1] if tokens and tokens[-1] in self._ends else tokens)
        text = str(
            self.tokenizer.decode(
                ids, skip_special_tokens=not keep, spaces_between_special_tokens=False
            )
        )
        reasoning = None
        rest = text
        if self.reasoning is not None:
            thought = self.reasoning.split(text, opened=opened)
            reasoning = thought.reasoning
            rest = thought.rest
        at, matched = min(
            ((rest.find(one), one) for one in stop if one in rest), default=(len(rest), "")
        )
        reply = Reply(rest[:at])
        if tools and self.calls is not None:
            reply = self.calls.read(rest[:at], tools, ended=True)
        return ParsedAnswer(
            reply.text, reasoning, tuple(tool_call(call) for call in reply.calls), matched
        )

    def visible_part(self, tokens: list[int]) -> list[int]:
        """Return the tokens of an answer after its reasoning, without leading whitespace."""
        if self.reasoning is None:
            return tokens
        low = 0  # fewest tokens in which the reasoning has ended
        high = len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self.reasoning.end in self.tokenizer.decode(
                tokens[:middle], skip_special_tokens=False
            ):
                high = middle
            else:
                low = middle + 1
        while (
            low < len(tokens)
            and not self.tokenizer.decode(tokens[low : low + 1], skip_special_tokens=False).strip()
        ):
            low += 1
        return tokens[low:]
