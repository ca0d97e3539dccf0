"""Anthropic's ``/v1/messages`` for agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from slime.agents.conversation import AgentRequest, clean, only_functions
from slime.agents.session import AgentSession
from slime.agents.turns import Turn
from slime.engines.chat_answers import event
from slime.engines.chat_messages import refused
from slime.engines.request_fields import (
    FLAG,
    LIST,
    OBJECT,
    TEXT,
    BadRequest,
    integer,
    optional,
    required,
    strings,
)
from slime.prompts.conversation import Messages, read_messages, read_text, read_tools
from slime.samples.types import SampleStatus

_ROLES = ("user", "assistant", "system")

# -- requests --------------------------------------------------------------------------------------


def read(body: dict[str, Any], session: AgentSession) -> AgentRequest:
    """Check and read a request body. Anthropic's built-in tools are dropped.

    Raises:
        BadRequest: the body asks for something that is not supported.
    """
    messages = required(body, "messages", LIST)
    if not messages:
        raise BadRequest("messages must have at least one message", "messages")
    with refused("system"):
        system = read_text(body.get("system"), "system", join="\n")
    found: Messages = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(
                f"messages[{index}] must be an object with the role user or assistant", "messages"
            )
    with refused("messages"):
        found += session.read_messages(lambda parts: read_messages(messages, images=parts))
    if found[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message must not be the assistant's: its beginning cannot be given here",
            "messages",
        )
    if optional(body, "output_config", OBJECT, {}).get("format") or body.get("output_format"):
        raise BadRequest(
            "output of a given format needs constrained decoding, which is not done here",
            "output_config",
        )
    choice = optional(optional(body, "tool_choice", OBJECT, {}), "type", TEXT, "auto")
    if choice not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice must be of the type auto or none, not {choice!r}: a forced call needs "
            "constrained decoding, which is not done here",
            "tool_choice",
        )
    return AgentRequest(
        messages=clean(found),
        tools=_tools(body) if choice == "auto" else None,
        max_tokens=optional(body, "max_tokens", integer(1), None),
        stop=optional(body, "stop_sequences", strings(), ()) if body.get("stop_sequences") else (),
        model=optional(body, "model", TEXT, ""),
        stream=optional(body, "stream", FLAG, False),
        api="messages",
    )


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat completions."""
    functions = [
        {name: tool[name] for name in ("name", "description") if tool.get(name)}
        | {"input_schema": tool.get("input_schema") or {}}
        for tool in only_functions(body, (None, "custom"))
    ]
    with refused("tools"):
        return read_tools(functions) or None


# -- answers ---------------------------------------------------------------------------------------


def whole(turn: Turn) -> dict[str, Any]:
    """Return the answer as one object."""
    return _message(turn) | {
        "content": _blocks(turn),
        **_ending(turn),
        "usage": _usage(turn, len(turn.output)),
    }


def events(turn: Turn) -> Iterator[bytes]:
    """Yield the answer as a stream."""

    def say(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    blank: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(turn, 0),
    }
    yield say("message_start", message=_message(turn) | blank)
    for index, block in enumerate(_blocks(turn)):
        kind = block["type"]
        if kind == "tool_use":
            started = block | {"input": {}}
            arguments = orjson.dumps(block["input"]).decode()
            deltas = [("input_json_delta", "partial_json", arguments)]
        else:
            started = block | {kind: ""}
            deltas = [(f"{kind}_delta", kind, block[kind])]
            started.pop("signature", None)
        if kind == "thinking":
            started["signature"] = ""
            deltas.append(("signature_delta", "signature", block["signature"]))
        yield say("content_block_start", index=index, content_block=started)
        for name, field, value in deltas:
            yield say("content_block_delta", index=index, delta={"type": name, field: value})
        yield say("content_block_stop", index=index)
    yield say("message_delta", delta=_ending(turn), usage=_usage(turn, len(turn.output)))
    yield say("message_stop")


def ping() -> bytes:
    return event({"type": "ping"}, "ping")


def error(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    kind = "overloaded_error" if kind == "unavailable" else kind
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(message: str) -> bytes:
    """Return the event for a failure after the HTTP status was sent."""
    return event(error(message, "unavailable", None, None), "error")


def _message(turn: Turn) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn.ask.model}


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    reading = turn.reading
    blocks = []
    if reading.reasoning:
        blocks.append({"type": "thinking", "thinking": reading.reasoning, "signature": turn.id})
    if reading.text:
        blocks.append({"type": "text", "text": reading.text})
    for call in reading.calls:
        function = call["function"]
        given = orjson.loads(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    return blocks


def _ending(turn: Turn) -> dict[str, Any]:
    if turn.status is not SampleStatus.COMPLETED:
        reason = "max_tokens"
    elif turn.reading.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if turn.reading.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": turn.reading.stop or None}


def _usage(turn: Turn, completion: int) -> dict[str, int]:
    cached = turn.cached_tokens
    prompt = turn.length - len(turn.output) - cached
    return {
        "input_tokens": prompt,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion,
    }
