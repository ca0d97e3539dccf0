"""A rank's training data as plain data, for ``--save-debug-train-data`` and for steps with NaN.

The format is the reference system's (``format_version`` 2): one `torch.save` per rollout of

    {"format_version": 2, "rollout_id", "rank", "samples": [{...}], "dp_shards": [{...}],
     "raw_reward": [...]}

with the samples of all data-parallel ranks in the order of their index. It holds plain containers
and tensors only, so ``torch.load(path)`` reads it with its safe defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.files import replacing
from slime.paths import fill
from slime.samples.batch import TrainBatch
from slime.trainer.records import RolloutTensors

FORMAT_VERSION = 2

#: Per-sample tensors [R_i] of `RolloutTensors`; the files use the same names.
_TENSORS = (
    "log_probs", "ref_log_probs", "rollout_log_probs", "kl", "advantages", "returns", "values",
)  # fmt: skip


@dataclass
class RankDump:
    """One data-parallel rank's part of a rollout, or of one step of it, on the CPU.

    Attributes:
        data_parallel_rank: of the rank.
        samples: one dict per sample, with the tensors [R_i] that exist and ``tokens`` int64 [L_i].
        steps: the micro-batches of each optimizer step, as positions in ``samples``.
    """

    data_parallel_rank: int
    samples: list[dict[str, Any]]
    steps: list[list[list[int]]]


def shard_of(
    batch: TrainBatch,
    data: RolloutTensors,
    data_parallel_rank: int,
    only_step: int | None = None,
    **more: Any,
) -> RankDump:
    """Return this rank's samples as plain data.

    Args:
        only_step: include only the samples of this optimizer step.
        more: further per-sample values by name, each a list over all samples of ``batch``; entries
            that are None are omitted.
    """
    steps = [step.micro_batches for step in batch.steps]
    members = list(range(len(batch.tokens)))
    if only_step is not None:
        steps = [steps[only_step]]
        members = [i for micro_batch in steps[0] for i in micro_batch]
    place = {member: position for position, member in enumerate(members)}
    return RankDump(
        data_parallel_rank,
        [_sample(batch, data, i, more) for i in members],
        [[[place[i] for i in micro_batch] for micro_batch in step] for step in steps],
    )


def _sample(
    batch: TrainBatch, data: RolloutTensors, i: int, more: dict[str, Any]
) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "sample_index": batch.sample_indices[i],
        "group_index": batch.group_indices[i],
        "rollout_id": batch.trajectory_ids[i],
        "tokens": batch.tokens[i].cpu(),
        "response_length": batch.response_lengths[i],
        "total_length": int(batch.tokens[i].numel()),
        "reward": batch.rewards[i],
        "raw_reward": batch.raw_rewards[i],
        "truncated": bool(batch.truncated[i]),
        "rollout_mask_sum": batch.rollout_mask_sums[i],
        "weight_version": min(batch.weight_versions[i], default=None)
        if batch.weight_versions
        else None,
    }
    if batch.media:
        sample["images"] = [[one.reference, *one.span] for one in batch.media[i]]
    columns: dict[str, Any] = {name: getattr(data, name) for name in _TENSORS}
    columns |= {"loss_mask": data.loss_masks, "teacher_log_probs": data.teacher_log_probs(batch)}
    columns |= more
    for name, values in columns.items():
        if values is not None and values[i] is not None:
            value = values[i]
            sample[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return sample


def joined(rollout_id: int, shards: Sequence[RankDump]) -> dict[str, Any]:
    """Join the shards of all data-parallel ranks into one record of the format above; each rank is
    included once."""
    by_rank = {shard.data_parallel_rank: shard for shard in shards}
    ordered = [by_rank[r] for r in sorted(by_rank)]
    samples = sorted(
        (s for shard in ordered for s in shard.samples), key=lambda s: s["sample_index"]
    )
    return {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": 0,
        "samples": samples,
        "dp_shards": [
            {
                "data_parallel_rank": shard.data_parallel_rank,
                "sample_indices": [s["sample_index"] for s in shard.samples],
                "steps": shard.steps,
            }
            for shard in ordered
        ],
        "raw_reward": [s["raw_reward"] for s in samples],
    }


def save_train_data(pattern: str, rollout_id: int, shards: Sequence[RankDump]) -> Path:
    """Write a rollout's training data atomically to the file that the pattern names; returns its
    path."""
    path = fill(pattern, rollout_id)
    save_whole(joined(rollout_id, shards), path)
    return path


def save_whole(record: dict[str, Any], path: Path) -> None:
    """Call `torch.save`, replacing an existing file only once the new one is complete."""
    with replacing(path) as unfinished:
        torch.save(record, unfinished)
