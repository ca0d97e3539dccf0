"""Losses per token. Flat tensors: the response tokens of a micro-batch, one sample after the other.

Every policy loss takes the same `PolicyInputs` and returns the same `PolicyLoss`, so that a new one is one function
and one row in `POLICY_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.reduce import sequence_mean


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss may use; all flat [T], T response tokens of the micro-batch.

    Attributes:
        log_probs: of the current policy, with gradient.
        old_log_probs: of the policy that the ratio is taken against.
        advantages: A of each token.
        masks: 0 or 1.
        lengths: int64 [samples], response tokens of each sample.
        eps_clip, eps_clip_high: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
        eps_clip_c: dual clip, > 1: for A < 0 the loss is at most -c·A. None switches it off.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    masks: Tensor
    lengths: Tensor
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """Per token: the loss, whether the ratio was clipped (0 or 1), and old minus new log-prob (``ppo_kl``)."""

    loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor


def ppo_clip_loss(inputs: PolicyInputs) -> PolicyLoss:
    """max(-ρA, -clip(ρ)A) with ρ = exp(log_prob - old_log_prob); asymmetric and dual clipping by the inputs.

    Source: Schulman et al., "PPO" (arXiv:1707.06347), eq. 7; clip-higher: Yu et al., "DAPO" (arXiv:2503.14476);
    dual clip: Ye et al. (arXiv:1912.09729), eq. 5.

    Example (the ratio 1.5 with a positive advantage is clipped to 1.2):
        >>> one = torch.ones(1)
        >>> out = ppo_clip_loss(PolicyInputs(torch.log(1.5 * one), torch.zeros(1), 2 * one, one, torch.tensor([1])))
        >>> round(out.loss.item(), 3), out.clipped.item()
        (-2.4, 1.0)
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    return _clipped(inputs, ppo_kl)


def gspo_loss(inputs: PolicyInputs) -> PolicyLoss:
    """PPO's clipped loss with one ratio per sequence: ρ = exp(mean over tokens of log_prob - old_log_prob).

    Source: Zheng et al., "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 5-7.

    Example:
        >>> new, old = torch.tensor([0.1, 0.3]), torch.zeros(2)
        >>> gspo_loss(PolicyInputs(new, old, torch.ones(2), torch.ones(2), torch.tensor([2]))).ppo_kl.tolist()
        [-0.20000000298023224, -0.20000000298023224]
    """
    ppo_kl = sequence_mean(inputs.old_log_probs - inputs.log_probs, inputs.masks, inputs.lengths)
    return _clipped(inputs, ppo_kl)


def cispo_loss(inputs: PolicyInputs) -> PolicyLoss:
    """REINFORCE with a clipped, constant importance weight: -stop_gradient(clip(ρ)) · A · log_prob.

    No token loses its gradient to clipping. ``eps_clip >= 1`` leaves the lower side open, as in the paper.

    Source: MiniMax, "MiniMax-M1" (arXiv:2506.13585), eq. 4-5.

    Example:
        >>> lp = torch.log(torch.tensor([1.5])).requires_grad_()
        >>> out = cispo_loss(PolicyInputs(lp, torch.zeros(1), torch.ones(1), torch.ones(1), torch.tensor([1])))
        >>> out.loss.sum().backward(); round(lp.grad.item(), 3)
        -1.2
    """
    ppo_kl = inputs.old_log_probs - inputs.log_probs
    ratio = torch.exp(-ppo_kl.detach())
    weight = ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return PolicyLoss(loss, (weight != ratio).to(loss.dtype), ppo_kl)


POLICY_LOSSES: dict[str, Callable[[PolicyInputs], PolicyLoss]] = {
    "grpo": ppo_clip_loss,
    "ppo": ppo_clip_loss,
    "reinforce_plus_plus": ppo_clip_loss,
    "reinforce_plus_plus_baseline": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}
"""By ``--advantage-estimator``."""


def sft_loss(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood of each token.

    Example:
        >>> sft_loss(torch.tensor([-0.5, 0.0])).tolist()
        [0.5, -0.0]
    """
    return -log_probs


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clipped squared error of the critic per token, without the factor ½; and whether the clip was active.

    Source: Schulman et al. (arXiv:1707.06347), section 6.1, with the clipping of its reference implementation.

    Example (the value may move from 0 to at most 0.2 while the return is 1):
        >>> loss, clipped = value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
        >>> round(loss.item(), 3), clipped.item()
        (0.64, 1.0)
    """
    near_old = torch.clamp(values, old_values - clip, old_values + clip)
    plain, limited = (values - returns).square(), (near_old - returns).square()
    return torch.maximum(plain, limited), (limited > plain).to(values.dtype)


def _clipped(inputs: PolicyInputs, ppo_kl: Tensor) -> PolicyLoss:
    ratio = torch.exp(-ppo_kl)
    plain = -ratio * inputs.advantages
    limited = -ratio.clamp(1.0 - inputs.eps_clip, 1.0 + inputs.eps_clip_high) * inputs.advantages
    loss = torch.maximum(plain, limited)
    clipped = (limited > plain).to(loss.dtype)
    if inputs.eps_clip_c is not None:
        ceiling = -inputs.eps_clip_c * inputs.advantages
        loss = torch.where(inputs.advantages < 0, torch.minimum(loss, ceiling), loss)
    return PolicyLoss(loss, clipped, ppo_kl)
