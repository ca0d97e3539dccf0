"""What the trainer knows of single tokens when a rollout is trained on, for the samples that are
recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slime.samples.batch import TrainBatch, TrainedTokens
from slime.trainer.ranks import Ranks
from slime.trainer.records import RolloutTensors


def trained_tokens(ranks: Ranks, batch: TrainBatch, data: RolloutTensors) -> list[TrainedTokens]:
    """Advantages and log-prob differences of ``batch.recorded``, as far as they are this shard's
    and this rank speaks for it. They are there anyway: two copies to the host of some ten thousand
    numbers each.

    Differences are those from before training, see `RolloutTensors.before_training`.
    """
    if not (batch.recorded and ranks.has_output and ranks.speaks_for_shard):
        return []
    places = [i for i in range(batch.num_samples) if batch.key(i) in batch.recorded]
    advantages = {} if data.advantages is None else _on_host(data.advantages, places)
    differences: dict[int, np.ndarray] = {}
    if data.log_probs is not None and data.rollout_log_probs is not None:
        known = set(data.samples_before_training())
        compared = [i for i in places if i in known]
        ours, theirs = (
            _on_host(values, compared) for values in (data.log_probs, data.rollout_log_probs)
        )
        differences = {i: ours[i] - theirs[i] for i in compared}
    found = [TrainedTokens(batch.key(i), advantages.get(i), differences.get(i)) for i in places]
    return [one for one in found if one.advantages is not None or one.log_prob_diffs is not None]


def _on_host(values: Sequence[Tensor], places: Sequence[int]) -> dict[int, np.ndarray]:
    """By place, in one copy."""
    if not places:
        return {}
    flat = torch.cat([values[i].detach() for i in places]).float().cpu()
    parts = flat.split([values[i].numel() for i in places])
    return {i: part.numpy() for i, part in zip(places, parts)}
