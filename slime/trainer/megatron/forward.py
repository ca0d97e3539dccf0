"""Forward and backward passes of packed micro-batches with Megatron's pipeline schedules, at any
layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron.packed import PackedMicroBatch, PackingOptions, pack
from slime.trainer.records import MicroBatchResult

LossFunction = Callable[[Any, PackedMicroBatch], tuple[Tensor, dict[str, Tensor]]]


def packed_micro_batches(
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    options: PackingOptions,
    *,
    same_length: bool = False,
) -> list[PackedMicroBatch]:
    """Pack each list of sample indices; an empty list becomes a sequence of padding.

    Args:
        same_length: pad all to the longest one.
    """
    packed = [
        pack(
            samples,
            batch.tokens,
            batch.response_lengths,
            options,
            batch.payloads,
            batch.media,
            batch.images,
        )
        for samples in micro_batches
    ]
    longest = max(micro_batch.num_tokens for micro_batch in packed)
    if same_length and any(micro_batch.num_tokens < longest for micro_batch in packed):
        return packed_micro_batches(
            batch, micro_batches, dataclasses.replace(options, at_least=longest)
        )
    return packed


@torch.no_grad()
def score(
    chunks: Sequence[nn.Module], micro_batches: Sequence[PackedMicroBatch], **options: Any
) -> list[Any]:
    """Run a forward pass. Return the model's output per micro-batch on the last pipeline stage, []
    on others: `TokenScores` of a policy, `TokenValues` of a critic.

    Args:
        options: arguments of the model's ``forward``.
    """

    def forward_step(
        batches: Iterator[PackedMicroBatch], model: nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        output = model(next(batches), **options)
        return output, lambda scores, non_loss_data: scores

    return _run(chunks, micro_batches, forward_step, forward_only=True)


def forward_backward(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[PackedMicroBatch],
    loss_of: LossFunction,
    *,
    gradient_scale: float,
    **options: Any,
) -> list[MicroBatchResult]:
    """Compute the gradients of the summed losses, reduced over the data-parallel ranks.

    Args:
        loss_of: (model output, micro-batch) → (its summand of the step's loss, its part of the
            metrics).
        gradient_scale: undoes Megatron's averaging over micro-batches and data-parallel ranks,
            because each summand is weighted already.
        options: arguments of the model's ``forward``.
    Returns:
        One result per micro-batch on the last pipeline stage, [] on others.
    """

    def loss_step(packed: PackedMicroBatch, scores: Any) -> tuple[Tensor, MicroBatchResult]:
        loss, metrics = loss_of(scores, packed)
        result = MicroBatchResult(packed.samples, metrics, scores.per_token.detach())
        return loss * gradient_scale, result

    def forward_step(
        batches: Iterator[PackedMicroBatch], model: nn.Module
    ) -> tuple[Any, Callable[..., Any]]:
        packed = next(batches)
        return model(packed, **options), partial(loss_step, packed)

    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    return _run(chunks, micro_batches, forward_step, forward_only=False)


def _run(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[PackedMicroBatch],
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    # each virtual pipeline stage needs its own iterator over the micro-batches
    iterators = [_one_by_one(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(mb.num_tokens for mb in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _one_by_one(micro_batches: Sequence[PackedMicroBatch]) -> Iterator[PackedMicroBatch]:
    """Yield the micro-batches. Each forgets its attention masks when the next one begins, as they
    grow with the square of its longest sequence."""
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.sequences.padded is not None:
            micro_batch.sequences.padded.release()


def canary_batch(tokens: Sequence[int], num_micro_batches: int, **media: Any) -> TrainBatch:
    """Return the canary (`slime.weights.canary`) as a batch: ``tokens`` in the first micro-batch,
    all scored except the first token, and padding in the others.

    Args:
        num_micro_batches: the layout's `TrainLayout.micro_batch_multiple`.
        media: fields of `TrainBatch` with the images.
    """
    scored = len(tokens) - 1
    micro_batches: list[list[int]] = [[0], *([] for _ in range(num_micro_batches - 1))]
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.tensor(tokens, dtype=torch.long)],
        response_lengths=[scored],
        loss_masks=[torch.ones(scored)],
        rewards=[0.0],
        raw_rewards=[0.0],
        sample_indices=[0],
        group_indices=[0],
        trajectory_ids=[0],
        rollout_mask_sums=[float(scored)],
        truncated=[False],
        steps=[StepPlan(micro_batches, global_batch_size=1, num_loss_tokens=scored)],
        **media,
    )
