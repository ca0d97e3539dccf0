"""The canary as a batch: one sequence of which all tokens but the first are scored (`slime.weights.canary`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.samples.batch import StepPlan, TrainBatch


def canary_batch(tokens: Sequence[int], num_micro_batches: int) -> TrainBatch:
    """A batch for a forward pass: ``tokens`` in the first micro-batch, padding in the others.

    Args:
        num_micro_batches: what the layout divides a step into (`TrainLayout.micro_batch_multiple`).
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
        execution_ids=[0],
        rollout_mask_sums=[float(scored)],
        truncated=[False],
        steps=[StepPlan(micro_batches, global_batch_size=1, num_loss_tokens=scored)],
    )
