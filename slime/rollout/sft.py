"""The rollout of supervised fine-tuning (``--loss-type sft_loss``): no engine, the answers are in the data."""

from __future__ import annotations

from typing import Any

from slime.config import Config
from slime.errors import UserError
from slime.hooks import DataSource, RolloutFnTrainOutput
from slime.log import get_logger
from slime.prompts.chat_template import Messages, end_of_turn_tokens, render_messages
from slime.samples.sft import encode_chat, trim
from slime.samples.types import Group, Sample, SampleStatus

logger = get_logger(__name__)


def generate_sft(config: Config, source: DataSource, tokenizer: Any) -> RolloutFnTrainOutput:
    """``rollout_batch_size`` groups of one ready-made sample each.

    A row is a conversation with assistant messages, or a prompt and its label (the answer). Samples longer than
    ``--seq-length`` or ``--rollout-max-context-len`` are left out, and others drawn.

    Raises:
        UserError: a row that gives nothing to train on, only rows that are too long, or no more data.
    """
    assert config.rollout.n_samples_per_prompt == 1, "checked when flags are resolved"
    encoder = SftEncoder(config, tokenizer)
    limits = [n for n in (config.train.seq_length, config.rollout.rollout_max_context_len) if n is not None]
    limit = min(limits, default=None)
    groups: list[Group] = []
    too_long: list[int] = []
    wanted = config.rollout.rollout_batch_size
    while len(groups) < wanted:
        drawn = source.get_samples(wanted - len(groups))
        if not drawn:
            raise UserError(
                f"the data source gave no more samples after {len(groups)} of {wanted}",
                fix="give more data, or lower --rollout-batch-size",
            )
        for (sample,) in drawn:
            encoder.encode(sample)
            index = sample.group_index if sample.group_index is not None else len(groups)
            if limit is None or len(sample.tokens) <= limit:
                groups.append(Group(index, [[sample]]))
                too_long = []
                continue
            source.mark_discarded([index])
            too_long.append(len(sample.tokens))
            if len(too_long) >= 10_000:
                raise UserError(
                    f"{len(too_long)} samples in a row are longer than {limit} tokens (shortest: {min(too_long)})",
                    fix="raise --seq-length or --rollout-max-context-len, or take other data",
                )
    tokens = sum(sample.effective_response_length for group in groups for sample in group.samples)
    return RolloutFnTrainOutput(groups, {"rollout/sft_trained_tokens": float(tokens)})


class SftEncoder:
    """Fills in tokens, response and loss mask of samples as the prompt source draws them."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._tokenizer, self._data = tokenizer, config.data
        self._end_of_turn = list(end_of_turn_tokens(tokenizer).values()) or [tokenizer.eos_token or ""]

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
        sample.response_length = len(sample.loss_mask)
        sample.response = self._tokenizer.decode(sample.tokens[-sample.response_length :])
        sample.status, sample.reward = SampleStatus.COMPLETED, 0.0

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
        return self._plain(self._tokenizer.encode(prompt, add_special_tokens=False), label)

    def _plain(self, prompt: list[int], label: str) -> tuple[list[int], list[int]]:
        answer = self._tokenizer.encode(label, add_special_tokens=False)
        if self._tokenizer.eos_token_id is not None:
            answer = [*answer, self._tokenizer.eos_token_id]
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    def _chat(self, messages: Messages, sample: Sample) -> tuple[list[int], list[int]]:
        tools = sample.metadata.get("tools")
        kwargs = self._data.apply_chat_template_kwargs

        def render(part: Messages, ask: bool) -> str:
            return render_messages(self._tokenizer, part, tools=tools, add_generation_prompt=ask, **kwargs)

        return encode_chat(messages, self._tokenizer, render, self._end_of_turn, tools=tools, template_kwargs=kwargs)
