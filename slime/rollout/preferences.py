"""Learning from preferences (``--loss-type preference_loss``): no engine, the answers are in the
data. A prompt and its answer are encoded as in supervised fine-tuning; only the answer is trained
on.

    row ─► pair: chosen, rejected              one trajectory of two samples, rewards 1 and -1
    row ─► answer and label (KTO)              one sample of reward 1 or -1, and one of reward 0:
                                               the same prompt with the next row's answer

The rewards are the labels: training reads from them which sample is which.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.models.vision import ImageSpan
from slime.prompts.conversation import Messages, tools_of
from slime.prompts.dataset_folders import EVALUATION
from slime.prompts.images import Source, add_images, images_of
from slime.prompts.preference_rows import conversation_of, images_of_answers
from slime.prompts.prepare import read_samples
from slime.prompts.sft_encoding import Encoded, SftTotals, TrainedSequence
from slime.prompts.source import prompt_checker
from slime.rollout.sft import draw_groups, sft_encoding, sft_limits
from slime.samples.batch import CHOSEN, MISMATCHED, REJECTED
from slime.samples.media import media_before, media_of, references_of
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput


def generate_preferences(
    config: Config, source: DataSource, tokenizer: Any
) -> RolloutFnTrainOutput:
    """Return ``rollout_batch_size`` groups of one trajectory each. Pairs of equal answers, and
    pairs with an answer that is too long, are left out and counted.

    Raises:
        UserError: a row cannot be encoded, all rows are left out, or there are no more data.
    """
    encoder = PreferenceEncoder(config, tokenizer)
    groups, left_out = draw_groups(config, source, encoder, tokenizer)
    tokens = sum(one.effective_response_length for group in groups for one in group.samples)
    counts = {
        "rollout/preference_trained_tokens": float(tokens),
        "rollout/preference_too_long": float(len(left_out)),
        "rollout/preference_equal_answers": float(encoder.equal_answers),
    }
    if not encoder.takes_pairs:
        _add_mismatched(groups, sft_limits(config)[0])
        desirable = sum(group.trajectories[0][0].reward == CHOSEN for group in groups)
        counts["rollout/preference_desirable"] = desirable / len(groups)
    return RolloutFnTrainOutput(groups, counts)


def held_out_groups(config: Config, tokenizer: Any) -> list[Group]:
    """Return the rows of ``--eval-preference-data``, except those that training would leave out.

    Raises:
        UserError: a row cannot be encoded, or none can be used.
    """
    path = config.preference.eval_preference_data
    assert path is not None
    encoder = PreferenceEncoder(config, tokenizer)
    limit = sft_limits(config)[0]
    groups = []
    drawn = read_samples(path, prompt_checker(config, tokenizer, path), EVALUATION)
    encoder.read_ahead(drawn)
    for number, sample in enumerate(drawn):
        sample.index = number
        samples = encoder.encode(sample)
        if samples and all(limit is None or len(one.tokens) <= limit for one in samples):
            groups.append(Group(number, [samples]))
    if len(groups) < (1 if encoder.takes_pairs else 2):
        raise UserError(
            f"--eval-preference-data {path} has too few rows that can be scored",
            why=f"{len(groups)} of {len(drawn)} are neither too long nor pairs of equal answers",
            fix="use other data, or raise --seq-length",
        )
    if not encoder.takes_pairs:
        _add_mismatched(groups, limit)
    return groups


@dataclass(frozen=True)
class EncodedAnswer:
    """An answer behind its prompt.

    Attributes:
        encoded: with one placeholder for each image.
        sequence: with all of them.
        images, spans: images of prompt and answer, and their places among the tokens.
    """

    encoded: Encoded
    sequence: TrainedSequence
    images: Sequence[Source] = ()
    spans: Sequence[ImageSpan] = ()

    def equals(self, other: EncodedAnswer) -> bool:
        """Tell whether tokens and images are the same."""
        return self.sequence.tokens == other.sequence.tokens and self.images == other.images


class PreferenceEncoder:
    """Encodes the answers of a row as samples.

    Attributes:
        totals: counts over the encoded rows.
        equal_answers: pairs whose answers have the same tokens.
        takes_pairs: rows are pairs; else single answers with a label.
    """

    keeps_whole = True

    def __init__(self, config: Config, tokenizer: Any) -> None:
        facts = config.algorithm.preference
        assert facts is not None, "only a preference loss learns from preferences"
        self._tokenizer = tokenizer
        self._encoding = sft_encoding(config, tokenizer)
        self._images = images_of(config)
        self._templates_text = config.data.apply_chat_template
        self._scores_end = facts.trains_head
        self.takes_pairs = facts.takes_pairs
        self.totals = SftTotals()
        self.equal_answers = 0

    def read_ahead(self, samples: list[Sample]) -> None:
        """Tokenise the plain texts of samples that will be encoded next, in one call."""
        self.read_ahead_rows([(one.prompt, one.label) for one in samples])

    def read_ahead_rows(self, rows: Sequence[tuple[str | Messages, dict[str, Any]]]) -> None:
        """Tokenise, in one call, the plain texts of prompts and answers that will be encoded
        next."""
        if not self._templates_text:
            texts = (text for prompt, label in rows for text in (prompt, *label.values()))
            self._encoding.read_ahead(text for text in texts if isinstance(text, str))

    def encode(self, sample: Sample) -> list[Sample]:
        """Return the two samples of a pair, or [] if its answers are equal; the one sample of a
        labelled answer.

        Raises:
            UserError: nothing in an answer can be trained on.
        """
        references = references_of(sample)
        answers = list(
            self.encode_answers(sample.prompt, sample.label, sample.metadata, references)
        )
        for answer in answers:
            self.totals.add(answer.encoded)
        index = 2 * (sample.index or 0)
        if not self.takes_pairs:
            reward = CHOSEN if sample.label["label"] else REJECTED
            return [self._filled(sample, answers[0], index, reward)]
        chosen, rejected = answers
        if chosen.equals(rejected):
            self.equal_answers += 1
            return []
        return [
            self._filled(copy.copy(sample), chosen, index, CHOSEN),
            self._filled(copy.copy(sample), rejected, index + 1, REJECTED),
        ]

    def encode_answers(
        self,
        prompt: str | Messages,
        label: dict[str, Any],
        metadata: dict[str, Any],
        images: Sequence[Source] = (),
    ) -> Iterator[EncodedAnswer]:
        """Encode the answers of a row, in the order of `slime.prompts.preference_rows`.

        Args:
            images: of the row, as in `slime.prompts.row_format.Prompt`.
        Raises:
            UserError: nothing in an answer can be trained on, or its earlier turns are rewritten.
        """
        tools = tools_of(metadata)
        names = ("chosen", "rejected") if self.takes_pairs else ("completion",)
        answers = {name: label[name] for name in names}
        for name, answer in answers.items():
            if isinstance(prompt, list):
                encoded = self._encoding.encode(conversation_of(prompt, answer), tools=tools)
            else:
                encoded = self._encoding.encode(prompt, answer, tools=tools)
            if len(encoded.sequences) > 1:
                raise UserError(
                    f"the {name} answer becomes {len(encoded.sequences)} sequences",
                    why="the chat template rewrites its earlier turns, and an answer is compared "
                    "as a whole",
                    fix="let the prompt hold all turns but the last one",
                )
            [sequence] = encoded.sequences
            if self._images is None:
                yield EncodedAnswer(encoded, sequence)
                continue
            place = self._images.placeholder(self._tokenizer)
            own = images_of_answers(prompt, answers, images, place)[name]
            seen = self._images.within(sequence.tokens, own)
            what = f"the {name} answer"
            tokens, mask, spans = self._images.expand_masked(
                sequence.tokens, sequence.mask, seen, what
            )
            yield EncodedAnswer(encoded, TrainedSequence(tokens, mask), seen, spans)

    def _filled(self, sample: Sample, answer: EncodedAnswer, index: int, reward: float) -> Sample:
        sequence = answer.sequence
        start = sequence.prompt_length
        sample.tokens = list(sequence.tokens)
        sample.loss_mask = sequence.mask[start:]
        sample.response = self._tokenizer.decode(sample.tokens[start:])
        if self._scores_end:
            # values are computed before each response token: an extra one gives the value after the
            # last
            sample.tokens.append(sample.tokens[-1])
            sample.loss_mask = [0] * len(sample.loss_mask) + [1]
        sample.response_length = len(sample.loss_mask)
        sample.index = index
        if self._images is not None:
            sample.multimodal_inputs = None
        add_images(sample, [str(one) for one in answer.images], answer.spans)
        sample.metadata = copy.deepcopy(sample.metadata)
        sample.status = SampleStatus.COMPLETED
        sample.reward = reward
        return sample


def _add_mismatched(groups: list[Group], limit: int | None) -> None:
    """Give each trajectory a second sample: its prompt with the next group's answer, cut to the
    limit."""
    answers = [group.trajectories[0][0] for group in groups]
    for group, answer in zip(groups, [*answers[1:], answers[0]], strict=True):
        own = group.trajectories[0][0]
        assert answer.loss_mask is not None and own.index is not None
        start = own.prompt_length
        room = answer.response_length if limit is None else max(1, limit - start)
        media = media_of(answer.multimodal_inputs, answer.multimodal_train_inputs)
        moved = [
            (one.reference, one.span._replace(start=one.span.start - answer.prompt_length + start))
            for one in media
            if one.span.start >= answer.prompt_length
        ]
        for _, span in moved:
            if span.end >= start + room:  # the limit ends the answer before this image
                room = min(room, max(1, span.start - 1 - start))
        other = copy.copy(own)
        other.tokens = own.tokens[:start] + answer.tokens[answer.prompt_length :][:room]
        other.multimodal_inputs, other.multimodal_train_inputs = media_before(
            own.multimodal_inputs, own.multimodal_train_inputs, start
        )
        kept = [(reference, span) for reference, span in moved if span.end < start + room]
        add_images(other, [reference for reference, _ in kept], [span for _, span in kept])
        other.loss_mask = answer.loss_mask[:room]
        other.response_length = len(other.loss_mask)
        other.response = answer.response
        other.index = own.index + 1
        other.metadata = copy.deepcopy(own.metadata)
        other.reward = MISMATCHED
        group.trajectories[0].append(other)
