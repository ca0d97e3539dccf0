"""One record per ``--advantage-estimator``: its baseline, divisor, advantages and loss.

    rewards ─ baseline, divisor ─► advantages ─► loss

To add an estimator, add a row to `ESTIMATORS` with functions for what is new, and a record with its
name and facts to `slime.config.estimators`. No field has a default.
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
from slime.algorithms.baseline import (
    Baseline,
    Divisor,
    group_deviation,
    group_mean,
    leave_one_out_mean,
    mean_reward,
)
from slime.algorithms.losses import (
    PolicyInputs,
    PolicyLoss,
    cispo_loss,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
)
from slime.config.estimators import FACTS, EstimatorFacts


@dataclass(frozen=True, kw_only=True)
class EstimatorWords:
    """Text about an estimator for docs/algorithms.md: the normalised reward of a sample, the
    advantage and the loss of a token, and when to choose the estimator."""

    reward: str
    advantage: str
    loss: str
    choose: str


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An algorithm of policy optimisation.

    Attributes:
        facts: name, and facts that flags depend on.
        paper: its source.
        baseline: rewards of a group → values to subtract; None: rewards are not normalised.
        divisor: rewards of a group → divisor of the centred rewards; None: no division.
        advantages: normalised rewards of a rollout → advantages and returns, one tensor [L_i] per
            sample.
        loss: log-probs and advantages of a micro-batch → loss per token, flat [T].
        words: text for docs/algorithms.md.
    """

    facts: EstimatorFacts
    paper: str
    baseline: Baseline | None
    divisor: Divisor | None
    advantages: Callable[[AdvantageInputs], Estimate]
    loss: Callable[[PolicyInputs], PolicyLoss]
    words: EstimatorWords


ESTIMATORS: dict[str, Estimator] = {
    row.facts.name: row
    for row in (
        Estimator(
            facts=FACTS["grpo"],
            paper="Shao et al., DeepSeekMath (arXiv:2402.03300), section 4.1",
            baseline=group_mean,
            divisor=group_deviation,
            advantages=grpo,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="minus the group's mean, over its deviation",
                advantage="the sample's reward",
                loss="clipped ratio",
                choose="the default; verifiable rewards, no critic",
            ),
        ),
        Estimator(
            facts=FACTS["dr_grpo"],
            paper="Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2",
            baseline=group_mean,
            divisor=None,
            advantages=grpo,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="minus the group's mean",
                advantage="the sample's reward",
                loss="clipped ratio",
                choose="answers that grow without getting better: no division by their length",
            ),
        ),
        Estimator(
            facts=FACTS["gspo"],
            paper="Zheng et al., Group Sequence Policy Optimization (arXiv:2507.18071), section 4",
            baseline=group_mean,
            divisor=group_deviation,
            advantages=grpo,
            loss=gspo_loss,
            words=EstimatorWords(
                reward="as GRPO",
                advantage="the sample's reward",
                loss="clipped ratio of the whole sequence",
                choose="models with experts, whose ratios of single tokens are noisy",
            ),
        ),
        Estimator(
            facts=FACTS["cispo"],
            paper="MiniMax, MiniMax-M1 (arXiv:2506.13585), section 3.1",
            baseline=group_mean,
            divisor=group_deviation,
            advantages=grpo,
            loss=cispo_loss,
            words=EstimatorWords(
                reward="as GRPO",
                advantage="the sample's reward",
                loss="clipped, constant weight times log-prob",
                choose="rare tokens that turn an answer around, which a clip would leave out",
            ),
        ),
        Estimator(
            facts=FACTS["sapo"],
            paper="Gao et al., Soft Adaptive Policy Optimization (arXiv:2511.20347)",
            baseline=group_mean,
            divisor=group_deviation,
            advantages=grpo,
            loss=sapo_loss,
            words=EstimatorWords(
                reward="as GRPO",
                advantage="the sample's reward",
                loss="soft gate of the ratio",
                choose="several optimizer steps per rollout: tokens fade out, none is cut off",
            ),
        ),
        Estimator(
            facts=FACTS["rloo"],
            paper="Ahmadian et al., Back to Basics (arXiv:2402.14740), section 3.2",
            baseline=leave_one_out_mean,
            divisor=None,
            advantages=grpo,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="minus the mean of the others",
                advantage="the sample's reward",
                loss="clipped ratio",
                choose="few samples per prompt: its baseline does not contain the sample itself",
            ),
        ),
        Estimator(
            facts=FACTS["maxrl"],
            paper="Maximum Likelihood Reinforcement Learning (arXiv:2602.02710)",
            baseline=group_mean,
            divisor=mean_reward,
            advantages=grpo,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="minus the group's mean, over the mean",
                advantage="the sample's reward",
                loss="clipped ratio",
                choose="hard prompts, rewards of 0 and 1: a success counts by one over its rate",
            ),
        ),
        Estimator(
            facts=FACTS["reinforce_plus_plus"],
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262)",
            baseline=None,
            divisor=None,
            advantages=reinforce_plus_plus,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="as it is",
                advantage="discounted return, KL inside, whitened",
                loss="clipped ratio",
                choose="one sample per prompt, no critic",
            ),
        ),
        Estimator(
            facts=FACTS["reinforce_plus_plus_baseline"],
            paper="Hu et al., REINFORCE++ (arXiv:2501.03262), the variant with a baseline",
            baseline=group_mean,
            divisor=None,
            advantages=reinforce_plus_plus_baseline,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="minus the group's mean",
                advantage="the sample's reward minus KL, whitened",
                loss="clipped ratio",
                choose="groups, with the KL in the reward",
            ),
        ),
        Estimator(
            facts=FACTS["ppo"],
            paper="Schulman et al., Proximal Policy Optimization (arXiv:1707.06347)",
            baseline=None,
            divisor=None,
            advantages=ppo,
            loss=ppo_clip_loss,
            words=EstimatorWords(
                reward="as it is",
                advantage="generalised advantage estimation by a critic, KL inside",
                loss="clipped ratio",
                choose="rewards inside of long trajectories; a second model to train",
            ),
        ),
    )
}
