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
    """Text about an estimator for docs/algorithms.md, which defines the symbols.

    Attributes:
        goal: one row of the chooser.
        reward: formula of r_i, the normalised reward of sample i.
        advantage: formula of A_t, the advantage of a token.
        loss: formula of ℓ_t, the loss of a token.
        choose: when to use it, in sentences.
    """

    goal: str
    reward: str
    advantage: str
    loss: str
    choose: str


_CLIPPED = "−min(ρ_t A_t, clip(ρ_t) A_t)"


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
                goal="verifiable rewards, no critic: the default",
                reward="(R_i − μ) / (σ + 1e-6)",
                advantage="r_i",
                loss=_CLIPPED,
                choose=(
                    "Start with it unless you have a reason not to. It needs several samples "
                    "per prompt; a group whose rewards are all equal contributes no gradient."
                ),
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
                goal="responses grow longer without getting better",
                reward="R_i − μ",
                advantage="r_i",
                loss=_CLIPPED,
                choose=(
                    "GRPO divides by the length of a response, so long wrong responses are "
                    "penalised less per token. Dr. GRPO divides by a constant, and does not "
                    "divide rewards by σ."
                ),
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
                goal="mixture-of-experts models, noisy token ratios",
                reward="(R_i − μ) / (σ + 1e-6)",
                advantage="r_i",
                loss=(
                    "−min(ρ A_t, clip(ρ) A_t), ρ = exp(mean over trained tokens of log π − "
                    "log π_old)"
                ),
                choose=(
                    "All tokens of a response share one ratio. It is much closer to 1 than "
                    "that of a token, so clip ranges are much smaller: the paper "
                    "clips to 1 − 3e-4 and 1 + 4e-4."
                ),
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
                goal="keep the gradient of rare, decisive tokens",
                reward="(R_i − μ) / (σ + 1e-6)",
                advantage="r_i",
                loss="−stop_gradient(clip(ρ_t)) A_t log π_t",
                choose=(
                    "PPO's clip removes the gradient of clipped tokens. Here only the weight "
                    "is clipped, so every token keeps a gradient. `--eps-clip 1` or more "
                    "leaves the lower side open, as in the paper."
                ),
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
                goal="several optimizer steps per rollout",
                reward="(R_i − μ) / (σ + 1e-6)",
                advantage="r_i",
                loss="−(4 / τ) sigmoid(τ (ρ_t − 1)) A_t, τ = τ_pos if A_t > 0, else τ_neg",
                choose=(
                    "The gradient of a token decays smoothly as its ratio leaves 1, instead "
                    "of stopping at a clip."
                ),
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
                goal="few samples per prompt",
                reward="R_i − mean of the other rewards of the group",
                advantage="r_i",
                loss=_CLIPPED,
                choose=(
                    "The baseline of a sample does not contain the sample itself, so it is "
                    "unbiased at any group size."
                ),
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
                goal="hard prompts with rewards of 0 and 1",
                reward="(R_i − μ) / (μ + 1e-6)",
                advantage="r_i",
                loss=_CLIPPED,
                choose=(
                    "Successes on prompts that are rarely solved count more: a success has "
                    "weight 1 / success rate. A reward below 0 is an error, because rewards "
                    "are divided by their mean."
                ),
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
                goal="one sample per prompt, no critic",
                reward="R_i",
                advantage=(
                    "Σ over trained tokens s ≥ t of γ^(s−t) (−kl_coef · kl_s + r_i if s is "
                    "the last), whitened"
                ),
                loss=_CLIPPED,
                choose=(
                    "It compares no samples of one prompt, so one sample per prompt is "
                    "enough. Reward functions may give each token or turn its own reward."
                ),
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
                goal="groups, with the KL penalty in the reward",
                reward="R_i − μ",
                advantage="r_i − kl_coef · kl_t, whitened",
                loss=_CLIPPED,
                choose="The variant of REINFORCE++ for several samples per prompt.",
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
                goal="rewards inside long trajectories; you can afford a second model",
                reward="R_i",
                advantage="generalised advantage estimation with a critic",
                loss=_CLIPPED,
                choose=(
                    "A critic estimates the value of each token. [PPO and its "
                    "critic](#ppo-and-its-critic) has equations and flags."
                ),
            ),
        ),
    )
}
