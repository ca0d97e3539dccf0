"""On-policy distillation on sampled tokens: the log-prob difference of student and teacher, and the
advantages that it gives. Divergences between whole distributions are in `divergence`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sampled_reverse_kl(
    log_probs: Sequence[Tensor], teacher_log_probs: Sequence[Tensor]
) -> list[Tensor]:
    """Return d_t = log S(y_t) - log P(y_t) of each token that the student S sampled.

    Its mean over samples of S is the reverse KL(S ‖ P) to the teacher P; a single d_t may be
    negative. It is detached, because its gradient does not depend on the teacher.

    Args:
        log_probs: [R_i] per sample, of the policy that sampled.
        teacher_log_probs: [R_i] per sample, of the same tokens at the same temperature.

    Example:
        >>> sampled_reverse_kl([torch.tensor([-1.0, -3.0])], [torch.tensor([-1.5, -1.0])])
        [tensor([ 0.5000, -2.0000])]
    """
    return [
        (own - teacher).detach() for own, teacher in zip(log_probs, teacher_log_probs, strict=True)
    ]


def distilled_advantages(
    advantages: Sequence[Tensor],
    reverse_kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    coef: float,
) -> list[Tensor]:
    """Return A_t - coef · d_t. Each token gets only its own d_t, not those of later tokens.

    Args:
        advantages: [R_i] per sample, of the task reward; zeros without one.
        reverse_kl: d of `sampled_reverse_kl`.
        loss_masks: [R_i] per sample; 0 for tokens that the policy did not generate.
    Source: the policy gradient of the per-token reverse KL (Agarwal et al., arXiv:2306.13649,
        section 3; Lu et al., "On-Policy Distillation", 2025).

    Example:
        >>> d, mask = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 0.0])
        >>> distilled_advantages([torch.ones(2)], [d], [mask], 2.0)
        [tensor([0., 1.])]
    """
    return [
        a - coef * torch.where(mask > 0, d, 0.0)
        for a, d, mask in zip(advantages, reverse_kl, loss_masks, strict=True)
    ]
