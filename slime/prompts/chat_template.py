"""Render chat messages to text, and detect text that is already templated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError
from slime.log import get_logger, tell
from slime.prompts.conversation import REASONING_KEYS, Messages, read_messages

logger = get_logger(__name__)

_PROBE = "probe of the turn's end"
_PAST_PROBE = "probe of a past turn"
#: Most tokens that end a turn: Cohere's have two, and a blank may stand before them.
_MAX_END_TOKENS = 4
#: Pairs of marks around reasoning within content: Qwen3, DeepSeek-R1, GLM; Magistral; Seed-OSS.
REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


#: Arguments of the chat template that are given by us.
OWN_ARGUMENTS = frozenset((
    "tokenizer", "conversation", "messages", "tools", "add_generation_prompt", "tokenize", "to_past"
))  # fmt: skip


class TemplateRefuses(UserError):
    """The template is valid, but refuses these messages."""


def template_source(tokenizer: Any) -> str:
    """Return the source of the tokenizer's chat template, or of all its templates; "" without
    one."""
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
    """Render messages of any wire form with the tokenizer's chat template.

    Raises:
        UserError: the tokenizer has no chat template, or one that cannot be read.
        TemplateRefuses: the template refuses the messages.
        ConversationError: a message cannot be understood.
    """
    form = template_form(tokenizer, **template_kwargs)
    shown = [form.shown(message) for message in form.merged(read_messages(messages, tools=tools))]
    return render_shown(
        tokenizer,
        shown,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )


def render_shown(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """`render_messages` for messages that already have the form that this template expects.

    Raises:
        UserError, TemplateRefuses: as `render_messages`.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    if not tokenizer.chat_template:
        raise UserError(
            "--apply-chat-template is set, but the tokenizer has no chat template",
            why="neither tokenizer_config.json nor chat_template.jinja in "
            f"'{tokenizer.name_or_path}' has one",
            fix="use an instruct model, add a chat_template.jinja, or leave "
            "--apply-chat-template out",
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        )
    except TemplateSyntaxError as error:
        raise UserError(
            "the tokenizer's chat template has a syntax error",
            why=f"line {error.lineno}: {error.message}",
            fix="correct chat_template.jinja or the chat_template of tokenizer_config.json in "
            f"'{tokenizer.name_or_path}'",
        ) from error
    except (
        TemplateError,
        TypeError,
        KeyError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
    ) as error:
        raise TemplateRefuses(
            "the chat template refuses the messages",
            why=f"{type(error).__name__}: {error}; roles: "
            f"{', '.join(str(m.get('role')) for m in messages)}",
            fix="check the roles and their order, and --apply-chat-template-kwargs",
        ) from error


def left_out_roles(messages: Messages, rendered: str) -> list[str]:
    """Return the roles of the messages some of whose words a rendering lacks; answers are not
    looked at.

    A word is searched as it is and as JSON writes it.

    Example:
        >>> left_out_roles([{"role": "critic", "content": "too long"}], "<user>hi</user>")
        ['critic']
    """
    found = set()
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "assistant" or content in rendered:
            continue
        words = set(re.findall(r"\w+", content)) - set(re.findall(r"\w+", rendered))
        if any(word not in rendered and json.dumps(word)[1:-1] not in rendered for word in words):
            found.add(str(message["role"]))
    return sorted(found)


def left_out_tools(
    tools: Iterable[dict[str, Any]] | None, rendered: str, form: TemplateForm
) -> list[str]:
    """Return the names of the tools that a rendering lacks; all if the template writes no tools."""
    names = [str(tool.get("function", tool).get("name")) for tool in tools or ()]
    return [name for name in names if not form.writes_tools or name not in rendered]


# -- the form in which a template takes messages ---------------------------------------------------


