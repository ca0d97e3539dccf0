"""``/v1/chat/completions`` for agents; the shapes are those of `slime.engines.chat_answers`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from slime.agents.conversation import AgentRequest, clean
from slime.agents.session import AgentSession
from slime.agents.turns import Turn
from slime.engines import chat_answers
from slime.engines.chat_answers import DONE, call_delta, event, piece
from slime.engines.chat_messages import read_messages, read_tools, refuse_constraints
from slime.engines.request_fields import (
    FLAG,
    OBJECT,
    TEXT,
    BadRequest,
    asks_for_nothing,
    integer,
    optional,
    strings,
)
from slime.prompts.chat_template import OWN_ARGUMENTS
from slime.samples.types import SampleStatus

#: These change the format of an answer.
_UNSUPPORTED = (
    "functions", "function_call", "logprobs", "top_logprobs", "continue_final_message", "audio"
)  # fmt: skip


def read(body: dict[str, Any], session: AgentSession) -> AgentRequest:
    """Check and read a request body. Advisory fields (reasoning_effort, user, …) and other sampling
    parameters are ignored.

    Raises:
        BadRequest: the body asks for something that is not supported.
    """
    refuse_constraints(body)
    for name in _UNSUPPORTED:
        if not asks_for_nothing(body.get(name)):
            raise BadRequest(f"'{name}' is not supported for agents", name)
    if optional(body, "n", integer(1), 1) != 1:
        raise BadRequest("n must be 1: ask again for another answer to the same messages", "n")
    limit = optional(body, "max_tokens", integer(1), None)
    options = optional(body, "stream_options", OBJECT, {})
    template_kwargs = dict(optional(body, "chat_template_kwargs", OBJECT, {}))
    if ours := sorted((OWN_ARGUMENTS | {"chat_template"}) & template_kwargs.keys()):
        raise BadRequest(
            f"chat_template_kwargs must be without {', '.join(ours)}", "chat_template_kwargs"
        )
    return AgentRequest(
        messages=clean(session.read_messages(partial(read_messages, body))),
        tools=read_tools(body),
        max_tokens=optional(body, "max_completion_tokens", integer(1), limit),
        stop=optional(body, "stop", strings(), ()),
        model=optional(body, "model", TEXT, ""),
        stream=optional(body, "stream", FLAG, False),
        api="chat",
        template_kwargs=template_kwargs,
        options={"usage": optional(options, "include_usage", FLAG, False)},
    )


def whole(turn: Turn) -> dict[str, Any]:
    """Return the answer as one object."""
    reading = turn.reading
    said = chat_answers.message(reading.text, reading.calls, reading.reasoning)
    return _head(turn, "chat.completion") | {
        "choices": [chat_answers.choice(0, said, _ending(turn))],
        "usage": _usage(turn),
    }


def events(turn: Turn) -> Iterator[bytes]:
    """Yield the answer as a stream."""
    head = _head(turn, "chat.completion.chunk")
    reading = turn.reading
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if reading.reasoning:
        deltas.append({"reasoning_content": reading.reasoning})
    if reading.text:
        deltas.append({"content": reading.text})
    deltas += [call_delta(number, call) for number, call in enumerate(reading.calls)]
    for delta in deltas:
        yield event(head | {"choices": [piece(0, delta)]})
    yield event(head | {"choices": [piece(0, {}, _ending(turn))]})
    if turn.ask.options["usage"]:
        yield event(head | {"choices": [], "usage": _usage(turn)})
    yield DONE


def ping() -> bytes:
    """Return an SSE comment, which clients ignore."""
    return b": ping\n\n"


def error(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(message: str) -> bytes:
    """Return the event for a failure after the HTTP status was sent."""
    return event(error(message, "unavailable", None, None))


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return chat_answers.envelope(f"chatcmpl-{turn.id}", int(time.time()), turn.ask.model, kind)


def _ending(turn: Turn) -> dict[str, Any]:
    kind = "stop" if turn.status is SampleStatus.COMPLETED else "length"
    return chat_answers.ending(
        kind, turn.reading.stop or None, calls_tools=bool(turn.reading.calls)
    )


def _usage(turn: Turn) -> dict[str, Any]:
    completion = len(turn.output)
    return chat_answers.usage(turn.length - completion, completion, turn.cached_tokens)
