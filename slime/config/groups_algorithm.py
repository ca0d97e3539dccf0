"""The group about the algorithm: loss, advantages, and corrections."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.estimators import FACTS, EstimatorName, estimators_where
from slime.config.flag import (
    DATA_LOSSES,
    POLICY_LOSS,
    SAMPLES,
    Interval,
    Part,
    at_least,
    derived,
    finite,
    flag,
    on,
    unless,
)
from slime.config.preferences import PREFERENCE_FACTS, PreferenceFacts, PreferenceName

_PENALTY = finite(0, "a penalty; below 0 it would reward leaving the reference model")
_CLIP = at_least(0, "a distance from the ratio 1")
_HAS_CLIP = unless(
    "advantage_estimator",
    *estimators_where("clips_ratio", False),
    why="its gate is soft; --sapo-tau-pos and --sapo-tau-neg set it",
)
_SAPO = on("advantage_estimator", "sapo")
_MEAN_IS_FREE = unless(
    "advantage_estimator",
    *estimators_where("sums_tokens"),
    why="its mean divides sums of token losses by --rollout-max-response-len",
)
_STEEPNESS = finite(0, "the steepness of a sigmoid", above=True)
_LOG_PROBS_DIFFER = unless(
    "use_rollout_logprobs",
    why="with the engine's log-probs as the old policy's there is no mismatch to correct",
)
_OWN_REWARDS = unless("custom_reward_post_process_path", why="it replaces the group's statistics")
_OWN_COLUMNS = unless(
    "custom_convert_samples_to_train_data_path",
    why="only that function can read it: the rewards are its own",
    warns=True,
)
#: Rewards are centred within their group, and divided by its standard deviation.
_CENTRED = (
    SAMPLES,
    _OWN_REWARDS,
    _OWN_COLUMNS,
    on(
        "advantage_estimator",
        *estimators_where("group_relative"),
        why="the other estimators do not compare rewards within a group",
        warns=True,
    ),
)
_DIVIDED = (
    SAMPLES,
    on(
        "advantage_estimator",
        *estimators_where("std_normalized"),
        why="the other estimators do not divide by it",
    ),
    unless("disable_rewards_normalization", why="raw rewards are divided by nothing", warns=True),
    _OWN_REWARDS,
    _OWN_COLUMNS,
)
_CUSTOM_MAY_READ = unless(
    "loss_type", "custom_loss", why="only the custom loss function can read it", warns=True
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Loss, advantages, and corrections between the sampling and the trained policy."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    loss_type: Literal["policy_loss", "sft_loss", "preference_loss", "custom_loss"] = flag(
        "policy_loss", read_by=("driver", "collection", "samples", "training")
    )
    """policy_loss for RL, sft_loss for supervised fine-tuning, preference_loss for pairs of answers
    (DPO and its kin, reward models), custom_loss for a function of your own."""
    preference_loss: PreferenceName = flag(
        "dpo",
        needs=on("loss_type", "preference_loss"),
        read_by=("driver", "collection", "samples", "training"),
    )
    """Loss on preferences: dpo, ipo, simpo, kto, or reward_model, which trains a model with one
    output, the reward."""
    custom_loss_function_path: str | None = flag(None, needs=on("loss_type", "custom_loss"))
    """Function (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), with --loss-type
    custom_loss."""
    advantage_estimator: EstimatorName = flag(
        "grpo", needs=SAMPLES, read_by=("samples", "training")
    )
    """How rewards become advantages."""
    disable_compute_advantages_and_returns: bool = flag(
        False,
        needs=(
            unless(
                "loss_type", "policy_loss", why="the policy loss weighs tokens by their advantages"
            ),
            unless("custom_advantage_function_path", why="it computes them"),
            unless("loss_type", *DATA_LOSSES, why="this loss has none", warns=True),
        ),
    )
    """Train without advantages (SFT, custom losses)."""
    custom_advantage_function_path: str | None = flag(None, needs=SAMPLES)
    """Function (args, rollout_data) that sets advantages and returns."""
    eps_clip: float = flag(0.2, range=_CLIP, needs=(SAMPLES, _CUSTOM_MAY_READ, _HAS_CLIP))
    """Lower clip range of the policy ratio, which is 1 in a rollout's first optimizer step (unless
    --use-rollout-logprobs)."""
    eps_clip_high: float = derived(
        "eps_clip", range=_CLIP, needs=(SAMPLES, _CUSTOM_MAY_READ, _HAS_CLIP)
    )
    """Upper clip range of the policy ratio."""
    eps_clip_c: float | None = flag(
        None,
        range=Interval(1, above=True, what="a ratio beyond the clip range"),
        needs=(
            SAMPLES,
            _CUSTOM_MAY_READ,
            unless(
                "advantage_estimator",
                *estimators_where("dual_clip", False),
                why="it has no clipped loss that could be bounded",
            ),
        ),
    )
    """Bound of dual-clip PPO, > 1."""
    sapo_tau_pos: float = flag(1.0, range=_STEEPNESS, needs=_SAPO)
    """Steepness of SAPO's gate for positive advantages: the higher, the faster a token's gradient
    decays with its ratio."""
    sapo_tau_neg: float = flag(1.05, range=_STEEPNESS, needs=_SAPO)
    """Steepness of SAPO's gate for negative advantages."""
    kl_coef: float = flag(
        0.0,
        range=_PENALTY,
        needs=(
            SAMPLES,
            unless(
                "advantage_estimator",
                *estimators_where("takes_token_kl", False),
                why="its advantage is the group-normalised reward alone; use --use-kl-loss "
                "--kl-loss-coef 0.01 --kl-loss-type low_var_kl",
            ),
        ),
    )
    """Coefficient of the KL penalty in the reward."""
    use_kl_loss: bool = flag(False, needs=SAMPLES)
    """Add a KL loss against the reference model (--ref-load)."""
    kl_loss_coef: float = flag(0.0, range=_PENALTY, needs=(on("use_kl_loss"), _CUSTOM_MAY_READ))
    """Coefficient of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = derived(
        "low_var_kl with use_kl_loss, else k1",
        needs=on("use_kl_loss", why="launch scripts keep it without the loss", warns=True)
        | on("kl_coef"),
    )
    """KL estimator (Schulman, http://joschu.net/blog/kl-approx.html). low_var_kl is k3, clamped. In
    the loss, the gradient of k1 has expectation 0 on policy; in the reward (--kl-coef), k1 is
    unbiased."""
    use_unbiased_kl: bool = flag(False, needs=(on("use_kl_loss"), _CUSTOM_MAY_READ))
    """Weight the KL estimator by the importance ratio."""
    entropy_coef: float = flag(
        0.0,
        range=Interval(-math.inf, below=True, above=True, what="a bonus, or a penalty below 0"),
        needs=(SAMPLES, _CUSTOM_MAY_READ),
    )
    """Coefficient of the entropy bonus."""
    gamma: float = flag(
        1.0,
        range=Interval(0, 1, what="a discount; above 1 returns would grow with the length"),
        needs=on("advantage_estimator", *estimators_where("discounts"))
        | on(
            "custom_advantage_function_path",
            why="every token of a sample has the sample's own reward; only "
            f"{' and '.join(estimators_where('discounts'))} discount",
        ),
    )
    """Discount per trained token (REINFORCE++, PPO); tokens of tool results are not counted."""
    normalize_advantages: bool = flag(
        False, needs=SAMPLES & unless("disable_compute_advantages_and_returns")
    )
    """Whiten advantages over the batch."""
    disable_grpo_std_normalization: bool = flag(False, needs=_DIVIDED, read_by="config")
    """Do not divide by the group's standard deviation (Dr. GRPO)."""
    grpo_std_normalization: bool = derived(
        "not disable_grpo_std_normalization, and n_samples_per_prompt > 1",
        needs=_DIVIDED,
        read_by="samples",
    )
    """The opposite of --disable-grpo-std-normalization, for hooks."""
    disable_rewards_normalization: bool = flag(False, needs=_CENTRED, read_by="config")
    """Use raw rewards, without the group mean."""
    rewards_normalization: bool = derived(
        "not disable_rewards_normalization", needs=_CENTRED, read_by="samples"
    )
    """The opposite of --disable-rewards-normalization, for hooks."""
    use_rollout_logprobs: bool = flag(False, needs=SAMPLES)
    """Take the engine's log-probs as the old policy's, instead of recomputing them."""
    use_tis: bool = flag(False, needs=POLICY_LOSS)
    """Truncated importance sampling between the engine's and the trainer's policy."""
    tis_clip: float = flag(
        2.0,
        range=Interval(0, above=True, what="an importance weight"),
        needs=on("use_tis") | on("get_mismatch_metrics"),
    )
    """Upper bound of the importance weight."""
    tis_clip_low: float = flag(
        0.0,
        range=finite(0, "an importance weight"),
        needs=on("use_tis") | on("get_mismatch_metrics"),
    )
    """Lower bound of the importance weight."""
    tis_mode: Literal["truncate", "icepop"] = flag(
        "truncate",
        needs=(on("use_tis"), unless("custom_tis_function_path", why="it replaces both")),
    )
    """A weight outside the bounds: truncate replaces it by the bound, icepop masks the token
    (published with bounds 0.5 and 5)."""
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token",
        needs=(
            on("use_tis"),
            unless("custom_tis_function_path", why="only that function can read it", warns=True),
        ),
    )
    """Importance weight per token, per sample (product over its trained tokens), or as the
    geometric mean over a sample's trained tokens."""
    use_rs: bool = flag(
        False,
        needs=(
            POLICY_LOSS,
            _LOG_PROBS_DIFFER,
            unless("custom_tis_function_path", why="only that function can read it", warns=True),
        ),
    )
    """Reject tokens or samples whose log-probs differ too much between trainer and engine: they are
    masked in the loss, whose denominators still count them."""
    rs_level: Literal["token", "sequence", "geometric"] = flag("token", needs=on("use_rs"))
    """token rejects single tokens by their ratios; sequence and geometric reject whole samples by
    the product or the geometric mean of their tokens' ratios."""
    rs_lower_bound: float = derived(
        "1 / rs_upper_bound", range=finite(0, "an importance ratio"), needs=on("use_rs")
    )
    """Reject below this ratio."""
    rs_upper_bound: float = flag(
        2.0, range=finite(0, "an importance ratio", above=True), needs=on("use_rs")
    )
    """Reject above this ratio (published for the geometric level: 1.001)."""
    rs_veto_threshold: float | None = flag(
        None,
        range=Interval(
            0, 1, above=True, below=True, what="an importance ratio, which is 1 without a mismatch"
        ),
        needs=on("use_rs"),
    )
    """Reject a sample with any trained token whose ratio is below this (published: 1e-4)."""
    custom_tis_function_path: str | None = flag(
        None, needs=on("use_tis") | on("get_mismatch_metrics")
    )
    """Function that replaces truncated importance sampling."""
    get_mismatch_metrics: bool = flag(False, needs=POLICY_LOSS)
    """Log the mismatch between engine and trainer as --custom-tis-function-path measures it,
    without correcting it."""
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, needs=(POLICY_LOSS, _MEAN_IS_FREE)
    )
    """Function that makes the reducer of the policy loss."""
    calculate_per_token_loss: bool = flag(
        False,
        needs=(
            _MEAN_IS_FREE,
            unless("loss_type", "preference_loss", why="preferences are averaged over pairs"),
        ),
    )
    """Average the loss over the tokens of a step, instead of over rollouts (CISPO: over groups)."""
    use_sampling_mask: bool = derived(
        "on with rollout_top_k, rollout_top_p or rollout_min_p, unless your function generates",
        needs=SAMPLES,
        read_by=("generation", "samples", "engine"),
    )
    """Compute log-probs over only the tokens that top-k, top-p and min-p allow, in both engine and
    trainer."""
    use_opsm: bool = flag(False, needs=POLICY_LOSS)
    """Off-policy sequence masking: from a rollout's second optimizer step on, or in all with
    --use-rollout-logprobs."""
    opsm_delta: float = flag(1e-4, range=at_least(0, "a KL divergence"), needs=on("use_opsm"))
    """Sequence KL above which a sample with negative advantage is masked."""

    @property
    def needs_reference(self) -> bool:
        """A reference model is needed, by the KL loss, the KL penalty in the reward, or a
        preference loss."""
        preference = self.preference
        if preference is not None:
            return preference.needs_reference
        return not self.trains_on_data and (self.use_kl_loss or self.kl_coef != 0)

    @property
    def averages_tokens(self) -> bool:
        """Losses and metrics of a step are averaged over its trained tokens."""
        return self.calculate_per_token_loss or self.sums_tokens

    @property
    def sums_tokens(self) -> bool:
        """Token losses of a trajectory are summed and divided by a constant
        (`slime.config.estimators.EstimatorFacts.sums_tokens`)."""
        return self.loss_type == "policy_loss" and FACTS[self.advantage_estimator].sums_tokens

    @property
    def needs_critic(self) -> bool:
        """Advantages come from the values of a critic, which is trained beside the policy."""
        return not self.trains_on_data and FACTS[self.advantage_estimator].needs_critic

    @property
    def trains_on_data(self) -> bool:
        """Training uses the answers in the data; nothing is generated for it."""
        return self.loss_type in DATA_LOSSES

    @property
    def preference(self) -> PreferenceFacts | None:
        """Facts about the preference loss; None with another --loss-type."""
        if self.loss_type != "preference_loss":
            return None
        return PREFERENCE_FACTS[self.preference_loss]

    @property
    def trains_reward_model(self) -> bool:
        """The trained model has one output, the reward, in place of the vocabulary."""
        return self.preference is not None and self.preference.trains_head
