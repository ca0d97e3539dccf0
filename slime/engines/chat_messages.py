"""Check messages and tools of chat completion requests, for all servers of this project.

`slime.prompts.conversation` then reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from slime.engines.request_fields import LIST, OBJECT, BadRequest, optional, required
from slime.prompts import conversation
from slime.prompts.chat_template import template_source
from slime.prompts.conversation import ConversationError, ImageParts, Messages

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SAYS_SOMETHING = ("content", "tool_calls", "function_call", *conversation.REASONING_KEYS)


@contextlib.contextmanager
def refused(field: str) -> Iterator[None]:
    """Turn a `ConversationError` inside the block into a `BadRequest` that blames ``field``."""
    try:
        yield
    except ConversationError as error:
        raise BadRequest(error.sentence(), field) from error


def read_messages(body: Mapping[str, Any], images: ImageParts | None = None) -> Messages:
    """Read the ``messages`` of a body into the form of `slime.prompts.conversation`.

    Args:
        images: collects images; None: images are refused.
    Raises:
        BadRequest: there are no messages, or one is malformed or unsupported.
    """
    messages = required(body, "messages", LIST)
    if not messages:
        raise BadRequest("messages must have at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} must be an object with a role and content", "messages")
        role = message.get("role")
        if role not in _ROLES:
            raise BadRequest(
                f"the role of {where} must be one of {', '.join(_ROLES)}, not {role!r}", "messages"
            )
        says = _SAYS_SOMETHING if role == "assistant" else ("content",)
        if not any(message.get(key) is not None for key in says):
            raise BadRequest(f"{where} has no content", "messages")
    with refused("messages"):
        return conversation.read_messages(messages, images=images)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read the ``tools`` that the model may call; None if there are none.

    Raises:
        BadRequest: a tool is not a function.
    """
    with refused("tools"):
        tools = conversation.read_tools(optional(body, "tools", LIST, None))
    return tools or None if body.get("tool_choice") != "none" else None


def shows_tools(tokenizer: Any) -> bool:
    """Return whether the chat template, or one of several, mentions tools."""
    return "tools" in template_source(tokenizer)


def refuse_constraints(body: Mapping[str, Any]) -> None:
    """Refuse a request whose output must be of a given form, which needs constrained decoding.

    Raises:
        BadRequest: names ``response_format`` or ``tool_choice``.
    """
    wanted = optional(body, "response_format", OBJECT, {}).get("type", "text")
    if wanted != "text":
        said = f"response_format {wanted!r} needs constrained decoding, which is not supported"
        raise BadRequest(said, "response_format")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice must be 'auto' or 'none', got {choice!r}: a forced call needs "
            "constrained decoding, which is not supported",
            "tool_choice",
        )
