"""Supervised fine-tuning (``--loss-type sft_loss``): no engine, the answers are in the data. Only what an assistant
says is trained.

A conversation is cut into segments at the borders of the assistant's turns, and each segment is tokenised by itself. So
the tokens of a turn are those that the model would generate after the prompt, never merged across the border.

The template alone says how a turn ends: where it writes no end token none is trained, and that is warned of. Added
here, it would stand in turns of the past that the same template renders without it for the trained model.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.hooks import DataSource, RolloutFnTrainOutput
from slime.log import get_logger, tell
from slime.prompts.chat_template import Messages, end_of_turn_tokens, render_messages
from slime.prompts.tokenizer import end_token_ids, with_opening
from slime.rollout.finish import finish_rollout
from slime.samples.types import Group, Sample, SampleStatus

logger = get_logger(__name__)

#: (messages, add_generation_prompt) → text.
Render = Callable[[Messages, bool], str]
#: So many samples in a row may be left out; where all are too long, drawing would never end.
_MOST_LEFT_OUT = 10_000


async def sft_rollout(config: Config, source: DataSource, tokenizer: Any, rollout_id: int) -> RolloutFnTrainOutput:
    """`generate_sft` as a step of the run: with --save-debug-rollout-data and the user's log function.

    Raises:
        UserError: as `generate_sft`.
    """
    started = time.monotonic()
    output = await asyncio.to_thread(generate_sft, config, source, tokenizer)
    return await finish_rollout(config, config.flat(), rollout_id, output, time.monotonic() - started)


def generate_sft(config: Config, source: DataSource, tokenizer: Any) -> RolloutFnTrainOutput:
    """``rollout_batch_size`` groups of one ready-made sample each.

    A row is a conversation with assistant messages, or a prompt and its label (the answer). Left out and counted, and
    others drawn: samples longer than ``--seq-length`` or ``--rollout-max-context-len``, and those with more than
    ``--rollout-max-prompt-len`` tokens before the first trained one.

    Raises:
        UserError: a row that gives nothing to train on, only rows that are too long, or no more data.
    """
    assert config.rollout.n_samples_per_prompt == 1, "checked when flags are resolved"
    encoder = SftEncoder(config, tokenizer)
    limits = [n for n in (config.train.seq_length, config.rollout.rollout_max_context_len) if n is not None]
    limit, prompt_limit = min(limits, default=None), config.data.rollout_max_prompt_len
    groups: list[Group] = []
    left_out: list[Sample] = []
    left_out_in_a_row = 0
    wanted = config.rollout.rollout_batch_size
    while len(groups) < wanted:
        drawn = source.get_samples(wanted - len(groups))
        if not drawn:
            raise UserError(
                f"the data source gave no more samples after {len(groups)} of {wanted}",
                fix="give more data, or lower --rollout-batch-size",
            )
        encoder.read_ahead([sample for (sample,) in drawn])
        for (sample,) in drawn:
            encoder.encode(sample)
            index = sample.group_index if sample.group_index is not None else len(groups)
            if _fits(len(sample.tokens), limit) and _fits(sample.prompt_length, prompt_limit):
                groups.append(Group(index, [[sample]]))
                left_out_in_a_row = 0
                continue
            source.mark_discarded([index])
            left_out.append(sample)
            left_out_in_a_row += 1
            if left_out_in_a_row >= _MOST_LEFT_OUT:
                raise _all_too_long(left_out[-left_out_in_a_row:], limit, prompt_limit)
    if left_out:
        tell(
            logger,
            "%d of %d samples drawn for a batch are too long and left out (the longest: %d tokens, %d before the first "
            "trained one): --seq-length %s, --rollout-max-context-len %s, --rollout-max-prompt-len %s. "
            "rollout/sft_too_long counts them from here on",
            len(left_out), len(left_out) + len(groups), max(len(sample.tokens) for sample in left_out),
            max(sample.prompt_length for sample in left_out),
            config.train.seq_length, config.rollout.rollout_max_context_len, prompt_limit,
            once="sft too long",
        )  # fmt: skip
    tokens = sum(sample.effective_response_length for group in groups for sample in group.samples)
    counts = {"rollout/sft_trained_tokens": float(tokens), "rollout/sft_too_long": float(len(left_out))}
    return RolloutFnTrainOutput(groups, counts)


def _fits(length: int, limit: int | None) -> bool:
    return limit is None or length <= limit


def _all_too_long(samples: list[Sample], limit: int | None, prompt_limit: int | None) -> UserError:
    said = []
    if limit is not None and (shortest := min(len(sample.tokens) for sample in samples)) > limit:
        said.append(f"longer than {limit} tokens (shortest: {shortest})")
    if prompt_limit is not None and (shortest := min(sample.prompt_length for sample in samples)) > prompt_limit:
        said.append(f"of a prompt of more than --rollout-max-prompt-len {prompt_limit} tokens (shortest: {shortest})")
    limits = f"longer than {limit} tokens, or of a prompt of more than {prompt_limit}"
    return UserError(
        f"{len(samples)} samples in a row are {' and '.join(said) or limits}",
        fix="raise --seq-length, --rollout-max-context-len or --rollout-max-prompt-len, or take other data",
    )


class SftEncoder:
    """Fills in tokens, response and loss mask of samples as the prompt source draws them."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._tokenizer, self._data = tokenizer, config.data
        ends_of_turns, path = end_of_turn_tokens(tokenizer), config.checkpoint.hf_checkpoint
        self._end_of_turn = list(ends_of_turns.values()) or [tokenizer.eos_token or ""]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._ends = frozenset([*ends_of_turns, *eos]) | (end_token_ids(tokenizer, path) if path else frozenset())
        """Tokens of which the model is to learn that an answer ends with one."""
        self._known: dict[str, list[int]] = {}

    def read_ahead(self, samples: list[Sample]) -> None:
        """Tokenise the plain texts of samples that will be encoded next, in one call: one at a time, what surrounds the
        tokeniser takes several times as long as itself."""
        plain = [s for s in samples if isinstance(s.prompt, str) and isinstance(s.label, str) and s.label]
        if not plain or self._data.apply_chat_template:
            return
        texts = list({text for sample in plain for text in (str(sample.prompt), str(sample.label))})
        self._known = dict(zip(texts, self._tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))

    def _ids(self, text: str) -> list[int]:
        known = self._known.get(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if known is None else known

    def encode(self, sample: Sample) -> None:
        """
        Raises:
            UserError: nothing in the row can be trained on.
        """
        try:
            tokens, mask = self._tokens_and_mask(sample)
            sample.tokens, sample.loss_mask = trim(tokens, mask)
        except UserError as error:
            raise UserError(f"row of draw {sample.group_index}: {error.what}", error.why, error.fix) from error
        if sample.tokens[-1] not in self._ends:
            self._tell_of_no_end(sample.tokens, tokens)
        sample.response_length = len(sample.loss_mask)
        sample.response = self._tokenizer.decode(sample.tokens[-sample.response_length :])
        sample.status, sample.reward = SampleStatus.COMPLETED, 0.0

    def _tell_of_no_end(self, trained: list[int], whole: list[int]) -> None:
        """
        Args:
            trained: tokens up to the last trained one; whole: with what the template writes behind it.
        """
        tokenizer = self._tokenizer
        ends = ", ".join(repr(str(tokenizer.convert_ids_to_tokens(one))) for one in sorted(self._ends))
        if not self._ends:
            what, fix = "the tokenizer has no end token", "set eos_token in its tokenizer_config.json"
        elif whole[len(trained) : len(trained) + 1] and whole[len(trained)] in self._ends:
            what = "the chat template writes the end token behind its {% generation %} block, not in it"
            fix = "move {% endgeneration %} behind that token"
        else:
            what = f"the chat template writes none of {ends} after the assistant's words"
            fix = (
                "write {{ eos_token }} there (chat_template.jinja), or give rows of prompt and label without"
                " --apply-chat-template, which end with it"
            )
        tell(
            logger,
            "the model does not learn to end its answers: %s (tokenizer of '%s'), so the last token that is trained is "
            "%r; %s. No token is added unasked",
            what, tokenizer.name_or_path, tokenizer.decode(trained[-1:]), fix,
            once=f"no end {tokenizer.name_or_path} {what}",
        )  # fmt: skip

    def _tokens_and_mask(self, sample: Sample) -> tuple[list[int], list[int]]:
        prompt, label = sample.prompt, sample.label
        has_answer = isinstance(prompt, list) and any(m.get("role") == "assistant" for m in prompt)
        if has_answer:
            assert isinstance(prompt, list)
            return self._chat(prompt, sample)
        if not isinstance(label, str) or not label:
            raise UserError(
                "there is no answer to train on",
                why="the prompt holds no assistant message, and the label is "
                + (f"a {type(label).__name__}" if label is not None else "not set"),
                fix="pass --label-key, or rows of chat messages that end with the assistant's",
            )
        if sample.tokens:  # tokenised beforehand
            return self._plain(sample.tokens, label)
        if isinstance(prompt, list) or self._data.apply_chat_template:
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            return self._chat([*messages, {"role": "assistant", "content": label}], sample)
        return self._plain(with_opening(self._tokenizer, prompt, self._ids(prompt), templated=False), label)

    def _plain(self, prompt: list[int], label: str) -> tuple[list[int], list[int]]:
        answer = self._ids(label)
        if self._tokenizer.eos_token_id is not None:
            answer = [*answer, self._tokenizer.eos_token_id]
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    def _chat(self, messages: Messages, sample: Sample) -> tuple[list[int], list[int]]:
        tools = sample.metadata.get("tools")
        kwargs = self._data.apply_chat_template_kwargs

        def render(part: Messages, ask: bool) -> str:
            return render_messages(self._tokenizer, part, tools=tools, add_generation_prompt=ask, **kwargs)

        return encode_chat(messages, self._tokenizer, render, self._end_of_turn, tools=tools, template_kwargs=kwargs)


# -- segments of a conversation --------------------------------------------------------------------------------------


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
    """(tokens, mask) of a conversation. A template with ``{% generation %}`` marks says itself what is trained.

    Raises:
        UserError: such a template, and a message that says otherwise; see also `chat_segments`.
    """
    if not _GENERATION_TAG.search(tokenizer.chat_template or ""):
        return encode_segments(chat_segments(messages, render, end_of_turn), tokenizer)
    if not all(message.get("step_loss_mask", 1) for message in messages):
        raise UserError(
            "a message has a step_loss_mask of 0, which this chat template does not know",
            why="it marks what is trained with {% generation %}, all of the assistant's messages",
            fix="take a template without these marks, or leave such messages to the prompt",
        )
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
