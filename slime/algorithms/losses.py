"""Losses per token, and the importance weights and masks that multiply them. Tensors are flat, [T]:
the response tokens of a micro-batch, sample after sample.

Every policy loss takes `PolicyInputs` and returns a `PolicyLoss`;
`slime.algorithms.estimators.Estimator.loss` names an estimator's loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime.algorithms.reduce import sequence_mean, sequence_sum


@dataclass(frozen=True)
class PolicyInputs:
    """Input of a policy loss; all flat [T], T response tokens of the micro-batch.

    Attributes:
        log_probs: of the current policy, with gradient.
        old_log_probs: of the policy in the denominator of the ratio.
        advantages: A of each token.
        masks: 0 or 1.
        lengths: int64 [samples], response tokens of each sample.
        eps_clip, eps_clip_high: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
        eps_clip_c: dual clip, > 1: for A < 0 the loss is at most -c·A. None switches it off.
        sapo_tau_pos, sapo_tau_neg: steepness of SAPO's gate for A > 0 and for A ≤ 0.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    masks: Tensor
    lengths: Tensor
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05


@dataclass(frozen=True)
class PolicyLoss:
    """Per token: the loss, whether the ratio was clipped (0 or 1), and old minus new log-prob
    (``ppo_kl``)."""

    loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor


#: Log-ratios are clamped to ± this before they are exponentiated: e^20 is 5e8, e^89 overflows
#: float32.
MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), where log_ratio is clamped to ± `MAX_LOG_RATIO`; beyond, its gradient
    is 0.

    Without the clamp a ratio may overflow to Inf, and a token of weight 0 would then have the
    gradient 0 · Inf = NaN.

    Example:
        >>> importance_ratio(torch.tensor([0.0, 200.0])).tolist() == [
        ...     1.0, torch.tensor(20.0).exp().item()]
        True
    """
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip_loss(inputs: PolicyInputs) -> PolicyLoss:
    """Return max(-ρA, -clip(ρ)A) with ρ = exp(log_prob - old_log_prob). ``eps_clip_high`` makes the
    clip asymmetric, ``eps_clip_c`` adds the dual clip.

    Source: Schulman et al., "PPO" (arXiv:1707.06347), eq. 7; clip-higher: Yu et al., "DAPO"
    (arXiv:2503.14476); dual clip: Ye et al. (arXiv:1912.09729), eq. 5.

    Example (the ratio 1.5 with a positive advantage is clipped to 1.2):
        >>> one = torch.ones(1)
        >>> out = ppo_clip_loss(PolicyInputs(
        ...     torch.log(1.5 * one), torch.zeros(1), 2 * one, one, torch.tensor([1])))
        >>> round(out.loss.item(), 3), out.clipped.item()
        (-2.4, 1.0)
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    return _clipped(inputs, ppo_kl)


def gspo_loss(inputs: PolicyInputs) -> PolicyLoss:
    """Return PPO's clipped loss with one ratio per sequence: ρ = exp(mean over tokens of log_prob -
    old_log_prob).

    Source: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7.

    Example:
        >>> new, old = torch.tensor([0.125, 0.375]), torch.zeros(2)
        >>> inputs = PolicyInputs(new, old, torch.ones(2), torch.ones(2), torch.tensor([2]))
        >>> gspo_loss(inputs).ppo_kl.tolist()
        [-0.25, -0.25]
    """
    ppo_kl = sequence_mean(inputs.old_log_probs - inputs.log_probs, inputs.masks, inputs.lengths)
    return _clipped(inputs, ppo_kl)


