"""Messages and tools of OpenAI's chat completions: checked, and made what chat templates take. For every server here
that speaks chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slime.engines.request_fields import LIST, OBJECT, BadRequest, optional, required

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ``messages`` of a body, each with its content as a string.

    Raises:
        BadRequest: there are none, or one is of a form that a text model does not take.
    """
    messages = required(body, "messages", LIST)
    if not messages:
        raise BadRequest("messages must have at least one message", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return [message | {"content": as_text(message.get("content"))} for message in messages]


def _check_message(message: Any, where: str) -> None:
    """Raises:
    BadRequest: a role that OpenAI does not know, or nothing in it; names the message.
    """
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object with a role and content", "messages")
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequest(f"the role of {where} must be one of {', '.join(_ROLES)}, not {role!r}", "messages")
    if message.get("content") is None and not (role == "assistant" and message.get("tool_calls")):
        raise BadRequest(f"{where} has no content", "messages")


def as_text(content: Any) -> str:
    """Content as a string; parts of type text are joined.

    Raises:
        BadRequest: anything but text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    said = "content must be a string or a list of text parts; only text is taken here"
    raise BadRequest(said, "messages")


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, as chat templates expect them; OpenAI's are text.

    Raises:
        BadRequest: a call without a function, or arguments that are no JSON.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadRequest("tool_calls must be a list of objects with a function in each", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"arguments of a call are no valid JSON: {arguments[:200]!r}", "messages") from error
        read.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": read}


def read_tools(body: Mapping[str, Any]) -> list[Any] | None:
    """The ``tools`` that the model is to see; None where there are none, or none may be called.

    Raises:
        BadRequest: one is no function.
    """
    tools = optional(body, "tools", LIST, None)
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": …, "parameters": …}}'
            raise BadRequest(f"tools[{index}] must be {form}", "tools")
    return tools or None if body.get("tool_choice") != "none" else None


def shows_tools(tokenizer: Any) -> bool:
    """Whether the chat template says anything of tools; one of several templates may."""
    found = tokenizer.chat_template
    return any("tools" in template for template in (found.values() if isinstance(found, dict) else [found]))


def refuse_constraints(body: Mapping[str, Any]) -> None:
    """Raises:
    BadRequest: the output is to be of a given form, which needs constrained decoding.
    """
    wanted = optional(body, "response_format", OBJECT, {}).get("type", "text")
    if wanted != "text":
        said = f"response_format {wanted!r} needs constrained decoding, which is not done here"
        raise BadRequest(said, "response_format")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice must be 'auto' or 'none', got {choice!r}: a forced call needs constrained decoding, which "
            "is not done here",
            "tool_choice",
        )
