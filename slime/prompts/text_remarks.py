"""Remarks on the words of a row: text that can be trained on and is rarely meant, because an
export, a template or an escape went wrong before."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime.prompts.chat_template import REASONING_MARKS, reasoning_of, special_tokens
from slime.prompts.conversation import IMAGE_MARK, Messages
from slime.prompts.problems import RowProblem, remark

#: Control characters in place of LaTeX commands: JSON and Python read \f, \t, \b, \r, \v and \a as
#: one character.
_EATEN = re.compile(
    r"\x0c(?:rac[{\d ]|(?:orall|lat|rown)(?![a-z]))|[\x07\x08\x0b][a-z]{2}"
    r"|\t(?:heta|imes|ext\{|frac|riangle|ilde\{|herefore)|\r(?:ight|angle)(?![a-z])"
    r"|\n(?:abla|otin)(?![a-z])"
)
#: Line breaks that an export has escaped twice, before what begins a line.
_ESCAPED_BREAK = re.compile(r"\\n(?=\\n|[A-Z0-9*#-])")
#: Marks of chat templates; transcripts: what stands before a question, and before its answer.
_SPECIAL_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<｜User｜>|<\|user\|>|<\|turn>"
    r"|<\|start\|>user|<\|start_of_role\|>|\[/INST\]"
)
_TRANSCRIPTS = (
    ("### Instruction:", "### Response:"), ("Human: ", "\nAssistant:"), ("USER: ", " ASSISTANT:")
)  # fmt: skip
_NO_VALUES = frozenset({"nan", "none", "null", "undefined"})
#: Characters; an answer may begin with a shorter question by chance.
_MIN_REPEATED = 16


def remarks_on_text(
    prompt: str | Messages,
    answers: Iterable[Any],
    tokenizer: Any,
    *,
    is_templated: bool,
    reads_images: bool,
) -> Iterator[RowProblem]:
    """Yield what may be wrong with the words of a prompt and of its answers.

    Args:
        answers: text or messages; other values are ignored.
        is_templated: the chat template is applied to the prompt.
        reads_images: `IMAGE_MARK` has a meaning.
    """
    texts = [*_texts(prompt), *(text for answer in answers for text in _texts(answer))]
    found = _first(_EATEN, texts)
    if found is not None:
        yield remark(
            "have control characters where LaTeX commands were, as in \\frac and \\theta",
            f"the first: {found!r}",
            "write each backslash of a JSON file twice, or write the file with json.dumps",
        )
    lost = next((text for text in texts if "\ufffd" in text), None)
    if lost is not None:
        at = lost.index("\ufffd")
        yield remark(
            "have characters that an earlier conversion has lost (U+FFFD)",
            f"the first: {lost[max(0, at - 20) : at + 20]!r}",
            "convert the source again with its own encoding, or remove these rows",
        )
    escaped = next((text for text in texts if _is_escaped(text)), None)
    if escaped is not None:
        yield remark(
            "have line breaks that are written as a backslash and n",
            f"the first: {escaped[:80]!r}",
            "unescape them once more, if they are meant as line breaks",
        )
    if not reads_images and any(IMAGE_MARK in text for text in _texts(prompt)):
        yield remark(
            f"have {IMAGE_MARK} in their prompt, where no image is read",
            "the model is given the word in place of the picture",
            "name the column of images with --multimodal-keys, or remove these rows",
        )
    asked = [prompt] if isinstance(prompt, str) else _of_users(prompt)
    missing = next((text for text in asked if text.strip().lower() in _NO_VALUES), None)
    if missing is not None:
        yield remark(
            "have a prompt that is the name of a missing value",
            f"the first: {missing!r}",
            "remove these rows, if the value was missing",
        )
    mark = _foreign_mark(_texts(prompt), tokenizer, is_templated)
    if mark:
        yield remark(
            "have a prompt that carries the marks of another chat template or a transcript",
            f"the first has {mark!r}",
            "take the marks out, and give chat messages with --apply-chat-template",
        )


def _of_users(messages: Messages) -> list[str]:
    return [str(message["content"]) for message in messages if message["role"] == "user"]


def remarks_on_answers(prompt: str | Messages, answers: Sequence[Any]) -> Iterator[RowProblem]:
    """Yield what may be wrong with answers that are trained on."""
    said = [text for answer in answers for text in _answers(answer)] + list(_answers(prompt, True))
    missing = next((text for text in said if text.strip().lower() in _NO_VALUES), None)
    if missing is not None:
        yield remark(
            "have an answer that is the name of a missing value",
            f"the first: {missing!r}",
            "remove these rows, if the value was missing",
        )
    unfinished = next(
        (text for value in (prompt, *answers) for text in _unfinished(value, value is prompt)), None
    )
    if unfinished is not None:
        yield remark(
            "have answers that are cut off in their reasoning, or end with it",
            f"the first ends with {unfinished[-80:]!r}",
            "remove these rows, unless they are rejected answers of pairs",
        )
    talks = [prompt, *answers] if isinstance(prompt, list) else answers
    repeated = next((text for talk in talks for text in _repeating(talk)), None)
    if isinstance(prompt, str):
        texts = [text for answer in answers for text in _answers(answer)]
        repeated = next((text for text in texts if _begins_with(text, prompt)), repeated)
    if repeated is not None:
        yield remark(
            "have answers that begin with their prompt, which is then trained on twice",
            f"the first: {repeated[:80]!r}",
            "take the prompt out of the answers",
        )


def is_untemplated(prompt: str | Messages, tokenizer: Any) -> bool:
    """Tell whether a prompt is text without any special token, although there is a chat
    template."""
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return False
    return not any(token and token in prompt for token in _special_texts(tokenizer))


def repeated_message(messages: Messages) -> str:
    """Return the beginning of the first message that repeats the one before it; "" without one."""
    for one, other in itertools.pairwise(messages):
        is_same = one["role"] == other["role"] and one["content"] == other["content"]
        is_call = one["role"] == "tool" or one.get("tool_calls") or other.get("tool_calls")
        if is_same and one["content"].strip() and not is_call:
            return str(one["content"])[:80]
    return ""


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return []
    return [
        message["content"]
        for message in value
        if isinstance(message, Mapping) and isinstance(message.get("content"), str)
    ]


def _answers(value: Any, in_messages: bool = False) -> list[str]:
    if isinstance(value, str):
        return [] if in_messages else [value]
    messages = [one for one in value if isinstance(one, Mapping)]
    return _texts([one for one in messages if one.get("role", one.get("from")) == "assistant"])


def _unfinished(value: Any, is_prompt: bool) -> Iterator[str]:
    """Yield answers with reasoning and nothing behind it."""
    if isinstance(value, str) and not is_prompt:
        value = [{"role": "assistant", "content": value}]
    for message in value if isinstance(value, list) else []:
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        if message.get("tool_calls"):
            continue
        content = message.get("content") or ""
        if not isinstance(content, str) or message.get("step_loss_mask", 1) == 0:
            continue
        begins = content.lstrip()
        is_open = any(begins.startswith(a) and b not in begins for a, b in REASONING_MARKS)
        thought = reasoning_of(message)
        if is_open or (thought.text.strip() and not thought.answer.strip()):
            yield content.strip() or thought.text


def _repeating(talk: Any) -> Iterator[str]:
    if not isinstance(talk, list):
        return
    messages = [one for one in talk if isinstance(one, Mapping) and "role" in one]
    for one, other in itertools.pairwise(messages):
        if (one["role"], other["role"]) == ("user", "assistant"):
            question, answer = (str(message.get("content")) for message in (one, other))
            if _begins_with(answer, question):
                yield answer


def _begins_with(answer: str, question: str) -> bool:
    asked = question.strip()
    return len(asked) >= _MIN_REPEATED and answer.lstrip().startswith(asked)


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    for text in texts:
        if found := pattern.search(text):
            return text[max(0, found.start() - 20) : found.end() + 20]
    return None


def _is_escaped(text: str) -> bool:
    return "\n" not in text and len(_ESCAPED_BREAK.findall(text)) > 1


def _foreign_mark(texts: Iterable[str], tokenizer: Any, is_templated: bool) -> str:
    for text in texts:
        found = _SPECIAL_MARKS.search(text)
        if found and found.group() not in _special_texts(tokenizer):
            return found.group()
        for asks, answers in _TRANSCRIPTS if is_templated else ():
            starts = text.lstrip().startswith(asks) or f"\n{asks}" in text or f". {asks}" in text
            if starts and answers in text:
                return asks.strip()
    return ""


@functools.lru_cache(maxsize=8)
def _special_texts(tokenizer: Any) -> frozenset[str]:
    return frozenset() if tokenizer is None else frozenset(special_tokens(tokenizer).values())
