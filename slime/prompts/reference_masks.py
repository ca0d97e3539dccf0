"""``--loss-mask-type``: compare our loss masks with the text that rules of the reference system
train.

    qwen          each message rendered alone; an assistant's is trained after the generation prompt
    qwen3         the same, rendered after a user's message
    qwen3_5       the whole conversation rendered; trained after ``<|im_start|>assistant``
                  (and an opened ``<think>``)
    distill_qwen  the first message as prompt, the last message's content as answer

The first three also train the line break after the end of a turn, which no engine generates. This
does not count as a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from slime.prompts.conversation import Messages
from slime.prompts.sft_encoding import TrainedSequence
from slime.samples.token_rewards import trained_runs

_PREFIX = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}
_HEAD = "<|im_start|>assistant\n"
_THINK = "<think>\n"
_END = "<|im_end|>"
_SHOWN = 80


def mask_difference(
    rule: str,
    tokenizer: Any,
    messages: Messages,
    tools: list[dict[str, Any]] | None,
    ours: Sequence[TrainedSequence],
) -> str:
    """Describe the first turn that a rule would train differently; "" if it trains the same text.

    Args:
        messages: normalised (`slime.prompts.conversation.read_messages`).
        ours: the sequences that we train.
    """
    try:
        theirs = trained_texts(rule, tokenizer, messages, tools)
    except Exception as error:  # templates may raise anything if given one message alone
        return f"the rule {rule} cannot render it: {type(error).__name__}: {error}"
    mine = [tokenizer.decode(run) for one in ours for run in trained_runs(one.tokens, one.mask)]
    for turn, (own, other) in enumerate(itertools.zip_longest(mine, theirs), start=1):
        if own is None or other is None or own.rstrip() != other.rstrip():
            return (
                f"trained turn {turn}: {_shown(own)} is trained, with {rule} it would be "
                f"{_shown(other)}"
            )
    return ""


def trained_texts(
    rule: str, tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None
) -> list[str]:
    """Return the trained text of each turn by a rule of the reference system."""

    def render(part: Messages, **kwargs: Any) -> str:
        text: str = tokenizer.apply_chat_template(part, tokenize=False, tools=tools, **kwargs)
        return text

    trained = [m for m in messages if m["role"] == "assistant" and m.get("step_loss_mask", 1) == 1]
    if rule == "distill_qwen":
        return [str(messages[-1]["content"])] if messages[-1] in trained else []
    if rule == "qwen3_5":
        return _by_marks(render(messages), messages)
    asked = [_PREFIX, _PREFIX]
    head = len(render(asked, add_generation_prompt=True)) - len(render(asked))
    before = [_PREFIX] if rule == "qwen3" else []
    system = len(render(before)) if before else _system_length(render)
    texts = []
    for number, message in enumerate(messages):
        if message not in trained:
            continue
        text = render([*before, message])
        start = head + (system if before or number > 0 else 0)
        texts.append(text[start:])
    return texts


def _system_length(render: Any) -> int:
    """Count the characters that a template itself writes before the first message."""
    once = len(render([_PREFIX]))
    twice = len(render([_PREFIX, _PREFIX]))
    return int(once - (twice - once))


def _by_marks(text: str, messages: Messages) -> list[str]:
    texts = []
    place = 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        start = text.index(_HEAD, place) + len(_HEAD)
        place = text.index(_END, start) + len(_END)
        if message.get("step_loss_mask", 1) == 1:
            start += len(_THINK) if text.startswith(_THINK, start) else 0
            texts.append(text[start:place])
    return texts


def _shown(text: str | None) -> str:
    if text is None:
        return "nothing"
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]} … {text[-18:]}")