@dataclass(frozen=True)
class TemplateForm:
    """The form in which one chat template expects messages, found by rendering probes.

    Attributes:
        text_arguments: arguments of calls must be JSON text, not objects.
        null_content: the content of a message with calls and no text must be null, not "".
        short_ids: ids of calls must be nine letters or digits (Mistral's).
        parts: content must be a list of parts, not text.
        reasoning_key: the key under which reasoning is written; None: there is none.
        calls_reasoning_key: the key under which reasoning before a call is written.
        thinking_parts: reasoning is written if it is a content part of the type "thinking"
            (Mistral's).
        writes_inline: reasoning between <think> marks in the content of the last answer is written
            unchanged.
        thinks_inline: as ``writes_inline``, and the template knows these marks.
        knows_developer: there is a role "developer"; otherwise its messages are the system's.
        writes_names: the ``name`` of a user's message is written.
        writes_tools: tools are written.
        varies: two renderings of the same messages differ.
        asks: ``add_generation_prompt`` has an effect.
        head: the text before an answer that no prompt ends with, where it has none.
        tail: the text that is written after the last assistant message.
        end: the part of ``tail`` that the model itself generates: up to its end-of-turn token.
    """

    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    parts: bool = False
    reasoning_key: str | None = None
    calls_reasoning_key: str | None = None
    thinking_parts: bool = False
    writes_inline: bool = True
    thinks_inline: bool = False
    knows_developer: bool = False
    writes_names: bool = False
    writes_tools: bool = False
    varies: bool = False
    asks: bool = True
    head: str = ""
    tail: str = ""
    end: str = ""

    def merged(self, messages: Messages) -> Messages:
        """Return the messages with roles that the template knows: without the role "developer",
        developer messages become system messages, merged with a system message right before."""
        if self.knows_developer or all(message["role"] != "developer" for message in messages):
            return messages
        found: Messages = []
        for message in messages:
            is_developer = message["role"] == "developer"
            if is_developer and found and found[-1]["role"] == "system":
                content = f"{found[-1]['content']}\n\n{message['content']}"
                found[-1] = found[-1] | {"content": content}
            else:
                found.append(message | {"role": "system"} if is_developer else message)
        return found

    def shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Convert one message from `read_messages` to the form that the template expects."""
        shown = {
            key: value
            for key, value in message.items()
            if key not in ("step_loss_mask", "reasoning_content")
        }
        if message["role"] == "assistant":
            shown |= self._answer(message)
        if self.short_ids and "tool_call_id" in shown:
            shown["tool_call_id"] = short_id(shown["tool_call_id"])
        if self.parts and isinstance(shown.get("content"), str):
            shown["content"] = [{"type": "text", "text": shown["content"]}]
        return shown

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        content: str | list[dict[str, str]] | None = message["content"]
        thought = reasoning_of(message)
        answer: dict[str, Any] = {}
        key = self.reasoning_key
        if key is None and "tool_calls" in message:
            key = self.calls_reasoning_key
        if thought.text and key:
            # empty marks are kept where the template has the same ones
            if thought.text.strip() or self.thinks_inline:
                answer[key] = thought.text.strip("\n")
            content = thought.answer
        elif thought.text and self.thinking_parts:
            content = [{"type": "thinking", "thinking": thought.text.strip("\n")}]
            if thought.answer:
                content.append({"type": "text", "text": thought.answer})
        elif thought.text and self.thinks_inline and thought.marks is None:
            content = f"<think>\n{thought.text.strip(chr(10))}\n</think>\n\n{thought.answer}"
        elif not self.writes_inline or thought.marks is None:
            content = thought.answer
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            answer["tool_calls"] = [self._call(call, at) for at, call in calls]
            if self.null_content and not content:
                content = None
        return answer | {"content": content}

    def _call(self, call: dict[str, Any], at: int) -> dict[str, Any]:
        function = dict(call["function"])
        shown = call | {"function": function}
        if self.text_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if self.short_ids:
            shown["id"] = short_id(call.get("id") or f"{function['name']} {at}")
        return shown


def short_id(given: Any) -> str:
    """Nine letters and digits for a call's id: the id itself if it has this form, else a digest."""
    text = str(given)
    if len(text) == 9 and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def template_form(tokenizer: Any, **template_kwargs: Any) -> TemplateForm:
    """Return the form in which the tokenizer's chat template expects messages. Cached per template
    and keyword arguments."""
    source = template_source(tokenizer)
    if not source:
        return TemplateForm()
    return _template_form(
        tokenizer, source, json.dumps(template_kwargs, sort_keys=True, default=repr)
    )


