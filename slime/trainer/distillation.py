"""The path of teachers' scores through an update:

    engine ─ TrainBatch ──────────────► teacher_columns_of ─┐
                                                            ├─► TeacherColumns ─► teacher_inputs
    trainer ─ TokenScores of a teacher ─► note_teacher_scores┘     (a rollout)     (a micro-batch)

For a divergence over the whole vocabulary, a teacher's last hidden states and output layer are
kept; the loss computes both models' logits block by block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch

from slime.algorithms.divergence import OutputRows, TopTokens
from slime.config.config import Config
from slime.errors import UserError
from slime.models.vision import VisionSpec
from slime.samples.batch import TrainBatch
from slime.samples.media import media_behind
from slime.trainer.megatron.packed import PackedMicroBatch
from slime.trainer.records import TeacherColumns, TeacherInputs, TokenScores

T = TypeVar("T")

#: Placeholder for log-probs that no loss uses.
_NO_LOG_PROB = -10.0


def with_teacher_prompts(batch: TrainBatch, vision: VisionSpec | None = None) -> TrainBatch:
    """Return the batch as teachers see it: the same responses, after the teacher's own prompts
    where samples have them (``--opd-teacher-prompt-key``).

    Args:
        vision: the model's tower; None for a model of text.
    """
    prompts = batch.payloads.get("teacher_prompts")
    if prompts is None:
        return batch
    tokens = [
        torch.cat([prompt.to(own.dtype), own[own.numel() - length :]]) if prompt.numel() else own
        for own, prompt, length in zip(batch.tokens, prompts, batch.response_lengths)
    ]
    media = batch.media
    if vision is not None:
        media = [
            media_behind(seen, own.numel() - length, prompt.tolist(), vision)
            if prompt.numel()
            else seen
            for seen, own, prompt, length in zip(
                batch.media, batch.tokens, prompts, batch.response_lengths
            )
        ]
    return dataclasses.replace(batch, tokens=tokens, media=media)


def note_teacher_scores(
    found: TeacherColumns,
    batch: TrainBatch,
    name: str,
    packed: Sequence[PackedMicroBatch],
    scores: Sequence[TokenScores],
) -> None:
    """Store a teacher's scores at the positions of its samples."""
    empty = [torch.zeros(0)] * batch.num_samples
    for micro_batch, score in zip(packed, scores):
        found.log_probs = _placed(
            found.log_probs or empty, micro_batch.samples, micro_batch.split(score.log_probs)
        )
        if score.top is not None:
            ids = micro_batch.split(score.top.ids)
            log_probs = micro_batch.split(score.top.log_probs)
            tops = [TopTokens(*one) for one in zip(ids, log_probs)]
            blank = [TopTokens(torch.zeros(0, 0), torch.zeros(0, 0))] * batch.num_samples
            found.top = _placed(found.top or blank, micro_batch.samples, tops)
        if score.rows is not None:
            on_host = micro_batch.split(score.rows.hidden.cpu())
            found.hidden = _placed(found.hidden or empty, micro_batch.samples, on_host)
            # a copy: a teacher that shares the policy's weight would change with it
            head = score.rows.weight
            if name not in found.heads:
                found.heads[name] = (head.clone(), score.rows.temperature)


def _placed(column: Sequence[T], samples: Sequence[int], values: Sequence[T]) -> list[T]:
    filled = list(column)
    for i, value in zip(samples, values):
        filled[i] = value
    return filled


def teacher_columns_of(batch: TrainBatch, config: Config, device: torch.device) -> TeacherColumns:
    """Return the scores of teachers in engines, which the samples carry.

    Raises:
        UserError: the samples carry no log-probs, or no most likely tokens.
    """
    if batch.teacher_log_probs is None:
        raise UserError(
            "the samples carry no log-probs of a teacher",
            why="--use-opd with --opd-type sglang reads teacher_log_probs of the samples; no "
            "teacher was asked, and no function of yours has set them",
            fix="pass --opd-teacher-urls, name a model in --sglang-config, or set them in the "
            "reward or generate function",
        )
    found = TeacherColumns(log_probs=[values.to(device) for values in batch.teacher_log_probs])
    if not config.distillation.in_loss:
        return found
    packed = batch.payloads.get("teacher_top")
    if packed is None:
        raise UserError(
            f"--opd-loss {config.distillation.opd_loss}: the samples carry no most likely tokens "
            "of a teacher",
            why="they did not come from the built-in rollout",
            fix="pass --opd-loss sampled, or put the teacher into the trainer",
        )
    k = max(v.numel() // (2 * r) for v, r in zip(packed, batch.response_lengths)) if packed else 0
    found.top = []
    for values, length in zip(packed, batch.response_lengths):
        # a sample without trained tokens may have no values
        given = values if values.numel() else torch.full((2, length, k), _NO_LOG_PROB)
        ids, log_probs = given.reshape(2, length, k).to(device)
        found.top.append(TopTokens(ids.long().clamp(min=0), log_probs))
    return found


def teacher_inputs(
    columns: TeacherColumns, samples: Sequence[int], lengths: Sequence[int], device: torch.device
) -> TeacherInputs:
    """Return the columns of one micro-batch.

    Args:
        samples: the micro-batch's samples, in order.
        lengths: of their responses.
    """
    if columns.top is not None:
        tops = [columns.top[i] for i in samples]
        if not tops:
            return TeacherInputs(
                TopTokens(
                    torch.zeros((0, 1), dtype=torch.long, device=device),
                    torch.zeros((0, 1), device=device),
                )
            )
        return TeacherInputs(
            TopTokens(
                torch.cat([top.ids for top in tops]), torch.cat([top.log_probs for top in tops])
            )
        )
    assert columns.hidden is not None or not samples
    found = TeacherInputs()
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for name, (weight, temperature) in columns.heads.items():
        own = [place for place, i in enumerate(samples) if columns.names[i] == name]
        if not own:
            continue
        assert columns.hidden is not None
        tokens = torch.cat([torch.arange(ends[place], ends[place + 1]) for place in own])
        hidden = torch.cat([columns.hidden[samples[place]] for place in own])
        rows = OutputRows(hidden.to(device, weight.dtype), weight, temperature)
        found.rows.append((tokens.to(device), rows))
    return found
