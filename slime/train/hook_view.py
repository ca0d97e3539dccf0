"""``rollout_data``, the dict that hooks around the advantages read and change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slime.errors import UserError
from slime.samples.batch import TrainBatch
from slime.train.records import RolloutTensors


def hook_view(batch: TrainBatch, data: RolloutTensors) -> dict[str, Any]:
    """``rollout_data`` as hooks know it: one list entry per sample of this rank."""
    return {
        "tokens": batch.tokens,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
        "loss_masks": data.loss_masks,
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "truncated": batch.truncated,
        "sample_indices": batch.sample_indices,
        "group_indices": batch.group_indices,
        "rollout_ids": batch.execution_ids,
        "metadata": batch.metadata,
        "log_probs": data.log_probs,
        "ref_log_probs": data.ref_log_probs,
        "rollout_log_probs": data.rollout_log_probs,
        "teacher_log_probs": batch.teacher_log_probs,
        "kl": data.kl,
        "advantages": data.advantages,
        "returns": data.returns,
    }


def advantages_of(view: dict[str, Any], path: str, masks: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) that the hook at ``path`` left in ``rollout_data``; returns it did not set are the
    advantages.

    Raises:
        UserError: there are none, or not one per response token.
    """
    advantages, returns = view.get("advantages"), view.get("returns")
    if advantages is None:
        raise UserError(f"{path} set no advantages", fix='assign rollout_data["advantages"] and ["returns"]')
    returns = advantages if returns is None else returns
    for name, values in (("advantages", advantages), ("returns", returns)):
        lengths, wanted = [len(v) for v in values], [mask.numel() for mask in masks]
        if lengths != wanted:
            raise UserError(
                f"{path} set {name} of other lengths than the responses",
                why=f"lengths {lengths[:8]}… instead of {wanted[:8]}…",
                fix="give one tensor per sample with one value per response token",
            )
    return list(advantages), list(returns)