def cispo_loss(inputs: PolicyInputs) -> PolicyLoss:
    """Return the loss of REINFORCE with a clipped, constant importance weight:
    -stop_gradient(clip(ρ)) · A · log_prob.

    No token loses its gradient to clipping. ``eps_clip >= 1`` leaves the lower side open, as in the
    paper. The mean is taken over all trained tokens of a prompt's group
    (`slime.config.estimators.EstimatorFacts.averages_group`).

    Source: MiniMax, "MiniMax-M1" (arXiv:2506.13585), eq. 4-5.

    Example:
        >>> lp = torch.log(torch.tensor([1.5])).requires_grad_()
        >>> out = cispo_loss(PolicyInputs(
        ...     lp, torch.zeros(1), torch.ones(1), torch.ones(1), torch.tensor([1])))
        >>> out.loss.sum().backward(); round(lp.grad.item(), 3)
        -1.2
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    ratio = importance_ratio(-ppo_kl.detach())
    weight = ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return PolicyLoss(loss, (weight != ratio).to(loss.dtype), ppo_kl)


def sapo_loss(inputs: PolicyInputs) -> PolicyLoss:
    """Return -f(ρ)A with the soft gate f(ρ) = 4/τ · sigmoid(τ(ρ - 1)) in place of a clip.

    f'(ρ) is 1 at ρ = 1 and decays smoothly on both sides, so no token is clipped. τ is
    ``sapo_tau_pos`` for A > 0, else ``sapo_tau_neg``.

    Source: Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347), eq. 5-6.

    Example (at the ratio 1 the loss is -2/τ · A):
        >>> one = torch.ones(1)
        >>> sapo_loss(PolicyInputs(0 * one, 0 * one, one, one, torch.tensor([1]))).loss.item()
        -2.0
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    ratio = importance_ratio(-ppo_kl)
    tau = torch.full_like(inputs.advantages, inputs.sapo_tau_neg)
    tau = tau.masked_fill(inputs.advantages > 0, inputs.sapo_tau_pos)
    loss = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages
    return PolicyLoss(loss, torch.zeros_like(loss), ppo_kl)


