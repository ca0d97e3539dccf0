"""Supervised samples: tokens and loss mask from chat rows. Only what an assistant says is trained.

The conversation is cut into segments at the borders of the assistant's turns, and each segment is tokenised by itself.
So the tokens of a turn are those that the model would generate after the prompt, never merged across the border.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError

Messages = list[dict[str, Any]]
#: (messages, add_generation_prompt) → text.
Render = Callable[[Messages, bool], str]


@dataclass(frozen=True)
class Segment:
    """A piece of the conversation's text; ``trained`` pieces are the assistant's."""

    text: str
    trained: bool


def chat_segments(messages: Messages, render: Render, end_of_turn: list[str]) -> list[Segment]:
    """Cut a rendered conversation into segments, by rendering it turn by turn.

    An assistant's turn is what the template adds between "here the assistant is to speak" and the end of that message,
    its end-of-turn token included, blanks after it not (they are never generated). A message with a
    ``step_loss_mask`` of 0 is not trained.

    Args:
        render: the chat template.
        end_of_turn: tokens that end a turn, e.g. ``["<|im_end|>"]``.
    Raises:
        UserError: no assistant message, or a template whose turns cannot be found again in the whole conversation.

    Example (roles in brackets, turns end with "."):
        >>> render = lambda m, ask: "".join(f"[{x['role']}]{x['content']}." for x in m) + ("[assistant]" if ask else "")
        >>> chat_segments([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], render, ["."])
        [Segment(text='[user]2+2.[assistant]', trained=False), Segment(text='4.', trained=True)]
    """
    whole = render(messages, False)
    segments: list[Segment] = []
    position = 0
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start, end = _turn(messages, number, whole, render, end_of_turn)
        if start < position:
            raise _not_found(number)
        segments.append(Segment(whole[position:start], False))
        segments.append(Segment(whole[start:end], bool(message.get("step_loss_mask", 1))))
        position = end
    if not any(segment.trained for segment in segments):
        raise UserError("there is no assistant message to train on", fix="give each conversation one")
    while not segments[-1].trained:
        segments.pop()
    return [segment for segment in segments if segment.text]


def _turn(messages: Messages, number: int, whole: str, render: Render, end_of_turn: list[str]) -> tuple[int, int]:
    """Where the assistant's message ``number`` starts and ends in the text of the whole conversation."""
    prompt = render(messages[:number], True) if number else whole[: max(0, whole.find(messages[0]["content"]))]
    alone = render(messages[: number + 1], False)
    if not whole.startswith(prompt):
        # e.g. a template that opens an empty <think> block when it asks, but leaves it out of past turns
        prompt = _common_prefix(whole, prompt)
        prompt = prompt[: _last_break(prompt)]
    if not alone.startswith(prompt):
        raise _not_found(number)
    start = len(prompt)
    end = len(alone) if whole.startswith(alone) else _end_in(whole, start, end_of_turn)
    if end is None:
        raise _not_found(number)
    return start, _without_trailing_blanks(whole, start, end, end_of_turn)


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:length]


def _last_break(text: str) -> int:
    """After the last line break: role headers end there in every known template."""
    return text.rfind("\n") + 1


def _end_in(whole: str, start: int, end_of_turn: list[str]) -> int | None:
    """After the first end-of-turn token behind ``start``: past turns may be rendered shorter than last ones."""
    ends = [whole.find(token, start) + len(token) for token in end_of_turn if whole.find(token, start) >= 0]
    return min(ends, default=None)


def _without_trailing_blanks(whole: str, start: int, end: int, end_of_turn: list[str]) -> int:
    stripped = whole[start:end].rstrip()
    return start + len(stripped) if any(stripped.endswith(token) for token in end_of_turn) else end


def _not_found(number: int) -> UserError:
    return UserError(
        f"the assistant's turn (message {number}) cannot be found in the rendered conversation",
        why="the chat template renders earlier messages differently once later ones follow",
        fix="mark the turns with {% generation %} in the template, or give rows of prompt and label",
    )


def encode_segments(segments: list[Segment], tokenizer: Any) -> tuple[list[int], list[int]]:
    """(tokens, mask), one mask entry per token."""
    tokens: list[int] = []
    mask: list[int] = []
    for segment in segments:
        ids = tokenizer.encode(segment.text, add_special_tokens=False)
        tokens.extend(ids)
        mask.extend([int(segment.trained)] * len(ids))
    return tokens, mask


_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    messages: Messages,
    tokenizer: Any,
    render: Render,
    end_of_turn: list[str],
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """(tokens, mask) of a conversation. A template with ``{% generation %}`` marks says itself what is trained."""
    if not _GENERATION_TAG.search(tokenizer.chat_template or ""):
        return encode_segments(chat_segments(messages, render, end_of_turn), tokenizer)
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        **(template_kwargs or {}),
    )  # fmt: skip
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


def trim(tokens: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """(tokens up to the last trained one, mask of the response): the response begins at the first trained token.

    Example:
        >>> trim([1, 2, 3, 4, 5], [0, 0, 1, 1, 0])
        ([1, 2, 3, 4], [1, 1])

    Raises:
        UserError: no token is trained.
    """
    if 1 not in mask:
        raise UserError("there is no token to train on", fix="check that the assistant's messages are not empty")
    end = len(mask) - mask[::-1].index(1)
    return tokens[:end], mask[mask.index(1) : end]
