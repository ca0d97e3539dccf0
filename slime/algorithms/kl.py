"""Per-token estimators of KL(policy ‖ base) from samples of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
_LOW_VAR_LIMIT = 10.0


def kl_estimate(log_probs: Tensor, base_log_probs: Tensor, kind: str, log_ratio: Tensor | None = None) -> Tensor:
    """KL estimate of each token, with ``r = log_probs - base_log_probs``.

    ============  ==================  ==========================================================
    kind          value               property
    ============  ==================  ==========================================================
    k1            r                   unbiased, high variance, can be negative
    k2            r² / 2              biased, low variance, its gradient is the KL's
    k3            exp(-r) - 1 + r     unbiased, low variance, never negative
    low_var_kl    k3 clamped to ±10   as k3, one token cannot blow up the loss
    ============  ==================  ==========================================================

    Args:
        log_probs, base_log_probs: any one shape; log-probs of the same tokens, in nats.
        log_ratio: log of the importance ratio policy/behaviour of each token. When given, the estimate is multiplied
            by the ratio, gradient included, so that it stays unbiased off-policy.
    Returns:
        A tensor of the same shape. Exactly 0 where both log-probs are the same bits.
    Source: Schulman, "Approximating KL divergence" (2020); the weighted form: DeepSeek-V3.2 report, eq. 7.

    Example:
        >>> lp, base = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.5])
        >>> kl_estimate(lp, base, "k1").tolist()
        [0.0, -0.5]
        >>> kl_estimate(lp, base, "k2").tolist()
        [0.0, 0.125]
        >>> [round(v, 4) for v in kl_estimate(lp, base, "k3").tolist()]
        [0.0, 0.1487]
    """
    if kind not in KL_TYPES:
        raise ValueError(f"unknown KL estimator {kind!r}; there are {', '.join(KL_TYPES)}")
    r = log_probs - base_log_probs
    if kind == "k1":
        estimate = r
    elif kind == "k2":
        estimate = r.square() / 2
    else:
        estimate = torch.expm1(-r) + r
    if log_ratio is not None:
        estimate = estimate * torch.exp(log_ratio)
    return estimate.clamp(-_LOW_VAR_LIMIT, _LOW_VAR_LIMIT) if kind == "low_var_kl" else estimate
