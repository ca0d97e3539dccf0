"""Tokens and loss masks of supervised conversations, for any chat template.

A turn is trained as the model would generate it. Its prompt is the text that the template renders
up to the turn, with the generation prompt. The trained text is what the same template adds for the
answer, up to its end-of-turn token. Both are found by comparing renderings, never by line breaks or
marks of a known template.

Turns of a conversation share one sequence as long as each prompt begins with the earlier turns as
they were generated. If a template rewrites earlier turns (it leaves their reasoning out, or ends
them with another token), a new sequence begins: earlier turns are its context, and are trained in
previous sequences.

Each piece is tokenised separately, so no token contains both trained and untrained text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slime.errors import UserError, a_type
from slime.log import get_logger, tell
from slime.prompts.chat_template import (
    REASONING_MARKS,
    ReasonedAnswer,
    TemplateForm,
    TemplateRefuses,
    left_out_roles,
    left_out_tools,
    reasoning_of,
    render_shown,
    special_tokens,
    template_form,
    template_source,
)
from slime.prompts.conversation import Messages, conversation_in, read_messages
from slime.prompts.tokenizer import with_opening

logger = get_logger(__name__)

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Most attempts to encode a conversation if the template writes the time and renderings differ.
_CLOCK_TRIES = 5
#: Indentation before the first word of an answer.
_INDENTED = re.compile(r"\n*(?: [ \t]|\t)[ \t]*\S{1,20}")
#: Marks before reasoning, and those around none.
_OPENED = re.compile("|".join(re.escape(mark) for pair in REASONING_MARKS for mark in pair))
#: Two texts with different beginnings: the text that is rendered before both is a turn's header.
_ONE = "Aprobe of the head"
_OTHER = "Zprobe of the head"


@dataclass(frozen=True)
class TrainedSequence:
    """Tokens up to the last trained one, and a 0/1 mask of the same length."""

    tokens: list[int]
    mask: list[int]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.mask.index(1)


@dataclass(frozen=True)
class Unended:
    """Why a turn is trained without an end token, the fix, and the last trained token."""

    what: str
    fix: str
    last: str


@dataclass
class Encoded:
    """A row of supervised data, encoded.

    Attributes:
        sequences: one, or several if the template rewrites earlier turns.
        lost_reasoning: turns with reasoning in the data that the template does not write.
        without_reasoning: turns without reasoning although the generation prompt opens it.
        unmatched: the end of the generation prompt, if a turn begins otherwise and is trained
            behind what both have; "" if there is none.
        control_tokens: messages with special tokens in their text, which the tokenizer reads as
            such.
        unended: why the first turn without an end token has none; None if every turn ends with one.
        reasoning_fix: what may make the template write reasoning.
        unread_label: there is a label, and the conversation is trained without it.
        unanswered: messages after the last answer are left out.
        lost_indentation: answers whose blanks at the beginning the template takes away.
        left_out_roles: roles of messages that the template leaves out of the prompts.
        left_out_tools: names of tools that it leaves out.
    """

    sequences: list[TrainedSequence] = field(default_factory=list)
    lost_reasoning: int = 0
    without_reasoning: int = 0
    unmatched: str = ""
    control_tokens: int = 0
    unended: Unended | None = None
    reasoning_fix: str = ""
    unread_label: bool = False
    unanswered: bool = False
    lost_indentation: int = 0
    left_out_roles: list[str] = field(default_factory=list)
    left_out_tools: list[str] = field(default_factory=list)


@dataclass
class _Sequence:
    """Pieces of text, each trained or not."""

    number: int = 0
    """The message that ends it."""
    text: str = ""
    pieces: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, text: str, trained: bool) -> None:
        if text:
            self.text += text
            self.pieces.append((text, trained))


@dataclass(frozen=True)
class _Turn:
    prompt: str
    said: str


class SftEncoding:
    """Encodes rows of supervised data: conversations, or prompts with their answers.

    Args:
        ends: ids of tokens that end an answer.
        template_kwargs: for the chat template.
        apply_chat_template: a prompt that is plain text is a user message.
        placeholder: text of an image placeholder; its special tokens are not counted as control
            tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: Iterable[int] = (),
        *,
        template_kwargs: dict[str, Any] | None = None,
        apply_chat_template: bool = False,
        placeholder: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self._placeholder = placeholder
        self._kwargs = template_kwargs or {}
        self._templates_text = apply_chat_template
        self._special = special_tokens(tokenizer)
        self._source = template_source(tokenizer)
        self._form = template_form(tokenizer, **self._kwargs)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        special = self._special.items()
        end = self._form.end
        of_template = [number for number, text in special if text and end.endswith(text)]
        self.ends = frozenset([*ends, *eos, *of_template])
        self._known: dict[str, list[int]] = {}
        self._control = re.compile(
            "|".join(re.escape(text) for text in self._special.values() if text) or "(?!)"
        )
        self._ends = [self._special[number] for number in self.ends if self._special.get(number)]
        self._reasoning_fix = _reasoning_fix(self._source, self._kwargs)

    def read_ahead(self, texts: Iterable[str]) -> None:
        """Tokenise texts that will be encoded next, in one call: separate calls take several times
        as long."""
        unique = list(dict.fromkeys(texts))
        ids = self.tokenizer(unique, add_special_tokens=False)["input_ids"] if unique else []
        self._known = dict(zip(unique, ids, strict=True))

    def _ids(self, text: str) -> list[int]:
        known = self._known.get(text)
        return (
            list(self.tokenizer.encode(text, add_special_tokens=False)) if known is None else known
        )

    def encode(
        self,
        prompt: str | Messages,
        label: Any = None,
        *,
        tokens: list[int] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> Encoded:
        """Encode one row.

        Args:
            prompt: a conversation with answers, or a prompt or conversation with ``label`` as its
                last answer.
            tokens: tokens of a prompt that is already tokenised.
        Raises:
            UserError: there is nothing to train on, a turn cannot be trained, or nothing stands
                before the first trained token.
        """
        found = self._encoded(prompt, label, tokens, tools)
        if any(sequence.mask[0] for sequence in found.sequences):
            raise UserError(
                "the first token of all is trained",
                why="a token is predicted from the tokens before it, and the tokenizer or chat "
                "template puts none before this answer",
                fix="give the row a prompt, or a user's message before the first answer",
            )
        return found

    def _encoded(
        self,
        prompt: str | Messages,
        label: Any,
        tokens: list[int] | None,
        tools: list[dict[str, Any]] | None,
    ) -> Encoded:
        if isinstance(prompt, str) and prompt and conversation_in(label, "label"):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            given = read_messages(prompt, tools=tools)
            messages = with_answer(given, label)
            if any(message["role"] == "assistant" for message in messages):
                found = self._conversation(messages, tools)
                found.unread_label = messages is given and label not in (None, "")
                return found
        if not isinstance(label, str) or not label.strip():
            kind = "blank" if isinstance(label, str) else a_type(label)
            raise UserError(
                "there is no answer to train on",
                why="the prompt holds no assistant message, and the label is "
                + (kind if label is not None else "not set"),
                fix="pass --label-key, or rows of chat messages that end with the assistant's",
            )
        if tokens:
            return self._plain(list(tokens), label)
        assert isinstance(prompt, str), "messages have their answer by now"
        if self._templates_text:
            asked = [{"role": "user", "content": prompt}]
            return self._conversation(with_answer(asked, label), tools)
        opened = with_opening(self.tokenizer, prompt, self._ids(prompt), templated=False)
        return self._plain(opened, label)

    def _plain(self, prompt: list[int], label: str) -> Encoded:
        answer = self._ids(label)
        if label[-1].isspace() and self._is_end(self._ids(label.rstrip())):
            answer = self._ids(label.rstrip())  # blanks behind an end token are never generated
        if self.tokenizer.eos_token_id is not None and not self._is_end(answer):
            answer = [*answer, self.tokenizer.eos_token_id]
        found = Encoded([TrainedSequence(prompt + answer, [0] * len(prompt) + [1] * len(answer))])
        found.control_tokens = int(self._has_control_tokens(self._without_end(label)))
        if not self._is_end(answer):
            found.unended = self._unended(answer)
        return found

    def _is_end(self, ids: list[int]) -> bool:
        return bool(ids) and ids[-1] in self.ends

    # -- conversations -----------------------------------------------------------------------------

    def _conversation(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Encoded:
        if self._form.end:
            messages = [self._without_own_end(message) for message in messages]
        messages = self._form.merged(messages)
        renderer = _Renderer(self.tokenizer, self._form, messages, tools, self._kwargs)
        if "strftime_now" not in self._source and not self._form.varies:
            return self._turns(messages, renderer)
        for _ in range(0 if self._form.varies else _CLOCK_TRIES):
            before = renderer.whole()
            error: UserError | None = None
            try:
                found = self._turns(messages, renderer)
            except UserError as raised:
                error = raised
            if renderer.whole() != before:
                continue  # the time changed between two renderings
            if error is not None:
                raise error
            return found
        raise UserError(
            "the chat template writes the same messages differently each time",
            why="what is trained is found by comparing renderings, and these differ by chance or "
            "by the time of day",
            fix="remove random values and times from chat_template.jinja of the model",
        )

    def _turns(self, messages: Messages, renderer: _Renderer) -> Encoded:
        found = Encoded(reasoning_fix=self._reasoning_fix)
        found.control_tokens = sum(self._holds_control_tokens(message) for message in messages)
        sequences: list[_Sequence] = []
        trained = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("step_loss_mask", 1) == 0:
                continue
            thought = reasoning_of(message)
            if not (thought.answer.strip() or thought.text.strip() or message.get("tool_calls")):
                continue  # an empty turn
            turn = self._turn(renderer, number, message, thought, found)
            is_empty = not (thought.answer.strip() or message.get("tool_calls"))
            if is_empty and thought.text.strip() not in turn.said:
                continue  # the template writes nothing of it but the end
            if not sequences or not turn.prompt.startswith(sequences[-1].text):
                sequences.append(_Sequence())
            sequences[-1].add(turn.prompt[len(sequences[-1].text) :], False)
            sequences[-1].add(turn.said, True)
            trained += 1
            sequences[-1].number = number
        if not trained:
            raise UserError(
                "there is no assistant message to train on",
                why="each of them is empty, or marked as not trained",
                fix="give each conversation an answer, or remove the row",
            )
        last = sequences[-1].number
        found.unanswered = messages[-1]["role"] != "assistant"
        text = "".join(sequence.text for sequence in sequences)
        found.left_out_roles = left_out_roles(messages[:last], text)
        found.left_out_tools = left_out_tools(renderer.tools, text, self._form)
        found.sequences = [self._tokens(sequence, renderer, found) for sequence in sequences]
        if _GENERATION_TAG.search(self._source) and len(sequences) == 1:
            turns = sum(message["role"] == "assistant" for message in messages[: last + 1])
            if trained == turns:
                found.sequences = [self._marked(renderer, last, found.sequences[0], found)]
        return found

    def _turn(
        self,
        renderer: _Renderer,
        number: int,
        message: dict[str, Any],
        thought: ReasonedAnswer,
        found: Encoded,
    ) -> _Turn:
        """Return the prompt of message ``number``, and what the model generates after it."""
        form = self._form
        has_own = thought.marks is None and thought.text
        if has_own and reasoning_of({"content": thought.answer}).text.strip():
            why = "it has reasoning under its own key, and other reasoning in its content"
            raise _undetermined(number, why)
        answered = renderer.answered(number)
        prompt = renderer.prompt(number)
        if prompt is None or not answered.startswith(prompt):
            turn = self._after_another_head(renderer, number, thought, answered, prompt, found)
        elif form.asks:
            turn = _in_opened_reasoning(_Turn(prompt, answered[len(prompt) :]), thought, found)
        else:
            head = renderer.head(number, answered)
            start = len(prompt) if not head[len(prompt) :].strip() else len(head)
            turn = _Turn(answered[:start], answered[start:])
            turn = _in_opened_reasoning(turn, thought, found)
        said = self._up_to_end(turn.said, message)
        _check(said, message, thought, number)
        if indented := _INDENTED.match(thought.answer):
            found.lost_indentation += indented.group() not in said
        if thought.text.strip() and thought.text.strip() not in said:
            found.lost_reasoning += 1
        return _Turn(turn.prompt, said)

    def _after_another_head(
        self,
        renderer: _Renderer,
        number: int,
        thought: ReasonedAnswer,
        answered: str,
        prompt: str | None,
        found: Encoded,
    ) -> _Turn:
        """Return the turn if the rendered answer does not begin with the generation prompt, for
        example because that opens reasoning."""
        head = renderer.head(number, answered)
        said = answered[len(head) :]
        if prompt is None:
            return _Turn(head, said)
        if (
            turn := self._behind_rewritten(renderer, number, prompt, _Turn(head, said))
        ) is not None:
            return turn
        # earlier text may differ too: compare from the end of the previous message
        before = renderer.text_before(number)
        is_in_both = before in prompt and before in head
        at = prompt.rfind(before) if is_in_both else 0
        head_at = head.rfind(before) if is_in_both else 0
        tail_of_head = head[head_at:]
        tail_of_prompt = prompt[at:]
        common = len(_common_prefix(tail_of_head, tail_of_prompt))
        shared = prompt[: at + common]
        opened = tail_of_prompt[common:]  # only in the prompt
        missing = tail_of_head[common:]  # only before an answer
        rest = missing + said
        marks = next((pair for pair in REASONING_MARKS if pair[0] in opened), None)
        is_rewritten = before in prompt and before not in shared
        is_added = marks is None and opened.strip() and before in missing and not is_in_both
        if before and (is_rewritten or is_added):
            why = "the template writes earlier text differently once the message is answered"
            raise _undetermined(number, why)
        if marks is None and missing.strip() and opened.endswith(missing):
            return _Turn(prompt, said)  # the same header, with something more in it
        if marks is None and opened.strip():
            return _behind_another_prompt(_Turn(shared, rest), opened, found)
        if marks is None:
            return _Turn(prompt, rest.lstrip() if opened else rest)
        begin, end = marks
        # an empty block of reasoning: the answer follows, unless there is reasoning after all
        if end in opened:
            is_written = bool(thought.text.strip()) and thought.text.strip() in rest
            if not is_written:
                return _Turn(prompt, rest)
            return _behind_another_prompt(_Turn(shared, rest), opened, found)
        gap = "\n" if opened.endswith("\n") else ""
        bare = rest.lstrip()
        if not thought.text.strip():
            if bare.startswith(end):
                return _Turn(prompt, bare if gap else rest)
            found.without_reasoning += 1
            return _Turn(shared + missing, said)
        if bare.startswith(begin):
            return _Turn(prompt, bare[len(begin) :].removeprefix(gap))
        if bare.startswith(thought.text.strip()):
            return _Turn(prompt, bare)
        answer = renderer.without_reasoning(number, thought)
        reasoning = thought.text.removeprefix(gap) + end + thought.gap
        if thought.marks is None:
            reasoning = f"{thought.text.strip(chr(10))}{gap}{end}{gap}{gap}"
        return _Turn(prompt, reasoning + answer)

    def _behind_rewritten(
        self, renderer: _Renderer, number: int, prompt: str, turn: _Turn
    ) -> _Turn | None:
        """Return the turn behind ``prompt`` if the template writes earlier text differently once
        there is an answer, and the same header before it; else None. The model is given the prompt.

        Args:
            turn: rendered with the answer.
        """
        head = turn.prompt
        if self._form.asks:
            header = renderer.generation_prompt(number, prompt)
            start = head.rfind(header) + len(header) if header.strip() else -1
            rest = head[start:]
            is_last = header in head and start >= 0 and not _OPENED.sub("", rest).strip()
            return _Turn(prompt, rest + turn.said) if is_last else None
        before = renderer.text_before(number)
        tail = prompt[prompt.rfind(before) :]
        of_head = head[head.rfind(before) :]
        if not before or before not in prompt or not of_head.startswith(tail):
            return turn
        header = of_head[len(tail) :]
        is_blank = not header.strip()
        return _Turn(prompt, header + turn.said) if is_blank else _Turn(prompt + header, turn.said)

    def _holds_control_tokens(self, message: dict[str, Any]) -> bool:
        content = message["content"]
        if message["role"] == "assistant" and not self._form.end:  # data with its own ends
            content = self._without_end(content)
        return any(map(self._has_control_tokens, (content, message.get("reasoning_content", ""))))

    def _has_control_tokens(self, text: str) -> bool:
        if self._placeholder:
            text = text.replace(self._placeholder, "")
        return self._control.search(text) is not None

    def _without_own_end(self, message: dict[str, Any]) -> dict[str, Any]:
        """Remove an end token from the end of an answer, behind which the template would write
        another one."""
        if message["role"] != "assistant":
            return message
        bare = self._without_end(message["content"])
        return message if bare == message["content"].rstrip() else {**message, "content": bare}

    def _without_end(self, text: str) -> str:
        text = text.rstrip()
        for end in self._ends:
            text = text.removesuffix(end)
        return text

    def _up_to_end(self, said: str, message: dict[str, Any]) -> str:
        """Cut off the text that the template writes after the end-of-turn token."""
        form = self._form
        calls = [call["function"] for call in message.get("tool_calls", ())]
        # some templates write an empty answer after calls, or always the header of the next turn
        if calls:
            values = [value for call in calls for value in call["arguments"].values()]
            texts = (value for value in values if isinstance(value, str))
            words = [calls[-1]["name"], *filter(self._control.search, texts)]
            spoken = max(said.rfind(word) + len(word) for word in words)
            ends = [said.find(end, spoken) + len(end) for end in self._ends if end in said[spoken:]]
            if ends:
                return said[: min(ends)]
        if form.tail and said.endswith(form.tail):
            return said[: len(said) - len(form.tail)] + form.end
        stripped = said.rstrip()
        is_ended = any(text and stripped.endswith(text) for text in self._special.values())
        return stripped if is_ended else said

    def _tokens(self, sequence: _Sequence, renderer: _Renderer, found: Encoded) -> TrainedSequence:
        tokens: list[int] = []
        mask: list[int] = []
        needs_end = False
        for text, trained in sequence.pieces:
            ids = self._ids(text)
            bits = [int(trained)] * len(ids)
            if needs_end:
                if ids[0] in self.ends:
                    bits[0] = 1  # GLM: a turn ends with the token that begins the next one
                else:
                    found.unended = found.unended or self._unended(tokens)
            tokens += ids
            mask += bits
            needs_end = trained and not self._is_end(tokens)
        if needs_end:
            following = renderer.following(sequence.number, sequence.text)
            ids = self._ids(following) if following else []
            if ids and ids[0] in self.ends:
                tokens.append(ids[0])
                mask.append(1)
            else:
                found.unended = found.unended or self._unended(tokens)
        return TrainedSequence(tokens, mask)

    def _unended(self, tokens: list[int]) -> Unended:
        last = str(self.tokenizer.decode(tokens[-1:]))
        if not self.ends:
            return Unended(
                "the tokenizer has no end token", "set eos_token in its tokenizer_config.json", last
            )
        names = sorted(str(self.tokenizer.convert_ids_to_tokens(one)) for one in self.ends)
        return Unended(
            f"the chat template writes none of {', '.join(map(repr, names))} after the "
            "assistant's words",
            "write {{ eos_token }} there (chat_template.jinja), or give rows of prompt and label "
            "without --apply-chat-template, which end with it",
            last,
        )

    # -- templates that mark themselves what is trained --------------------------------------------

    def _marked(
        self, renderer: _Renderer, last: int, ours: TrainedSequence, found: Encoded
    ) -> TrainedSequence:
        """Read the mask that a template with ``{% generation %}`` marks, and compare it with the
        mask found by rendering.

        Args:
            last: number of the last trained message.
        """
        tokens, mask = renderer.marked(last)
        size = len(ours.tokens)
        marked = self._without_blanks_after_ends(tokens, mask)
        # the marks may leave tokens out, but not add any that the model never generates
        is_same = tokens[:size] == ours.tokens
        if is_same:
            marked = [bit & both for bit, both in zip(marked, ours.mask)]
        special = list(self._special.values())
        said = _bare(self.trained_text(TrainedSequence(tokens, mask)), special)
        if 1 not in marked or not said:
            raise UserError(
                "the chat template marks none of the assistant's words with {% generation %}",
                fix="mark the assistant's text and its end token, or use a template without "
                "these marks",
            )
        end = len(marked) - marked[::-1].index(1)
        theirs = TrainedSequence(tokens[:end], marked[:end])
        text = self.trained_text(theirs)
        found.lost_reasoning = sum(
            thought not in text for thought in renderer.thoughts() if thought
        )
        meant = _bare(self.trained_text(ours), special)
        if said != meant:
            tell(
                logger,
                "the chat template marks %.200r with {%% generation %%}, and the model would "
                "generate %.200r: %s is trained",
                said,
                meant,
                "only text that is in both" if is_same else "the marked text",
                once=f"generation marks {hash(self._source)}",
            )
        found.unended = None
        if not self._is_end(theirs.tokens):
            found.unended = self._unended(theirs.tokens)
            if tokens[end : end + 1] and tokens[end] in self.ends:
                found.unended = Unended(
                    "the chat template writes the end token after its {% generation %} block, "
                    "not in it",
                    "move {% endgeneration %} after that token",
                    found.unended.last,
                )
        return theirs

    def _without_blanks_after_ends(self, tokens: list[int], mask: list[int]) -> list[int]:
        """Remove from the mask the line break that some templates mark after the end token."""
        found = list(mask)
        ended = False
        for at, (token, bit) in enumerate(zip(tokens, mask)):
            if bit and ended and not str(self.tokenizer.decode([token])).strip():
                found[at] = 0
            else:
                ended = bool(bit) and token in self.ends
        return found

    def trained_text(self, sequence: TrainedSequence) -> str:
        """Return the trained tokens of a sequence as text."""
        return str(
            self.tokenizer.decode([one for one, bit in zip(sequence.tokens, sequence.mask) if bit])
        )


def with_answer(messages: Messages, label: Any) -> Messages:
    """Return a conversation with its label as the answer, unless it ends with one. A label may be
    text, or messages of an answer in any wire form."""
    is_answered = bool(messages) and messages[-1]["role"] == "assistant"
    if is_answered or not label:
        return messages
    if answer := conversation_in(label, "label"):
        return [*messages, *read_messages(answer[0], where="label", drops_nulls=True)]
    if not isinstance(label, str):
        return messages
    return [*messages, {"role": "assistant", "content": label}]


def _behind_another_prompt(turn: _Turn, unmatched: str, found: Encoded) -> _Turn:
    found.unmatched = found.unmatched or unmatched
    return turn


def _in_opened_reasoning(turn: _Turn, thought: ReasonedAnswer, found: Encoded) -> _Turn:
    """Add reasoning that the template leaves out to a turn whose prompt ends with the opening
    mark."""
    opened = turn.prompt.rstrip()
    marks = next((pair for pair in REASONING_MARKS if opened.endswith(pair[0])), None)
    reasoning = thought.text.strip("\n")
    if marks is None or (reasoning.strip() and reasoning.strip() in turn.said):
        return turn
    begin, end = marks
    gap = "\n" if turn.prompt.endswith("\n") else ""
    closes = turn.said.lstrip().startswith(end)
    if reasoning.strip():
        answer = turn.said.lstrip() if closes else f"{end}{gap}{gap}{turn.said}"
        return _Turn(turn.prompt, f"{reasoning}{gap}{answer}")
    if closes:
        return turn
    found.without_reasoning += 1
    return _Turn(opened.removesuffix(begin), turn.said)


def _reasoning_fix(template: str, kwargs: dict[str, Any]) -> str:
    for name in ("enable_thinking", "thinking"):
        is_read = re.search(rf"\b{name} is (not )?defined|\b(if|not) {name}\b", template)
        if is_read and name not in kwargs:
            kwarg = f'{{"{name}": true}}'
            return f"try --apply-chat-template-kwargs '{kwarg}', or use another template"
    return "write it into the content between <think> marks, or use another template"


@dataclass(eq=False)
class _Renderer:
    """Renders prefixes of one conversation."""

    tokenizer: Any
    form: TemplateForm
    messages: Messages
    tools: Any
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self._shown = [self.form.shown(message) for message in self.messages]

    def _render(self, messages: Messages, *, ask: bool = False) -> str:
        return render_shown(
            self.tokenizer, messages, tools=self.tools, add_generation_prompt=ask, **self.kwargs
        )

    def prompt(self, number: int) -> str | None:
        """Return the prompt of message ``number``; None if the template refuses it."""
        try:
            return self._render(self._shown[:number], ask=True) if number else None
        except TemplateRefuses:
            return None

    def generation_prompt(self, number: int, prompt: str) -> str:
        """Return what asking adds to the messages before message ``number``; "" if it is
        unknown."""
        try:
            told = self._render(self._shown[:number])
        except TemplateRefuses:
            return ""
        return prompt[len(told) :] if prompt.startswith(told) else ""

    def whole(self) -> str | None:
        """Render all messages; None if the template refuses them."""
        try:
            return self._render(self._shown)
        except TemplateRefuses:
            return None

    def answered(self, number: int) -> str:
        return self._render(self._shown[: number + 1])

    def head(self, number: int, answered: str) -> str:
        """Return the part of ``answered`` before the content of message ``number``."""
        variants = [
            self.form.shown({"role": "assistant", "content": text}) for text in (_ONE, _OTHER)
        ]
        try:
            one, other = (self._render([*self._shown[:number], variant]) for variant in variants)
        except TemplateRefuses as error:
            raise _undetermined(number, error.why) from error
        return _common_prefix(answered, _common_prefix(one, other))

    def text_before(self, number: int) -> str:
        """Return the text of the message before message ``number``."""
        return str(self.messages[number - 1]["content"]).strip() if number else ""

    def without_reasoning(self, number: int, thought: ReasonedAnswer) -> str:
        """Render message ``number`` without its reasoning; return the text after its header."""
        message = self.messages[number] | {"content": thought.answer}
        message.pop("reasoning_content", None)
        shown = self.form.shown(message)
        answered = self._render([*self._shown[:number], shown])
        return answered[len(self.head(number, answered)) :]

    def following(self, number: int, text: str) -> str:
        """Return the text that the template writes after ``text``, which ends with message
        ``number``, if another message follows; "" if it then rewrites ``text``."""
        calls = self._shown[number].get("tool_calls")
        after: dict[str, Any] = {"role": "user", "content": "hello"}
        if calls:
            after = {"role": "tool", "content": "hello", "name": calls[0]["function"]["name"]}
            after |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
        try:
            whole = self._render([*self._shown[: number + 1], self.form.shown(after)])
        except TemplateRefuses:
            return ""
        return whole[len(text) :] if whole.startswith(text) else ""

    def thoughts(self) -> list[str]:
        """Return the reasoning of each message."""
        return [
            reasoning_of(message).text.strip()
            for message in self.messages
            if message["role"] == "assistant"
        ]

    def marked(self, last: int) -> tuple[list[int], list[int]]:
        """Return the tokens of the conversation up to message ``last``, and the mask that the
        template marks."""
        encoded = self.tokenizer.apply_chat_template(
            self._shown[: last + 1],
            tools=self.tools or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.kwargs,
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])


#: Control tokens and tags, which are never split.
_UNITS = re.compile(r"(<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\])")


def _common_prefix(a: str, b: str) -> str:
    """Return the longest common prefix that does not end within a tag.

    Example:
        >>> _common_prefix("hi<A></think>yes", "hi<A><think>"), _common_prefix("<A>yes", "<A>yet")
        ('hi<A>', '<A>ye')
    """
    length = 0
    for one, other in zip(_UNITS.split(a), _UNITS.split(b)):
        if one == other:
            length += len(one)
            continue
        if not (_UNITS.fullmatch(one) or _UNITS.fullmatch(other)):
            length += next(
                (i for i, (x, y) in enumerate(zip(one, other)) if x != y), min(len(one), len(other))
            )
        break
    return a[:length]


def _bare(text: str, special: Iterable[str]) -> str:
    for token in special:
        text = text.replace(token, "") if token else text
    return "".join(text.split())


def _check(said: str, message: dict[str, Any], thought: ReasonedAnswer, number: int) -> None:
    """
    Raises:
        UserError: the template leaves out text or calls of the message.
    """
    answer = thought.answer.strip()
    if answer and answer not in said:
        raise _undetermined(
            number, f"the template does not write its text as it is: {answer[:80]!r}"
        )
    functions = [call["function"] for call in message.get("tool_calls", ())]
    for name, count in Counter(function["name"] for function in functions).items():
        if name not in said:
            raise _undetermined(number, f"the template does not write its call of {name!r}")
        if said.count(name) < count:
            why = f"the template does not write each of its {count} calls of {name!r}"
            raise _undetermined(number, why)
    for function in functions:
        for key, value in function["arguments"].items():
            is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9 ]+", value)
            if is_plain and value not in said:
                why = f"the template does not write the argument {key!r} of its call"
                raise _undetermined(number, why)