_NAME = "probe_name"
_KEY = "probe_key"
_VALUE = "probe value"
_THOUGHT = "probe of the thought"
_ANSWER = "probe of the answer"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_PROBE_FUNCTION = {"name": _NAME, "description": "probe", "parameters": _NO_PARAMETERS}
_PROBE_TOOLS = [{"type": "function", "function": _PROBE_FUNCTION}]


@functools.lru_cache(maxsize=16)
def _template_form(tokenizer: Any, source: str, kwargs_json: str) -> TemplateForm:
    given = json.loads(kwargs_json).items()
    kwargs = {key: value for key, value in given if key not in ("tools", "messages")}

    def render(messages: Messages, *, ask: bool = False, tools: Any = None) -> str | None:
        for some in (tools, _PROBE_TOOLS):  # some templates refuse to render without tools
            try:
                return render_shown(
                    tokenizer, messages, tools=some, add_generation_prompt=ask, **kwargs
                )
            except TemplateRefuses:
                continue
        return None

    asked = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": _ANSWER}
    for form in (TemplateForm(), TemplateForm(parts=True)):
        user = form.shown(asked)
        plain = render([user, form.shown(answer)])
        is_dumped = plain is not None and "'type':" in plain  # the list of parts as Python text
        if plain and not is_dumped and _ANSWER in plain and (form.parts or "hello" in plain):
            break
    else:
        form = TemplateForm()
        user = asked
        plain = None

    def probe(form: TemplateForm, *messages: dict[str, Any], tools: Any = None) -> str:
        return render([user, *map(form.shown, messages)], tools=tools) or ""

    form = _form_of_calls(form, probe)
    inline = probe(
        form, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    )
    writes_inline = 0 <= inline.find(_THOUGHT) < inline.find(_ANSWER)
    writes_inline = writes_inline and inline.count("<think>") == inline.count("</think>")
    form = dataclasses.replace(
        form,
        reasoning_key=next(
            (key for key in REASONING_KEYS if _writes_thought(form, key, probe)), None
        ),
        calls_reasoning_key=next(
            (key for key in REASONING_KEYS if _writes_thought(form, key, probe, calls=True)), None
        ),
        thinking_parts=_writes_thought(dataclasses.replace(form, thinking_parts=True), None, probe),
        writes_names=_NAME in (render([user | {"name": _NAME}]) or ""),
        writes_tools=any(
            _NAME in (render([*system, user], ask=True, tools=_PROBE_TOOLS) or "")
            for system in ([], [form.shown({"role": "system", "content": "hello"})])
        ),
        varies=len({render([user, form.shown(answer)] * 4) for _ in range(4)}) > 1,
        writes_inline=writes_inline,
        thinks_inline=writes_inline and "</think>" in source,
        asks=render([user]) != render([user], ask=True),
    )
    if "developer" in source:
        told = render([form.shown({"role": "developer", "content": _THOUGHT}), user]) or ""
        form = dataclasses.replace(form, knows_developer=_THOUGHT in told)
    if plain is not None:
        tail = plain[plain.rfind(_ANSWER) + len(_ANSWER) :]
        followed = probe(form, answer, user)
        behind = followed[followed.find(_ANSWER) + len(_ANSWER) :] if _ANSWER in followed else ""
        form = dataclasses.replace(form, tail=tail, end=_end_of(tail, behind, tokenizer))
        asked_text = render([user]) or ""
        if not form.asks and plain.startswith(asked_text):
            head = plain[len(asked_text) : plain.rfind(_ANSWER)].strip()
            form = dataclasses.replace(form, head=head)
    return form


def warn_of_no_generation_prompt(tokenizer: Any, **template_kwargs: Any) -> None:
    """Warn if prompts end before what the chat template writes between question and answer."""
    head = template_form(tokenizer, **template_kwargs).head
    if head:
        tell(
            logger,
            "the chat template has no generation prompt: it writes %r before an answer, and "
            "prompts end without it, so that the model has to generate it; write it where "
            "add_generation_prompt is true (chat_template.jinja)",
            head,
        )


