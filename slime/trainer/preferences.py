"""Counts of an optimizer step on preferences, computed before its first micro-batch, and the labels
of each micro-batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slime.algorithms.reduce import sample_sums
from slime.config.config import Config
from slime.samples.batch import CHOSEN, REJECTED, StepPlan, TrainBatch
from slime.trainer.ranks import Ranks
from slime.trainer.records import PreferenceLabels, PreferenceStep, RolloutTensors
from slime.trainer.role import POLICY


class _Scorer(Protocol):
    """The part of `slime.trainer.update.Trainer` that this module uses."""

    config: Config
    ranks: Ranks

    def log_probs(
        self, batch: TrainBatch, role: str, *, micro_batches: list[list[int]] | None = None
    ) -> list[Tensor] | None: ...


def preference_step(
    trainer: _Scorer, batch: TrainBatch, data: RolloutTensors, step: StepPlan
) -> PreferenceStep:
    """Count the answers of each kind, and estimate KTO's KL: the mean over all mismatched samples
    of the step of Σ (policy's − reference's log-prob), at least 0. Collective."""
    facts = trainer.config.algorithm.preference
    assert facts is not None
    if facts.takes_pairs:
        return PreferenceStep(float(step.global_batch_size), float(step.global_batch_size))
    ranks = trainer.ranks
    scored = [i for samples in step.scored for i in samples]
    found = trainer.log_probs(batch, POLICY, micro_batches=step.scored)
    drift = 0.0
    if found is not None and scored:
        assert data.ref_log_probs is not None, "the reference's log-probs are computed before"
        differences = torch.cat([found[i] - data.ref_log_probs[i] for i in scored])
        masks = torch.cat([data.loss_masks[i] for i in scored])
        lengths = torch.tensor([batch.response_lengths[i] for i in scored], device=ranks.device)
        drift = sample_sums(differences, masks, lengths).double().sum().item()
    rewards = [batch.rewards[i] for samples in step.micro_batches for i in samples]
    counts = [drift, len(scored), rewards.count(CHOSEN), rewards.count(REJECTED)]
    sums = ranks.sum_over_replicas(torch.tensor(counts, dtype=torch.float64, device=ranks.device))
    total, number, chosen, rejected = sums.tolist()
    return PreferenceStep(chosen, rejected, max(0.0, total / max(number, 1.0)))


def labels_of(
    batch: TrainBatch, samples: list[int], step: PreferenceStep, device: torch.device
) -> PreferenceLabels:
    """Return the labels of a micro-batch. It holds both samples of a pair, and both lists are
    sorted by trajectory, so that entry i of both is one pair."""

    def places(reward: float) -> Tensor:
        found = [place for place, i in enumerate(samples) if batch.rewards[i] == reward]
        found.sort(key=lambda place: batch.trajectory_ids[samples[place]])
        return torch.tensor(found, dtype=torch.long, device=device)

    return PreferenceLabels(places(CHOSEN), places(REJECTED), step)
