"""Supervised fine-tuning (``--loss-type sft_loss``): no engine, the answers are in the data. Only
the assistant's messages are trained on; `slime.prompts.sft_encoding` finds them.

A conversation whose earlier turns the chat template rewrites becomes several samples of one
trajectory, which together have the weight of one sample and count as one in the batch.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.prompts.conversation import tools_of
from slime.prompts.images import add_images, images_of
from slime.prompts.sft_encoding import SftEncoding, SftTotals
from slime.prompts.source import PromptSource
from slime.prompts.tokenizer import end_token_ids
from slime.rollout.finish import finish_rollout
from slime.rollout.generate import context_limit
from slime.samples.media import references_of
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput

logger = get_logger(__name__)

#: Maximum of consecutive rows that are left out; if all are too long, drawing would never end.
_MAX_LEFT_OUT = 10_000


async def data_rollout(
    generate: Callable[[Config, DataSource, Any], RolloutFnTrainOutput],
    config: Config,
    source: DataSource,
    tokenizer: Any,
    rollout_id: int,
) -> RolloutFnTrainOutput:
    """Run `generate_sft` or `generate_preferences` as a step of the run, with
    --save-debug-rollout-data and the user's log function.

    Raises:
        UserError: as ``generate``.
    """
    started = time.monotonic()
    output = await asyncio.to_thread(generate, config, source, tokenizer)
    return await finish_rollout(
        config, config.shared_args, rollout_id, output, time.monotonic() - started
    )


def generate_sft(config: Config, source: DataSource, tokenizer: Any) -> RolloutFnTrainOutput:
    """Return ``rollout_batch_size`` groups of one trajectory each, encoded for training.

    A row is a conversation with assistant messages, or a prompt and its label (the answer). Samples
    longer than ``--seq-length`` or ``--rollout-max-context-len``, and samples with more than
    ``--rollout-max-prompt-len`` tokens before the first trained one, are counted and replaced by
    others.

    Raises:
        UserError: a row has nothing to train on, all rows are too long, or the data have ended.
    """
    encoder = SftEncoder(config, tokenizer)
    groups, left_out = draw_groups(config, source, encoder, tokenizer)
    tokens = sum(one.effective_response_length for group in groups for one in group.samples)
    counts = {
        "rollout/sft_trained_tokens": float(tokens),
        "rollout/sft_too_long": float(len(left_out)),
        "rollout/sft_split_conversations": float(encoder.totals.split),
        "rollout/sft_lost_reasoning": float(encoder.totals.lost_reasoning),
    }
    return RolloutFnTrainOutput(groups, counts)


class Encoder(Protocol):
    """Encodes the rows that a rollout draws."""

    keeps_whole: bool
    """The samples of a row are trained together: if one is too long, all are left out."""

    @property
    def totals(self) -> SftTotals: ...

    def read_ahead(self, samples: list[Sample]) -> None: ...

    def encode(self, sample: Sample) -> list[Sample]:
        """Return the samples of a row; [] if it cannot be used."""
        ...


def draw_groups(
    config: Config, source: DataSource, encoder: Encoder, tokenizer: Any
) -> tuple[list[Group], list[Sample]]:
    """Draw and encode rows until there are ``rollout_batch_size`` groups. Findings about the rows,
    and rows that are too long, are logged once.

    Returns:
        Groups of one trajectory each, and the samples that were left out as too long.
    Raises:
        UserError: as `generate_sft`.
    """
    assert config.rollout.n_samples_per_prompt == 1, "checked when flags are resolved"
    limit, prompt_limit = sft_limits(config)
    groups: list[Group] = []
    left_out: list[Sample] = []
    num_left_out_before = 0  # length of left_out before the current run of skipped rows
    num_skipped = 0
    # two epochs of rows contain a whole epoch, wherever they begin
    epoch = source.rows_per_epoch if isinstance(source, PromptSource) else None
    max_skipped = _MAX_LEFT_OUT if epoch is None else min(_MAX_LEFT_OUT, 2 * epoch)
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
            index = sample.group_index if sample.group_index is not None else len(groups)
            samples = _encode(encoder, sample, source, index)
            is_fitting = [
                (limit is None or len(one.tokens) <= limit)
                and (prompt_limit is None or one.prompt_length <= prompt_limit)
                for one in samples
            ]
            if encoder.keeps_whole and not all(is_fitting):
                is_fitting = [False] * len(samples)
            fitting = list(itertools.compress(samples, is_fitting))
            left_out += [one for one, fits in zip(samples, is_fitting) if not fits]
            if fitting:
                groups.append(Group(index, [fitting]))
                num_left_out_before = len(left_out)
                num_skipped = 0
                continue
            source.mark_discarded([index])
            num_skipped += 1
            if num_skipped >= max_skipped:
                too_long = left_out[num_left_out_before:]
                if not too_long:
                    raise UserError(f"none of {num_skipped} consecutive rows can be trained on")
                raise _all_too_long(too_long, limit, prompt_limit)
    encoder.totals.tell(tokenizer)
    if left_out:
        num_kept = sum(len(group.samples) for group in groups)
        _tell_too_long(config, left_out, len(left_out) + num_kept)
    return groups, left_out


def _encode(encoder: Encoder, sample: Sample, source: DataSource, index: int) -> list[Sample]:
    """Encode a row; [] if it cannot be encoded and the source passes over such rows.

    Raises:
        UserError: the row cannot be encoded; names its place.
    """
    try:
        return encoder.encode(sample)
    except UserError as error:
        place = source.where(index) if isinstance(source, PromptSource) else ""
        failure = UserError(
            f"{place or f'row of draw {index}'}: {error.what}", error.why, error.fix
        )
        if not (isinstance(source, PromptSource) and source.passes_over):
            raise failure from error
        tell(logger, "%s; such rows are left out", failure, once=f"sft {error.what}")
        return []


def _tell_too_long(config: Config, left_out: list[Sample], num_drawn: int) -> None:
    tell(
        logger,
        "%d of %d samples drawn for a batch are too long and left out (the longest: %d tokens, %d "
        "before the first trained one): --seq-length %s, --rollout-max-context-len %s, "
        "--rollout-max-prompt-len %s. A metric counts them from here on",
        len(left_out),
        num_drawn,
        max(len(sample.tokens) for sample in left_out),
        max(sample.prompt_length for sample in left_out),
        config.train.seq_length,
        config.rollout.rollout_max_context_len,
        config.data.rollout_max_prompt_len,
        once="sft too long",
    )


def sft_limits(config: Config) -> tuple[int | None, int | None]:
    """Return the maximum tokens of a sample, and of its part before the first trained token."""
    limit = context_limit(config.train.seq_length, config.rollout.rollout_max_context_len)
    return limit, config.data.rollout_max_prompt_len


def compared_rule(config: Config) -> str | None:
    """Return the reference system's rule for loss masks that our masks are compared with
    (``--loss-mask-type``)."""
    return config.rollout.loss_mask_type


def _all_too_long(samples: list[Sample], limit: int | None, prompt_limit: int | None) -> UserError:
    said = []
    if limit is not None and (shortest := min(len(sample.tokens) for sample in samples)) > limit:
        said.append(f"longer than {limit} tokens (shortest: {shortest})")
    shortest = min(sample.prompt_length for sample in samples)
    if prompt_limit is not None and shortest > prompt_limit:
        said.append(
            f"with a prompt of more than --rollout-max-prompt-len {prompt_limit} tokens (shortest: "
            f"{shortest})"
        )
    limits = f"longer than {limit} tokens, or with a prompt of more than {prompt_limit}"
    return UserError(
        f"{len(samples)} consecutive samples are {' and '.join(said) or limits}",
        fix="raise --seq-length, --rollout-max-context-len or --rollout-max-prompt-len, or use "
        "other data",
    )


class SftEncoder:
    """Fills in tokens, response and loss mask of samples that the prompt source has drawn.

    Attributes:
        totals: counts over the encoded rows.
    """

    keeps_whole = False

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._templates_text = config.data.apply_chat_template
        self._encoding = sft_encoding(config, tokenizer)
        self._images = images_of(config)
        self.totals = SftTotals()

    def read_ahead(self, samples: list[Sample]) -> None:
        """Tokenise the plain texts of samples that will be encoded next, in one call."""
        if not self._templates_text:
            read_ahead(self._encoding, ((one.prompt, one.label) for one in samples))

    def encode(self, sample: Sample) -> list[Sample]:
        """Return the samples of a drawn one: itself, filled in, and copies of it if the chat
        template rewrites earlier turns of its conversation.

        Raises:
            UserError: nothing in the row can be trained on.
        """
        tools = tools_of(sample.metadata)
        encoded = self._encoding.encode(
            sample.prompt, sample.label, tokens=sample.tokens, tools=tools
        )
        self.totals.add(encoded)
        samples = [sample]
        references = references_of(sample)
        for _ in encoded.sequences[1:]:
            sibling = copy.copy(sample)
            sibling.metadata = copy.deepcopy(sample.metadata)
            samples.append(sibling)
        for one, sequence in zip(samples, encoded.sequences, strict=True):
            tokens = sequence.tokens
            mask = sequence.mask
            if self._images is not None:
                what = f"sample {sample.index}"
                tokens, mask, spans = self._images.expand_masked(
                    tokens, mask, self._images.within(tokens, references), what
                )
                one.multimodal_inputs = None
                add_images(one, references[: len(spans)], spans)
            start = mask.index(1)
            one.tokens = tokens
            one.loss_mask = mask[start:]
            one.response_length = len(one.loss_mask)
            one.response = self._tokenizer.decode(one.tokens[start:])
            one.status = SampleStatus.COMPLETED
            one.reward = 0.0
        return samples


def read_ahead(encoding: SftEncoding, rows: Iterable[tuple[Any, Any]]) -> None:
    """Tokenise, in one call, the rows (prompt, label) that are plain text and will be encoded
    next."""
    plain = (row for row in rows if all(isinstance(text, str) for text in row))
    encoding.read_ahead(text for row in plain for text in row)


def sft_encoding(config: Config, tokenizer: Any) -> SftEncoding:
    """Return the encoding of rows that the flags describe."""
    path = config.checkpoint.hf_checkpoint
    images = images_of(config)
    return SftEncoding(
        tokenizer,
        end_token_ids(tokenizer, path) if path else (),
        template_kwargs=dict(config.data.apply_chat_template_kwargs),
        apply_chat_template=config.data.apply_chat_template,
        placeholder="" if images is None else images.placeholder(tokenizer),
    )