def _undetermined(number: int, why: str) -> UserError:
    return UserError(
        f"the chat template does not tell what the model would generate as messages[{number}]",
        why=why,
        fix='correct chat_template.jinja, mark the message with "step_loss_mask": 0, or remove '
        "the row",
    )


# -- totals over many rows -------------------------------------------------------------------------


@dataclass
class SftTotals:
    """Counts over the encoded rows.

    Attributes:
        rows: encoded rows; split: rows that became several sequences; sequences: of all rows.
    """

    rows: int = 0
    split: int = 0
    sequences: int = 0
    lost_reasoning: int = 0
    without_reasoning: int = 0
    control_tokens: int = 0
    unended: Unended | None = None
    reasoning_fix: str = ""

    def add(self, encoded: Encoded) -> None:
        """Count one row."""
        self.rows += 1
        self.split += len(encoded.sequences) > 1
        self.sequences += len(encoded.sequences)
        self.lost_reasoning += encoded.lost_reasoning
        self.without_reasoning += encoded.without_reasoning
        self.control_tokens += encoded.control_tokens > 0
        self.reasoning_fix = self.reasoning_fix or encoded.reasoning_fix
        self.unended = self.unended or encoded.unended

    def tell(self, tokenizer: Any) -> None:
        """Log the findings that users should know, once per process."""
        name = tokenizer.name_or_path
        if self.split:
            tell(
                logger,
                "%d of %d conversations are split into several samples (%d in all), because the "
                "chat template rewrites earlier turns, e.g. without their reasoning: each sample "
                "ends where the model would have been asked next. They are trained with the "
                "weight of one conversation",
                self.split,
                self.rows,
                self.sequences,
                once=f"sft split {name}",
            )
        if self.lost_reasoning:
            tell(
                logger,
                "the chat template does not write reasoning: %d answers of %d conversations are "
                "trained without theirs. To train it, %s",
                self.lost_reasoning,
                self.rows,
                self.reasoning_fix,
                once=f"sft lost reasoning {name}",
            )
        if self.without_reasoning:
            tell(
                logger,
                "the generation prompt opens reasoning (<think>), and %d answers of %d "
                "conversations have none: they are trained without the opening mark, so the "
                "prompt differs from the one that engines are given",
                self.without_reasoning,
                self.rows,
                once=f"sft without reasoning {name}",
            )
        if self.control_tokens:
            tell(
                logger,
                "%d of %d conversations hold special tokens of the tokenizer in the text of "
                "their messages: they are read as control tokens, so a message may end or begin "
                "there. Remove them if they are meant as text",
                self.control_tokens,
                self.rows,
                once=f"sft control tokens {name}",
            )
        if self.unended is not None:
            tell(
                logger,
                "the model does not learn to end its answers: %s (tokenizer of '%s'), so the last "
                "trained token is %r; %s. No end token is added",
                self.unended.what,
                name,
                self.unended.last,
                self.unended.fix,
                once=f"no end {name} {self.unended.what}",
            )
