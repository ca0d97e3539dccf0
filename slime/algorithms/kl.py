"""Per-token estimators of KL(policy ‖ base) from samples of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.losses import MAX_LOG_RATIO, importance_ratio


@dataclass(frozen=True, kw_only=True)
class KlKind:
    """A ``--kl-loss-type``.

    Attributes:
        estimate: r = log_prob - base_log_prob of each token → the estimate, of the same shape.
        limit: the estimate, after any importance ratio, is clamped to ± this; None: no clamp.
    """

    estimate: Callable[[Tensor], Tensor]
    limit: float | None


def k1(r: Tensor) -> Tensor:
    """Return r: unbiased, high variance, may be negative.

    Example:
        >>> k1(torch.tensor([0.0, -0.5])).tolist()
        [0.0, -0.5]
    """
    return r


def k2(r: Tensor) -> Tensor:
    """Return r² / 2: biased, low variance; its expected gradient is the gradient of the KL.

    Example:
        >>> k2(torch.tensor([0.0, -0.5])).tolist()
        [0.0, 0.125]
    """
    return r.square() / 2


def k3(r: Tensor) -> Tensor:
    """Return exp(-r) - 1 + r: unbiased, low variance, never negative. r is clamped to at least
    -`MAX_LOG_RATIO`.

    Example:
        >>> [round(v, 4) for v in k3(torch.tensor([0.0, -0.5])).tolist()]
        [0.0, 0.1487]
    """
    # without it exp(-r) could overflow, and its gradient would be NaN after the clamp of low_var_kl
    r = r.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-r) + r


KL_KINDS: dict[str, KlKind] = {
    "k1": KlKind(estimate=k1, limit=None),
    "k2": KlKind(estimate=k2, limit=None),
    "k3": KlKind(estimate=k3, limit=None),
    "low_var_kl": KlKind(estimate=k3, limit=10.0),  # so that one token cannot blow up the loss
}


def kl_estimate(
    log_probs: Tensor, base_log_probs: Tensor, kind: str, log_ratio: Tensor | None = None
) -> Tensor:
    """Return the KL estimate of each token.

    Args:
        log_probs, base_log_probs: log-probs of the same tokens in nats, of the same shape.
        kind: a key of `KL_KINDS`.
        log_ratio: log of the importance ratio policy/behaviour of each token. If given, the
            estimate is multiplied by the ratio, with gradient, and is unbiased off-policy.
    Returns:
        A tensor of the same shape; exactly 0 where both log-probs are bitwise equal.
    Source: Schulman, "Approximating KL divergence" (2020); the weighted form: DeepSeek-V3.2 report,
    eq. 7.

    Example (k3 is 2972):
        >>> kl_estimate(torch.tensor([-9.0]), torch.tensor([-1.0]), "low_var_kl").item()
        10.0
    """
    row = KL_KINDS[kind]
    estimate = row.estimate(log_probs - base_log_probs)
    if log_ratio is not None:
        estimate = estimate * importance_ratio(log_ratio)
    return estimate if row.limit is None else estimate.clamp(-row.limit, row.limit)