def sft_loss(log_probs: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token.

    Example:
        >>> sft_loss(torch.tensor([-0.5, 0.0])).tolist()
        [0.5, -0.0]
    """
    return -log_probs


def _clipped(inputs: PolicyInputs, ppo_kl: Tensor) -> PolicyLoss:
    ratio = importance_ratio(-ppo_kl)
    plain = -ratio * inputs.advantages
    limited = -ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high) * inputs.advantages
    loss = torch.maximum(plain, limited)
    clipped = (limited > plain).to(loss.dtype)
    if inputs.eps_clip_c is not None:
        ceiling = -inputs.eps_clip_c * inputs.advantages
        loss = torch.where(inputs.advantages < 0, torch.minimum(loss, ceiling), loss)
    return PolicyLoss(loss, clipped, ppo_kl)


# -- corrections for tokens sampled from a slightly different distribution -------------------------

Level = Literal["token", "sequence", "geometric"]
"""How importance ratios are aggregated: per token, by the product over a sample's trained tokens,
or by their geometric mean, which does not depend on the sample's length."""


def log_ratio_at(level: Level, log_ratio: Tensor, masks: Tensor, lengths: Tensor) -> Tensor:
    """Aggregate log-ratios at ``level``; above "token", each token gets the value of its sample.

    Args:
        log_ratio, masks: flat [T].
        lengths: int64 [samples].

    Example:
        >>> r, m, n = torch.tensor([0.5, 0.25, 1.0]), torch.ones(3), torch.tensor([2, 1])
        >>> log_ratio_at("sequence", r, m, n).tolist()
        [0.75, 0.75, 1.0]
        >>> log_ratio_at("geometric", r, m, n).tolist()
        [0.375, 0.375, 1.0]
    """
    if level == "token":
        return log_ratio
    total = sequence_sum if level == "sequence" else sequence_mean
    return total(torch.where(masks != 0, log_ratio, 0.0), masks, lengths)


@dataclass(frozen=True)
class Correction:
    """Weights [T] that multiply the token losses, and metrics [T] that are averaged like the
    loss."""

    weights: Tensor
    metrics: dict[str, Tensor]


def truncated_importance_sampling(log_ratio: Tensor, low: float, high: float) -> Correction:
    """Weight tokens by the importance ratio exp(log_ratio) clamped to [low, high]: bounded
    variance, some bias.

    Args:
        log_ratio: [T], without gradient: the log-prob under the trainer's weights before the step
            minus the engine's.
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025).

    Example:
        >>> c = truncated_importance_sampling(torch.log(torch.tensor([0.5, 1.0, 4.0])), 0.0, 2.0)
        >>> [round(v, 3) for v in c.weights.tolist()], c.metrics["tis_clipfrac"].tolist()
        ([0.5, 1.0, 2.0], [0.0, 0.0, 1.0])
    """
    ratio = importance_ratio(log_ratio)
    weights = ratio.clamp(low, high)
    return _correction(weights, ratio, weights != ratio)


def icepop(log_ratio: Tensor, low: float, high: float) -> Correction:
    """Weight tokens by the importance ratio exp(log_ratio), and by 0 outside [low, high]: tokens on
    which trainer and engine disagree too much are masked, instead of trained on with a clamped
    weight.

    Args:
        log_ratio: [T], as in `truncated_importance_sampling`.
    Source: Zhao et al., "Small leak can sink a great ship: boost RL training on MoE with IcePop"
    (2025).

    Example:
        >>> c = icepop(torch.log(torch.tensor([0.4, 1.0, 4.0])), 0.5, 2.0)
        >>> [round(v, 3) for v in c.weights.tolist()], c.metrics["tis_clipfrac"].tolist()
        ([0.0, 1.0, 0.0], [1.0, 0.0, 1.0])
    """
    ratio = importance_ratio(log_ratio)
    outside = (ratio < low) | (ratio > high)
    return _correction(ratio.masked_fill(outside, 0.0), ratio, outside)


def _correction(weights: Tensor, ratio: Tensor, is_changed: Tensor) -> Correction:
    clipped = is_changed.to(ratio.dtype)
    return Correction(
        weights, {"tis": ratio, "tis_clipfrac": clipped, "tis_abs": (ratio - 1.0).abs()}
    )


@dataclass(frozen=True)
class Rejection:
    """``keep`` [T], 0 or 1, and metrics [T] that are averaged like the loss."""

    keep: Tensor
    metrics: dict[str, Tensor]


def rejection_mask(
    log_ratio: Tensor,
    masks: Tensor,
    lengths: Tensor,
    level: Level,
    low: float,
    high: float,
    veto: float | None,
) -> Rejection:
    """Mask tokens on which trainer and engine disagree too much: tokens, or whole samples, whose
    ratio at ``level`` is outside [low, high], and samples with any trained token whose ratio is
    below ``veto``. Importance weights and the denominators of means do not change.

    Args:
        log_ratio, masks: flat [T]; the log-ratio as in `truncated_importance_sampling`, without
            gradient.
        lengths: int64 [samples].
    Source: Liu et al., "When Speed Kills Stability" (2025), on sequence masks; Li et al.,
    "Trust Region Masking" (arXiv:2512.23075), on the geometric level.

    Example (a token of the first sample is 1000 times less likely for the trainer):
        >>> r = torch.log(torch.tensor([1.0, 0.001, 1.0]))
        >>> rejection_mask(
        ...     r, torch.ones(3), torch.tensor([2, 1]), "token", 0.0, 2.0, veto=0.01).keep.tolist()
        [0.0, 0.0, 1.0]
    """
    at_level = log_ratio_at(level, log_ratio, masks, lengths)
    too_low = at_level < (math.log(low) if low > 0 else -math.inf)
    too_high = at_level > math.log(high)
    vetoed = torch.zeros_like(too_low)
    if veto is not None:
        below_veto = (log_ratio < math.log(veto)) & (masks != 0)
        vetoed = sequence_sum(below_veto.to(log_ratio.dtype), masks, lengths) > 0
    metrics = {"rs_fraction_low": too_low, "rs_fraction_high": too_high}
    if veto is not None:
        metrics["rs_fraction_veto"] = vetoed
    keep = ~(too_low | too_high | vetoed)
    return Rejection(
        keep.to(log_ratio.dtype),
        {name: value.to(log_ratio.dtype) for name, value in metrics.items()},
    )


def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    masks: Tensor,
    lengths: Tensor,
    delta: float,
) -> Tensor:
    """Return a mask [T]: 0 for tokens with negative advantage in samples whose mean log-ratio
    old/new exceeds ``delta``, else 1.

    Source: DeepSeek-V3.2 report (2025), off-policy sequence masking.

    Example (the first sample has a mean log-ratio of 0.2 and a negative advantage):
        >>> off_policy_sequence_mask(
        ...     torch.tensor([-1.2, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]),
        ...     torch.ones(2), torch.tensor([1, 1]), delta=0.1).tolist()
        [0.0, 1.0]
    """
    drift = sequence_mean((old_log_probs - log_probs).detach(), masks, lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(log_probs.dtype)
