"""Build answers of OpenAI's chat completions, whole or as chunks of a stream of server-sent events.

Used by every server here that answers chat completions.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

import orjson

from slime.engines.tool_calls import Call

#: Headers of a response that is a stream of events.
EVENT_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
#: The last event of OpenAI's streams.
DONE = b"data: [DONE]\n\n"
#: The ending fields of a chunk that is not the last.
GOING_ON: dict[str, Any] = {"finish_reason": None, "matched_stop": None}
_ALPHANUMERIC = string.ascii_letters + string.digits


def event(body: Any, name: str = "") -> bytes:
    """Encode one server-sent event.

    Example:
        >>> event({"a": 1}, "ping")
        b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(body) + b"\n\n"


def new_call_id() -> str:
    """Make an id for a tool call: nine letters and digits, because Mistral's chat templates refuse
    others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def tool_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def message(
    text: str, calls: Sequence[dict[str, Any]], reasoning: str | None = None
) -> dict[str, Any]:
    """Return the assistant's message, with SGLang's field for reasoning only if there is some."""
    said = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "tool_calls": list(calls) or None,
    }
    return said | ({"reasoning_content": reasoning} if reasoning is not None else {})


def ending(kind: str | None, matched: Any = None, *, calls_tools: bool = False) -> dict[str, Any]:
    """Return OpenAI's finish reason of a choice, and SGLang's field for what stopped it."""
    return {
        "finish_reason": "tool_calls" if calls_tools and kind == "stop" else kind,
        "matched_stop": matched,
    }


def choice(
    index: int, said: dict[str, Any], end: dict[str, Any], logprobs: Any = None
) -> dict[str, Any]:
    return {"index": index, "message": said, "logprobs": logprobs} | end


def piece(
    index: int, delta: dict[str, Any], end: dict[str, Any] | None = None, logprobs: Any = None
) -> dict[str, Any]:
    """Return a choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs} | (end or GOING_ON)


def call_delta(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return a whole call as one delta."""
    return {"tool_calls": [{"index": number, **call}]}


def envelope(answer_id: str, created: int, model: str, kind: str) -> dict[str, Any]:
    """Return the fields of an answer as a whole.

    Args:
        kind: "chat.completion", "chat.completion.chunk" or "text_completion".
    """
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the counts of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
