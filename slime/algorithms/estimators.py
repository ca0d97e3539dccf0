"""One record per ``--advantage-estimator``: everything that makes an algorithm, in one row.

    rewards ─ baseline, scale ─► advantages ─► loss

A new one is a function for what is new about it and a row in `ESTIMATORS`; its name and its facts,
from which the flags follow, are a record in `slime.config.estimators`. No fact has a default: a row
that leaves one out cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.algorithms.advantages import (
    AdvantageInputs,
    Estimate,
    grpo,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from slime.algorithms.baseline import Baseline, group_mean
from slime.algorithms.losses import PolicyInputs, PolicyLoss, cispo_loss, gspo_loss, ppo_clip_loss
from slime.config.estimators import FACTS, EstimatorFacts


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An algorithm of policy optimisation.

    Attributes:
        facts: what the flags know of it, its name in the first place.
        paper: where it comes from.
        baseline: what a reward loses, by the rewards of its group; None: rewards go in as they are.
        advantages: normalised rewards of a rollout → advantages and returns, one tensor [L_i] per
            sample.
        loss: log-probs and advantages of a micro-batch → loss per token, flat [T].
    """

    facts: EstimatorFacts
    paper: str
    baseline: Baseline | None
    advantages: Callable[[AdvantageInputs], Estimate]
    loss: Callable[[PolicyInputs], PolicyLoss]


ESTIMATORS: dict[str, Estimator] = {
    row.facts.name: row
    for row in (
        Estimator(
            facts=FACTS["grpo"],
            paper="Shao et al., DeepSeekMath (arXiv:2402.03300), section 4.1",
            baseline=group_mean,
            advantages=grpo,
            loss=ppo_clip_loss,
        ),
        Estimator(
            facts=FACTS["gspo"],
            paper="Zheng et al., Group Sequence Policy Optimization (arXiv:2507.18071), section 4",
            baseline=group_mean,
            advantages=grpo,
            loss=gspo_loss,
        ),
        Estimator(
            facts=FACTS["cispo"],
            paper="MiniMax, MiniMax-M1 (arXiv:2506.13585), section 3.1",
            baseline=group_mean,
            advantages=grpo,
            loss=cispo_loss,
        ),
        Estimator(
            facts=FACTS["reinforce_plus_plus"],
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262)",
            baseline=None,
            advantages=reinforce_plus_plus,
            loss=ppo_clip_loss,
        ),
        Estimator(
            facts=FACTS["reinforce_plus_plus_baseline"],
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262), the variant with a baseline",
            baseline=group_mean,
            advantages=reinforce_plus_plus_baseline,
            loss=ppo_clip_loss,
        ),
        Estimator(
            facts=FACTS["ppo"],
            paper="Schulman et al., Proximal Policy Optimization (arXiv:1707.06347)",
            baseline=None,
            advantages=ppo,
            loss=ppo_clip_loss,
        ),
    )
}
