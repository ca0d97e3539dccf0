"""One record per ``--advantage-estimator``: everything that makes an algorithm, in one row.

    rewards ─ baseline, scale ─► advantages ─► loss

A new one is a function for what is new about it and a row in `ESTIMATORS`; its name goes into the choices of
``--advantage-estimator``. Every fact has to be told: a row that leaves one out cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.algorithms.advantages import (
    AdvantageInputs,
    Estimate,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from slime.algorithms.baseline import Baseline, group_mean
from slime.algorithms.losses import PolicyInputs, PolicyLoss, cispo_loss, gspo_loss, ppo_clip_loss


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An algorithm of policy optimisation, and which flags act on it.

    Attributes:
        name: the value of ``--advantage-estimator``.
        paper: where it comes from.
        baseline: what a reward loses, by the rewards of its group; None: rewards go in as they are.
        divides_by_deviation: centred rewards are divided by the standard deviation of their group.
        advantages: normalised rewards of a rollout → advantages and returns, one tensor [L_i] per sample.
        loss: log-probs and advantages of a micro-batch → loss per token, flat [T].
        takes_own_log_probs: with one optimizer step per rollout the training pass's log-probs may serve as the old
            policy's, which saves a pass.
        takes_token_kl: ``--kl-coef`` acts: the KL to the reference is a part of each token's reward.
        discounts: ``--gamma`` acts.
        needs_whitening: advantages have to be normalised over the batch (``--normalize-advantages``).
        clips_twice: ``--eps-clip-c`` acts.
    """

    name: str
    paper: str
    baseline: Baseline | None
    divides_by_deviation: bool
    advantages: Callable[[AdvantageInputs], Estimate]
    loss: Callable[[PolicyInputs], PolicyLoss]
    takes_own_log_probs: bool
    takes_token_kl: bool
    discounts: bool
    needs_whitening: bool
    clips_twice: bool


ESTIMATORS: dict[str, Estimator] = {
    row.name: row
    for row in (
        Estimator(
            name="grpo",
            paper="Shao et al., DeepSeekMath (arXiv:2402.03300), section 4.1",
            baseline=group_mean,
            divides_by_deviation=True,
            advantages=grpo,
            loss=ppo_clip_loss,
            takes_own_log_probs=True,
            takes_token_kl=False,
            discounts=False,
            needs_whitening=False,
            clips_twice=True,
        ),
        Estimator(
            name="gspo",
            paper="Zheng et al., Group Sequence Policy Optimization (arXiv:2507.18071), section 4",
            baseline=group_mean,
            divides_by_deviation=True,
            advantages=grpo,
            loss=gspo_loss,
            takes_own_log_probs=False,
            takes_token_kl=False,
            discounts=False,
            needs_whitening=False,
            clips_twice=True,
        ),
        Estimator(
            name="cispo",
            paper="MiniMax, MiniMax-M1 (arXiv:2506.13585), section 3.1",
            baseline=group_mean,
            divides_by_deviation=True,
            advantages=grpo,
            loss=cispo_loss,
            takes_own_log_probs=True,
            takes_token_kl=False,
            discounts=False,
            needs_whitening=False,
            clips_twice=False,
        ),
        Estimator(
            name="reinforce_plus_plus",
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262)",
            baseline=None,
            divides_by_deviation=False,
            advantages=reinforce_plus_plus,
            loss=ppo_clip_loss,
            takes_own_log_probs=True,
            takes_token_kl=True,
            discounts=True,
            needs_whitening=True,
            clips_twice=True,
        ),
        Estimator(
            name="reinforce_plus_plus_baseline",
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262), the variant with a baseline",
            baseline=group_mean,
            divides_by_deviation=False,
            advantages=reinforce_plus_plus_baseline,
            loss=ppo_clip_loss,
            takes_own_log_probs=True,
            takes_token_kl=True,
            discounts=False,
            needs_whitening=True,
            clips_twice=True,
        ),
    )
}
