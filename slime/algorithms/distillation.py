"""On-policy distillation: a record of each loss, and what `sampled` computes: the log-prob
difference of student and teacher, and the advantages that it gives. The other losses, divergences
between whole distributions, are computed in `divergence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """A value of ``--opd-loss``. Which flags act on it follows from their conditions.

    Attributes:
        paper: its source.
        formula: what it adds, in the symbols of docs/algorithms.md.
        choose: when to use it.
    """

    name: str
    paper: str
    formula: str
    choose: str


DISTILLATION_LOSSES: dict[str, DistillationLoss] = {
    row.name: row
    for row in (
        DistillationLoss(
            name="sampled",
            paper="Agarwal et al., GKD (arXiv:2306.13649), section 3",
            formula="A_t ← A_t − c·(log S(y_t) − log P(y_t)) of the sampled token; its mean is the "
            "reverse KL",
            choose="the default: it needs one number per token, which every teacher can give",
        ),
        DistillationLoss(
            name="reverse_kl",
            paper="Agarwal et al., GKD (arXiv:2306.13649), section 2",
            formula="the loss term c·KL(S ‖ P)",
            choose="the same objective per token with less noise. Mode-seeking: the student drops "
            "what the teacher finds unlikely",
        ),
        DistillationLoss(
            name="forward_kl",
            paper="Agarwal et al., GKD (arXiv:2306.13649), section 2",
            formula="c·KL(P ‖ S)",
            choose="to keep all that the teacher may say. Mode-covering: a student that cannot "
            "follow also gets what lies between",
        ),
        DistillationLoss(
            name="jsd",
            paper="Agarwal et al., GKD (arXiv:2306.13649), eq. 1",
            formula="c·(β KL(P ‖ M) + (1 − β) KL(S ‖ M)), M = β P + (1 − β) S, β `--opd-jsd-beta`",
            choose="between the two, and bounded where student and teacher share little",
        ),
    )
}


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
