"""OpenAI's ``/v1/responses`` for agents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from slime.agents.chat_api import error, error_event, ping
from slime.agents.conversation import AgentRequest, clean, only_functions
from slime.agents.session import AgentSession
from slime.agents.turns import Turn
from slime.engines.chat_answers import event
from slime.engines.chat_messages import read_tools, refuse_constraints, refused
from slime.engines.request_fields import (
    FLAG,
    LIST,
    OBJECT,
    TEXT,
    BadRequest,
    asks_for_nothing,
    integer,
    optional,
)
from slime.prompts.conversation import Messages, read_messages
from slime.samples.types import SampleStatus

__all__ = ["error", "error_event", "events", "ping", "read", "whole"]

_UNSUPPORTED = ("background", "conversation", "prompt")
_ROLES = ("system", "developer", "user", "assistant")
_PREFIX = "resp_"


# -- requests --------------------------------------------------------------------------------------


def read(body: dict[str, Any], session: AgentSession) -> AgentRequest:
    """Check and read a request body. The turn of ``previous_response_id`` gives the history; tools
    that are not functions are dropped: the model could not call them.

    Raises:
        BadRequest: the body asks for something that is not supported.
    """
    for name in _UNSUPPORTED:
        if not asks_for_nothing(body.get(name)):
            raise BadRequest(f"'{name}' is not supported for agents", name)
    form = optional(optional(body, "text", OBJECT, {}), "format", OBJECT, {})
    refuse_constraints({"response_format": form, "tool_choice": body.get("tool_choice")})
    history = _history(optional(body, "previous_response_id", TEXT, ""), session)
    given = body.get("input")
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    else:
        items = LIST.read("input", given)
    history = history + _messages(items, session)
    if not history:
        raise BadRequest("input must have at least one item", "input")
    instructions = optional(body, "instructions", TEXT, "")
    system: Messages = [{"role": "system", "content": instructions}] if instructions else []
    return AgentRequest(
        messages=clean(system + history),
        tools=read_tools({"tools": _tools(body), "tool_choice": body.get("tool_choice")}),
        max_tokens=optional(body, "max_output_tokens", integer(1), None),
        model=optional(body, "model", TEXT, ""),
        stream=optional(body, "stream", FLAG, False),
        api="responses",
        options={
            "previous": body.get("previous_response_id"),
            "instructions": instructions or None,
        },
    )


def _history(previous: str, session: AgentSession) -> Messages:
    """Return the messages of an earlier request and its response, without the instructions, which
    hold for one request."""
    if not previous:
        return []
    for turn in session.tree.turns:
        if _PREFIX + turn.id == previous:
            messages = turn.ask.messages
            if turn.ask.options.get("instructions"):
                messages = messages[1:]  # the system message that they were made into
            return [*messages, turn.reading.message()]
    raise BadRequest(f"there is no response {previous!r} of this sample", "previous_response_id")


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat completions."""
    fields = ("name", "description", "parameters")
    functions = [
        {name: tool[name] for name in fields if tool.get(name) is not None}
        for tool in only_functions(body, ("function",))
    ]
    return [{"type": "function", "function": function} for function in functions] or None


def _messages(items: list[Any], session: AgentSession) -> Messages:
    """Read items as messages: consecutive reasoning, text and calls form one assistant message."""
    given = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and (item.get("type") or "message") == "message":
            item = item | {"type": "message", "role": item.get("role") or "user"}
            if item["role"] not in _ROLES:
                raise BadRequest(
                    f"the role of input[{index}] must be one of {', '.join(_ROLES)}", "input"
                )
        given.append(item)
    with refused("input"):
        return session.read_messages(
            lambda parts: read_messages(given, where="input", images=parts), "input"
        )


# -- answers ---------------------------------------------------------------------------------------


def whole(turn: Turn) -> dict[str, Any]:
    """Return the answer as one object, for a request without ``stream``."""
    return _response(turn, _items(turn), _status(turn))


def events(turn: Turn) -> Iterator[bytes]:
    """Yield the answer as a stream."""
    number = -1

    def frame(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    begun = _response(turn, [], "in_progress")
    yield frame("response.created", response=begun)
    yield frame("response.in_progress", response=begun)
    for index, item in enumerate(_items(turn)):
        at = {"output_index": index, "item_id": item["id"]}
        blank: dict[str, Any] = (
            {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        )
        started = item | blank | {"status": "in_progress"}
        yield frame("response.output_item.added", output_index=index, item=started)
        if item["type"] == "function_call":
            yield frame("response.function_call_arguments.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield frame("response.function_call_arguments.done", **at, **done)
        else:
            (part,) = item["content"]
            kind = f"response.{part['type']}"
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            at["content_index"] = 0
            yield frame("response.content_part.added", **at, part=part | {"text": ""})
            yield frame(f"{kind}.delta", **at, delta=part["text"], **more)
            yield frame(f"{kind}.done", **at, text=part["text"], **more)
            yield frame("response.content_part.done", **at, part=part)
        yield frame("response.output_item.done", output_index=index, item=item)
    last = whole(turn)
    yield frame(f"response.{last['status']}", response=last)


def _status(turn: Turn) -> str:
    return "completed" if turn.status is SampleStatus.COMPLETED else "incomplete"


def _items(turn: Turn) -> list[dict[str, Any]]:
    reading = turn.reading
    items = []
    if reading.reasoning:
        part = {"type": "reasoning_text", "text": reading.reasoning}
        items.append({"id": f"rs_{turn.id}", "type": "reasoning", "summary": [], "content": [part]})
    if reading.text or not reading.calls:
        text = {"type": "output_text", "text": reading.text, "annotations": [], "logprobs": []}
        message = {
            "id": f"msg_{turn.id}",
            "type": "message",
            "role": "assistant",
            "status": _status(turn),
        }
        items.append({**message, "content": [text]})
    for call in reading.calls:
        said = {"call_id": call["id"], **call["function"], "status": "completed"}
        items.append({"id": f"fc_{call['id']}", "type": "function_call", **said})
    return items


def _response(turn: Turn, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    ask = turn.ask
    completion = len(turn.output)
    prompt = turn.length - completion
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools or ()]
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    return {
        "id": _PREFIX + turn.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "model": ask.model,
        "output": output,
        "tools": tools,
        "metadata": {},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "instructions": ask.options["instructions"],
        "previous_response_id": ask.options["previous"],
        "temperature": None,
        "top_p": None,
        "max_output_tokens": ask.max_tokens,
        "truncation": "disabled",
        "usage": None if status == "in_progress" else usage,
    }
