"""Training batches of samples with images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.models.images import ImageReader
from slime.samples.batch import StepPlan, TrainBatch
from slime.samples.media import Media
from slime.trainer.megatron import forward
from tests.support.images import PICTURES, reference_logits, with_images

#: Prompt and response of each sample; the last two share prompt tokens and not the image.
SAMPLES: list[tuple[list[Any], list[Any]]] = [
    ([[1, 2, 3, 4]], [[5, 6, 7]]),
    ([[1], "portrait", [9, 8]], [[7, 6, 5, 30]]),
    (["landscape", [3], "odd", "square", [4, 4]], [[11, 12]]),
    ([[5, 6], "landscape", [3]], [[12], "portrait", [13, 14, 15]]),
    ([[2], "square", [21]], [[22, 23]]),
    ([[2], "other", [21]], [[24, 23, 20]]),
]


def batch_of(
    reader: ImageReader, micro_batches: list[list[int]], samples: Any = SAMPLES
) -> TrainBatch:
    """The samples as one data-parallel rank's batch of one step."""
    tokens: list[Tensor] = []
    media: list[list[Media]] = []
    responses: list[int] = []
    for prompt, response in samples:
        ids, own = with_images(reader, [*prompt, *response])
        tokens.append(torch.tensor(ids))
        media.append(own)
        responses.append(len(ids) - len(with_images(reader, prompt)[0]))
    count = len(samples)
    return TrainBatch(
        rollout_id=0,
        tokens=tokens,
        response_lengths=responses,
        loss_masks=[torch.ones(length) for length in responses],
        rewards=[(-1.0) ** i * (1 + i / 4) for i in range(count)],
        raw_rewards=[0.0] * count,
        sample_indices=list(range(count)),
        group_indices=[0] * count,
        trajectory_ids=list(range(count)),
        rollout_mask_sums=[float(length) for length in responses],
        truncated=[False] * count,
        steps=[StepPlan(micro_batches, count, sum(responses))],
        rollout_log_probs=[torch.zeros(length) for length in responses],
        media=media,
        images=dict(PICTURES),
    )


def own_log_probs(backend: Any, batch: TrainBatch) -> list[Tensor]:
    packed = backend._pack(batch, batch.steps[0].micro_batches)
    scores = forward.score(backend.model_chunks, packed, temperature=1.0)
    found: dict[int, Tensor] = {}
    for micro_batch, score in zip(packed, scores):
        found.update(zip(micro_batch.samples, micro_batch.split(score.log_probs)))
    return [found[i] for i in sorted(found)]


def their_log_probs(model: Any, reader: ImageReader, batch: TrainBatch) -> list[Tensor]:
    found = []
    for tokens, media, length in zip(batch.tokens, batch.media, batch.response_lengths):
        logits = reference_logits(model, reader, tokens.tolist(), media)
        scores = logits[-length - 1 : -1].log_softmax(-1)
        found.append(scores.gather(1, tokens[-length:, None])[:, 0])
    return found


async def even_share(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that random tokens differ by."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))
