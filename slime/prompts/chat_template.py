"""Chat messages to text, and the signs that text is already templated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.errors import UserError
from slime.prompts.conversation import Messages, read_messages

_PROBE = "probe of the turn's end"
_PAST_PROBE = "probe of a past turn"


class TemplateRefuses(UserError):
    """The template is fine, and does not take these messages."""


def template_source(tokenizer: Any) -> str:
    """The source of the tokenizer's chat template (of all of them, where it has several); "" without one."""
    found = getattr(tokenizer, "chat_template", None)
    return "\n".join(found.values()) if isinstance(found, dict) else found or ""


def render_messages(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """The messages as text, in the tokenizer's chat template.

    Raises:
        UserError: the tokenizer has no chat template, or one that cannot be read.
        TemplateRefuses: the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    if not tokenizer.chat_template:
        raise UserError(
            "--apply-chat-template is set, but the tokenizer has no chat template",
            why=f"neither tokenizer_config.json nor chat_template.jinja in '{tokenizer.name_or_path}' has one",
            fix="take an instruct model, add a chat_template.jinja, or leave --apply-chat-template out",
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except TemplateSyntaxError as error:
        raise UserError(
            "the tokenizer's chat template has a syntax error",
            why=f"line {error.lineno}: {error.message}",
            fix=f"mend chat_template.jinja or the chat_template of tokenizer_config.json in '{tokenizer.name_or_path}'",
        ) from error
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise TemplateRefuses(
            "the chat template refuses the messages",
            why=f"{type(error).__name__}: {error}; roles: {', '.join(str(m.get('role')) for m in messages)}",
            fix="check the roles and their order, and --apply-chat-template-kwargs",
        ) from error


def render_prompt(
    tokenizer: Any, prompt: str | Messages, *, tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
) -> str:
    """Like `render_messages`, up to where the assistant is to speak; bare text is taken as one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return render_messages(tokenizer, messages, tools=tools, **template_kwargs)


def between_turns(
    tokenizer: Any,
    messages: dict[str, Any] | Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    to_past: bool = False,
    **template_kwargs: Any,
) -> str:
    """What the template writes from the end of an assistant's words to where the assistant is to speak again, with
    ``messages`` between: the end of the turn, the messages, the head of the next turn.

    Args:
        to_past: the next turn is one that was spoken before; templates may begin those in another way.
    Raises:
        UserError, TemplateRefuses: as `render_messages`.
    """
    between = [messages] if isinstance(messages, dict) else messages
    start: Messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    render: Callable[..., str] = before_past_turn if to_past else render_messages
    try:
        text = render(tokenizer, start + between, tools=tools, **template_kwargs)
    except TemplateRefuses:
        if not to_past:
            raise
        # Mistral's: the assistant speaks twice in a row, where nothing but answers of tools comes between
        text = render_messages(tokenizer, start + between, tools=tools, **template_kwargs)
    return text[text.find(_PROBE) + len(_PROBE) :]  # the first: messages may speak of it, too


def before_past_turn(
    tokenizer: Any, messages: Messages, *, tools: list[dict[str, Any]] | None = None, **template_kwargs: Any
) -> str:
    """Like `render_prompt`, up to words of the assistant that are not its last ones.

    Raises:
        UserError, TemplateRefuses: as `render_messages`.
    """
    past: Messages = [{"role": "assistant", "content": _PAST_PROBE}, {"role": "user", "content": "hello"}]
    text = render_messages(tokenizer, messages + past, tools=tools, add_generation_prompt=False, **template_kwargs)
    return text[: text.rfind(_PAST_PROBE)]


def takes_any_order(tokenizer: Any) -> bool:
    """Whether the template writes messages where they stand, several of one role in a row and system messages in the
    midst, too, which agents send. Some refuse them (Mistral's), or write all system messages first (DeepSeek's)."""
    roles = ("system", "system", "user", "user", "assistant", "user", "system")
    told: Messages = [{"role": role, "content": f"probe{number}"} for number, role in enumerate(roles)]
    try:
        text = render_messages(tokenizer, told)
    except TemplateRefuses:
        return False
    places = [text.find(one["content"]) for one in told]
    return places[0] >= 0 and places == sorted(places)


def in_turns(messages: Messages, *, begins: bool) -> Messages:
    """Messages for templates that do not `take any order <takes_any_order>`: one system message at the beginning, later
    ones as the user's, and what is said in a row as one.

    Args:
        begins: whether the conversation begins with them.
    """
    found: Messages = []
    for message in messages:
        before = found[-1]["role"] if found else "system" if begins else "assistant"
        role = "user" if message["role"] == "system" != before else message["role"]
        if found and role == before and role in ("system", "user"):
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message | {"role": role})
    return found


def without_repeated_end(before: list[int], between: list[int]) -> list[int]:
    """Tokens of `between_turns` as they follow ``before``: a model that has ended its turn itself needs no second end.

    Example:
        >>> without_repeated_end([7, 99], [99, 5]), without_repeated_end([7], [99, 5])
        ([5], [99, 5])
    """
    return between[1:] if before[-1:] == between[:1] else between


def template_markers(tokenizer: Any) -> list[str]:
    """Special tokens that the chat template writes around messages, e.g. ``["<|im_start|>", "<|im_end|>"]``."""
    if not tokenizer.chat_template:
        return []
    text = render_prompt(tokenizer, "hello")
    return sorted({token for token in special_tokens(tokenizer).values() if token and token in text})


def carries_template(prompt: str | Messages, markers: list[str]) -> bool:
    """Whether a prompt that is still to be templated already holds markers of the template."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    return any(marker in text for text in texts if isinstance(text, str) for marker in markers)


def end_of_turn_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens (id → text) that the chat template puts right after an assistant's message; {} without one."""
    if not getattr(tokenizer, "chat_template", None):
        return {}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    text = render_messages(tokenizer, messages, add_generation_prompt=False)
    tail = text[text.rfind(_PROBE) + len(_PROBE) :]
    special = special_tokens(tokenizer)
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return {number: special[number] for number in ids if number in special}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens by id, those added for chat templates included."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
