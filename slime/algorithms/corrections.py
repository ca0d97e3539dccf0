"""Corrections for training on tokens that a slightly different distribution produced (engine versus trainer numerics).

``log_ratio`` is the log-prob under the trainer's weights before the step minus the engine's, per token, without
gradient. The result multiplies the policy loss of the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.reduce import sequence_mean


@dataclass(frozen=True)
class Correction:
    """``weights`` to multiply the token losses with, and per-token metrics to be averaged as the loss is."""

    weights: Tensor
    metrics: dict[str, Tensor]


def truncated_importance_sampling(log_ratio: Tensor, low: float, high: float) -> Correction:
    """Importance ratio clamped to [low, high]: bounded variance, some bias.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).

    Example:
        >>> c = truncated_importance_sampling(torch.log(torch.tensor([0.5, 1.0, 4.0])), 0.0, 2.0)
        >>> [round(v, 3) for v in c.weights.tolist()], c.metrics["tis_clipfrac"].tolist()
        ([0.5, 1.0, 2.0], [0.0, 0.0, 1.0])
    """
    ratio = torch.exp(log_ratio)
    weights = ratio.clamp(low, high)
    return Correction(weights, _metrics(ratio, weights))


def icepop(log_ratio: Tensor, low: float, high: float) -> Correction:
    """Importance ratio inside [low, high], 0 outside: tokens on which the two disagree are not trained on.

    Source: Ling team, "Every step evolves: scaling RL for trillion-scale thinking model" (arXiv:2510.18855), IcePop.

    Example:
        >>> icepop(torch.log(torch.tensor([0.5, 1.0, 4.0])), 0.5, 2.0).weights.tolist()
        [0.5, 1.0, 0.0]
    """
    ratio = torch.exp(log_ratio)
    weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return Correction(weights, _metrics(ratio, weights))


CORRECTIONS = {"tis": truncated_importance_sampling, "icepop": icepop}


def off_policy_sequence_mask(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, masks: Tensor, lengths: Tensor, delta: float
) -> Tensor:
    """0 for every token of a sample with negative advantage whose mean log-ratio old/new exceeds ``delta``, else 1.

    Source: DeepSeek-V3.2 report (2025), off-policy sequence masking.

    Example (the first sample drifted by 0.2 and has a negative advantage):
        >>> off_policy_sequence_mask(torch.tensor([-1.2, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]),
        ...     torch.ones(2), torch.tensor([1, 1]), delta=0.1).tolist()
        [0.0, 1.0]
    """
    drift = sequence_mean((old_log_probs - log_probs).detach(), masks, lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(log_probs.dtype)


def _metrics(ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1.0).abs()}