_PROBE_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
}


def _form_of_calls(form: TemplateForm, probe: Callable[..., str]) -> TemplateForm:
    """Try forms of calls, the most usual first; use the first that the template writes
    unchanged."""
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
        {"role": "tool", "content": "probe", "name": _NAME, "tool_call_id": "call_1"},
    )
    for short_ids in (False, True):
        for text_arguments in (False, True):
            for null_content in (False, True):
                tried = dataclasses.replace(
                    form,
                    short_ids=short_ids,
                    text_arguments=text_arguments,
                    null_content=null_content,
                )
                for count in (1, 2):
                    text = probe(tried, *messages[:count], tools=_PROBE_TOOLS)
                    written = all(word in text for word in (_NAME, _KEY, _VALUE))
                    if written and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text:
                        return tried
    return form


def _writes_thought(
    form: TemplateForm, key: str | None, probe: Callable[..., str], *, calls: bool = False
) -> bool:
    tried = dataclasses.replace(form, reasoning_key=key)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _ANSWER,
        "reasoning_content": _THOUGHT,
    }
    if calls:
        message |= {"content": "", "tool_calls": [_PROBE_CALL]}
    text = probe(tried, message, tools=_PROBE_TOOLS if calls else None)
    # a list of parts, written as Python or JSON
    is_dumped = '"thinking":' in text or "'thinking':" in text
    return 0 <= text.find(_THOUGHT) < text.rfind(_VALUE if calls else _ANSWER) and not is_dumped


def _end_of(tail: str, behind: str, tokenizer: Any) -> str:
    """Return the part of the tail that the model generates. It ends with the last special token
    that is also written when a user message follows, because some templates end the whole text with
    another one; else with the first special token."""
    special = {
        token for token in [*special_tokens(tokenizer).values(), tokenizer.eos_token] if token
    }
    if not special:
        return ""
    pattern = re.compile(
        "(" + "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) + ")"
    )
    pieces = [piece for piece in pattern.split(tail) if piece]
    others = [piece for piece in pattern.split(behind) if piece]
    count = next(
        (at for at, (a, b) in enumerate(zip(pieces, others)) if a != b),
        min(len(pieces), len(others)),
    )
    if tokenizer.eos_token in pieces[:count]:
        count = pieces.index(tokenizer.eos_token) + 1
    while count and pieces[count - 1] not in special:
        count -= 1
    if not count:
        count = next((at + 1 for at, piece in enumerate(pieces) if piece in special), 0)
    return "".join(pieces[:count])


# -- reasoning in content --------------------------------------------------------------------------


@dataclass(frozen=True)
class ReasonedAnswer:
    """Reasoning and answer of an assistant message; ``text`` is "" without reasoning.

    Attributes:
        marks: the pair of marks around the reasoning in the content; None if it has its own key, or
            there is none.
        gap: line breaks between the closing mark and the answer.
    """

    text: str
    answer: str
    marks: tuple[str, str] | None = None
    gap: str = ""


def reasoning_of(message: dict[str, Any]) -> ReasonedAnswer:
    """Reasoning of a normalised message, under its own key or at the beginning of the content.

    Example:
        >>> reasoning_of({"content": "<think>\\nhm\\n</think>\\n\\n4"})
        ReasonedAnswer(text='\\nhm\\n', answer='4', marks=('<think>', '</think>'), gap='\\n\\n')
    """
    content = message.get("content") or ""
    given = message.get("reasoning_content")
    inline = _inline_thought(content)
    if not given:
        return inline
    is_repeated = inline.text.strip() in ("", given.strip())
    return ReasonedAnswer(given, inline.answer if is_repeated else content)


def _inline_thought(content: str) -> ReasonedAnswer:
    for begin, end in REASONING_MARKS:
        before, found, after = content.partition(end)
        # the opening mark may be missing: prompts of some models end with it
        is_alone = begin not in before and not _is_mentioned(before, after)
        if found and (before.lstrip().startswith(begin) or is_alone):
            answer = after.lstrip("\n")
            gap = after[: len(after) - len(answer)]
            return ReasonedAnswer(before.lstrip().removeprefix(begin), answer, (begin, end), gap)
    return ReasonedAnswer("", content)


def _is_mentioned(before: str, after: str) -> bool:
    """Tell whether a mark between two texts is a word of a sentence: "close it with </think>."."""
    return bool(re.search(r"[ \t`'\"(]$", before) and re.match(r"[ \t`'\",.;:)]", after))


def render_prompt(
    tokenizer: Any,
    prompt: str | Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """Render messages with the generation prompt; bare text counts as one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return render_messages(tokenizer, messages, tools=tools, **template_kwargs)


def between_turns(
    tokenizer: Any,
    messages: dict[str, Any] | Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    calls: list[dict[str, Any]] | None = None,
    to_past: bool = False,
    **template_kwargs: Any,
) -> str:
    """Render the text between two assistant turns: the end of the turn, ``messages``, the header of
    the next turn.

    Args:
        calls: the ``tool_calls`` of the first turn, for templates that write results of tools only
            behind their calls. By default the messages' own names and ids are used.
        to_past: the next turn is a past one; templates may begin past turns differently.
    Raises:
        UserError, TemplateRefuses: as `render_messages`.
    """
    between = [messages] if isinstance(messages, dict) else messages
    start: Messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": _PROBE},
    ]
    render: Callable[..., str] = before_past_turn if to_past else render_messages
    results = [message for message in between if message["role"] == "tool"]
    text = ""
    try:
        text = render(tokenizer, start + between, tools=tools, **template_kwargs)
    except TemplateRefuses as refused:
        if to_past:
            # Mistral's templates refuse two assistant turns with only tool results between them
            with contextlib.suppress(TemplateRefuses):
                text = render_messages(tokenizer, start + between, tools=tools, **template_kwargs)
        if not text and results:
            try:
                text = _behind_calls(tokenizer, between, render, calls, tools, template_kwargs)
            except TemplateRefuses as unnamed:
                raise TemplateRefuses(refused.what, refused.why, unnamed.fix) from unnamed
            if text:
                return text
        if not text:
            raise
    # the first one: messages may contain the probe too
    text = text[text.find(_PROBE) + len(_PROBE) :]
    if left_out_roles(read_messages(results), text):
        return _behind_calls(tokenizer, between, render, calls, tools, template_kwargs) or text
    return text


def _behind_calls(
    tokenizer: Any,
    messages: Messages,
    render: Callable[..., str],
    calls: list[dict[str, Any]] | None,
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> str:
    """Do as `between_turns` after a turn that calls tools; "" if the template refuses it.

    Raises:
        TemplateRefuses: the messages do not tell which tool a result is of.
    """
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
    if calls is None:
        only = (tools or [{}])[0].get("function", {}).get("name") if len(tools or ()) == 1 else None
        names = [message.get("name") or only for message in results]
        if None in names:
            raise TemplateRefuses(
                "the chat template refuses the messages",
                why="it writes results of tools with the name of the tool, and this one has none",
                fix="give the message the 'name' of its tool",
            )
        calls = [
            {
                "id": message.get("tool_call_id") or f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": {}},
            }
            for number, (message, name) in enumerate(zip(results, names))
        ]
    by_id = {call["id"]: call for call in calls if call.get("id")}
    told = [
        {"name": by_id.get(message.get("tool_call_id"), call)["function"]["name"]}
        | {"tool_call_id": call.get("id")}
        | message
        for call, message in zip(calls, results)
    ]
    start: Messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    whole = start + told + messages[len(told) :]
    try:
        called = render_messages(
            tokenizer, start, tools=tools, add_generation_prompt=False, **kwargs
        )
        text = render(tokenizer, whole, tools=tools, **kwargs)
    except TemplateRefuses:
        return ""
    pairs = enumerate(zip(called, text, strict=False))
    size = next((at for at, (one, other) in pairs if one != other), min(len(called), len(text)))
    # the model has generated its turn up to the last token of control
    ends = [text.rfind(one, 0, size) for one in special_tokens(tokenizer).values() if one]
    last = max(ends, default=-1)
    return text[last if last >= 0 else size :]


def before_past_turn(
    tokenizer: Any,
    messages: Messages,
    *,
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> str:
    """Render messages up to an assistant turn that is not the last one.

    Raises:
        UserError, TemplateRefuses: as `render_messages`.
    """
    past: Messages = [
        {"role": "assistant", "content": _PAST_PROBE},
        {"role": "user", "content": "hello"},
    ]
    text = render_messages(
        tokenizer, messages + past, tools=tools, add_generation_prompt=False, **template_kwargs
    )
    return text[: text.rfind(_PAST_PROBE)]


def takes_any_order(tokenizer: Any) -> bool:
    """Tell whether the template writes messages in any order that agents send: several of one role
    in a row, and system messages in the middle. Some templates refuse them (Mistral's), or write
    all system messages first (DeepSeek's)."""
    roles = ("system", "system", "user", "user", "assistant", "user", "system")
    told: Messages = [
        {"role": role, "content": f"probe{number}"} for number, role in enumerate(roles)
    ]
    try:
        text = render_messages(tokenizer, told)
    except TemplateRefuses:
        return False
    places = [text.find(one["content"]) for one in told]
    return places[0] >= 0 and places == sorted(places)


def in_turns(messages: Messages, *, begins: bool) -> Messages:
    """Messages for templates that do not `take any order <takes_any_order>`: one system message at
    the beginning, later ones as user messages, and consecutive messages of one role merged.

    Args:
        begins: whether the conversation begins with them.
    """
    found: Messages = []
    for message in messages:
        before = found[-1]["role"] if found else "system" if begins else "assistant"
        role = "system" if message["role"] == "developer" else message["role"]
        role = "user" if role == "system" != before else role
        if found and role == before and role in ("system", "user"):
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message | {"role": role})
    return found


def without_repeated_end(before: list[int], between: list[int]) -> list[int]:
    """Return the tokens of `between_turns` without the end of the turn if ``before`` already ends
    with it.

    Example:
        >>> without_repeated_end([7, 99], [99, 5]), without_repeated_end([7], [99, 5])
        ([5], [99, 5])
        >>> without_repeated_end([7, 98, 99], [98, 99, 5])
        [5]
    """
    counts = range(min(len(before), len(between), _MAX_END_TOKENS), 0, -1)
    return between[next((n for n in counts if before[-n:] == between[:n]), 0) :]


def _render_probe(tokenizer: Any, messages: Messages, *, ask: bool = False) -> str:
    """Render messages; with tools if the template refuses them without."""
    render = functools.partial(render_messages, tokenizer, messages, add_generation_prompt=ask)
    with contextlib.suppress(TemplateRefuses):
        return render()
    return render(tools=_PROBE_TOOLS)


def template_markers(tokenizer: Any) -> list[str]:
    """Return the special tokens that the chat template writes around messages, e.g.
    ``["<|im_start|>", "<|im_end|>"]``."""
    if not tokenizer.chat_template:
        return []
    text = _render_probe(tokenizer, [{"role": "user", "content": "hello"}], ask=True)
    special = special_tokens(tokenizer).values()
    return sorted({token for token in special if token and token in text})


def carries_template(prompt: str | Messages, markers: list[str]) -> bool:
    """Tell whether a prompt that is still to be templated already holds markers of the template."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    return any(marker in text for text in texts if isinstance(text, str) for marker in markers)


def end_of_turn_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens (id → text) that the chat template puts right after an assistant's message; {}
    without one."""
    if not getattr(tokenizer, "chat_template", None):
        return {}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    text = _render_probe(tokenizer, messages)
    tail = text[text.rfind(_PROBE) + len(_PROBE) :]
    special = special_tokens(tokenizer)
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return {number: special[number] for number in ids if number in special}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens by id, including those added for chat templates."""
    added = {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
