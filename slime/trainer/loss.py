"""The loss of one micro-batch, composed from `slime.algorithms` according to the flags."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from slime.algorithms.divergence import DivergenceKind, top_divergence
from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.kl import kl_estimate
from slime.algorithms.losses import (
    PolicyInputs,
    icepop,
    importance_ratio,
    log_ratio_at,
    off_policy_sequence_mask,
    rejection_mask,
    sft_loss,
    truncated_importance_sampling,
)
from slime.algorithms.preferences import PREFERENCES, PreferenceInputs, sequence_scores
from slime.algorithms.reduce import weighted_sum
from slime.algorithms.values import clipped_value_loss
from slime.config.config import Config
from slime.config.groups_algorithm import AlgorithmConfig
from slime.errors import UserError
from slime.trainer.records import LossInputs, TokenScores, TokenValues
from slime.trainer.user_functions import LOSS, REDUCER, TIS, UserFunctions
from slime.trainer.validate_hook_output import (
    UserValues,
    check_summed,
    corrected_loss,
    loss_and_metrics,
    mismatch_metrics,
    reduced_loss,
    tell_unless_sum,
)
from slime.user_code.loading import named

Metrics = dict[str, Tensor]


def micro_batch_loss(
    kind: LossType,
    scores: TokenScores | TokenValues,
    inputs: LossInputs,
    config: Config,
    functions: UserFunctions,
) -> tuple[Tensor, Metrics]:
    """Return this micro-batch's share of the step's loss, with gradient, and of its metrics.

    The loss of a micro-batch without tokens is a 0 that is connected to the model, so that the
    backward pass of its rank takes part in every collective. The user's functions are not called
    for it.
    """
    loss, metrics = kind.compute(scores, inputs, config, functions)
    if scores.per_token.numel() == 0:
        loss = loss + scores.per_token.sum()
    return loss, {
        **{name: value.detach() for name, value in metrics.items()},
        "loss": loss.detach(),
    }


# -- supervised ------------------------------------------------------------------------------------


def _sft_loss(
    scores: TokenScores, inputs: LossInputs, config: Config, functions: UserFunctions
) -> tuple[Tensor, Metrics]:
    return weighted_sum(sft_loss(scores.log_probs), inputs.weights), {}


# -- preferences -----------------------------------------------------------------------------------


def _preference_loss(
    scores: TokenScores | TokenValues, inputs: LossInputs, config: Config, functions: UserFunctions
) -> tuple[Tensor, Metrics]:
    """Return loss and metrics; metrics of answers are means over the chosen or the rejected ones,
    others over pairs."""
    labels = inputs.preferences
    assert labels is not None, "samples without labels are refused when they are packed"
    flags = config.preference
    found = sequence_scores(scores.per_token, inputs.ref_log_probs, inputs.masks, inputs.lengths)
    chosen = found.pick(labels.chosen)
    rejected = found.pick(labels.rejected)
    algorithm = PREFERENCES[config.algorithm.preference_loss]
    outcome = algorithm.loss(
        PreferenceInputs(
            chosen,
            rejected,
            beta=flags.preference_beta,
            label_smoothing=flags.preference_label_smoothing,
            simpo_gamma=flags.simpo_gamma,
            desirable_weight=flags.kto_desirable_weight,
            undesirable_weight=flags.kto_undesirable_weight,
            kl=labels.step.kl,
            center_coef=flags.reward_center_coef,
        )
    )
    weight = inputs.sample_weight  # of a pair, or of a labelled answer
    loss = outcome.loss.sum() * weight
    metrics = {"preference_loss": loss}
    for kind, answers, rewards, number in (
        ("chosen", chosen, outcome.chosen_rewards, labels.step.num_chosen),
        ("rejected", rejected, outcome.rejected_rewards, labels.step.num_rejected),
    ):
        if number:  # a step of labelled answers may lack a kind
            metrics[f"{kind}_rewards"] = rewards.sum() / number
            if not algorithm.facts.trains_head:
                metrics[f"{kind}_log_probs"] = answers.sums.sum() / number
    if {"chosen_rewards", "rejected_rewards"} <= metrics.keys():
        metrics["reward_margin"] = metrics["chosen_rewards"] - metrics["rejected_rewards"]
    if algorithm.facts.takes_pairs:
        right = (outcome.chosen_rewards > outcome.rejected_rewards).sum()
    else:
        zero_point = flags.preference_beta * labels.step.kl
        right = (outcome.chosen_rewards > zero_point).sum()
        right = right + (outcome.rejected_rewards < zero_point).sum()
        metrics["kto_kl"] = loss.new_tensor(zero_point * len(inputs.samples) * weight)
    metrics["reward_accuracy"] = right * weight
    if flags.preference_sft_coef:
        sft = -chosen.means.sum() / max(labels.step.num_chosen, 1.0)
        metrics["chosen_nll"] = sft
        loss = loss + flags.preference_sft_coef * sft
    return loss, metrics


# -- critic ----------------------------------------------------------------------------------------


def _value_loss(
    scores: TokenValues, inputs: LossInputs, config: Config, functions: UserFunctions
) -> tuple[Tensor, Metrics]:
    assert inputs.value_outputs is not None and inputs.value_targets is not None
    found = clipped_value_loss(
        scores.values, inputs.value_outputs, inputs.value_targets, config.critic.value_clip
    )
    loss = weighted_sum(found.loss, inputs.weights)
    return loss, {
        "value_loss": loss,
        "value_clipfrac": weighted_sum(found.clipped, inputs.weights),
    }


# -- policy ----------------------------------------------------------------------------------------


def _policy_loss(
    scores: TokenScores, inputs: LossInputs, config: Config, functions: UserFunctions
) -> tuple[Tensor, Metrics]:
    flags = config.algorithm
    log_probs = scores.log_probs
    weights = inputs.weights
    masks = inputs.masks
    old = inputs.old_log_probs if inputs.old_log_probs is not None else log_probs.detach()
    assert inputs.advantages is not None, (
        "an update without advantages is refused before its first step"
    )
    policy = ESTIMATORS[flags.advantage_estimator].loss(
        PolicyInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=inputs.advantages,
            masks=masks,
            lengths=inputs.lengths,
            eps_clip=flags.eps_clip,
            eps_clip_high=flags.eps_clip_high,
            eps_clip_c=flags.eps_clip_c,
            sapo_tau_pos=flags.sapo_tau_pos,
            sapo_tau_neg=flags.sapo_tau_neg,
        )
    )
    token_loss = policy.loss
    means = {"pg_clipfrac": policy.clipped, "ppo_kl": policy.ppo_kl}
    if flags.use_opsm:
        keep = off_policy_sequence_mask(
            log_probs, old, inputs.advantages, masks, inputs.lengths, flags.opsm_delta
        )
        token_loss = token_loss * keep
        means["opsm_clipfrac"] = 1.0 - keep
    if inputs.rollout_log_probs is not None:
        trained = log_probs.detach() if flags.use_rollout_logprobs else old
        means["train_rollout_logprob_abs_diff"] = (trained - inputs.rollout_log_probs).abs()
    if flags.use_tis or flags.use_rs or flags.get_mismatch_metrics:
        taken = {"loss", "pg_loss", "entropy_loss", "kl_loss", "ois", *means}
        token_loss, masks, extra = _correct_mismatch(
            token_loss, old, inputs, config, functions, taken
        )
        # a token that the user masks leaves the numerator; the batch's denominators stay
        weights = torch.where(masks != 0, weights, 0.0)
        means.update(extra, ois=importance_ratio(-policy.ppo_kl))
    pg_loss = _reduce_policy_loss(token_loss, weights, masks, inputs, config, functions)
    loss = pg_loss
    metrics = {"pg_loss": pg_loss}
    if scores.entropy is not None:
        entropy = weighted_sum(scores.entropy, inputs.weights)
        metrics["entropy_loss"] = entropy
        if flags.entropy_coef:
            loss = loss - flags.entropy_coef * entropy
    if flags.use_kl_loss:
        assert inputs.ref_log_probs is not None, "the KL loss runs after the reference's log-probs"
        ratio = log_probs - old if flags.use_unbiased_kl else None
        kl_loss = weighted_sum(
            kl_estimate(log_probs, inputs.ref_log_probs, flags.kl_loss_type, ratio), inputs.weights
        )
        metrics["kl_loss"] = kl_loss
        loss = loss + flags.kl_loss_coef * kl_loss
    if config.distillation.in_loss:
        opd_loss = weighted_sum(_from_teacher(scores, inputs, config), inputs.weights)
        metrics["opd_loss"] = opd_loss
        loss = loss + config.distillation.opd_kl_coef * opd_loss
    return loss * inputs.loss_scale, {
        **metrics,
        **{name: weighted_sum(value, inputs.weights) for name, value in means.items()},
    }


def _from_teacher(scores: TokenScores, inputs: LossInputs, config: Config) -> Tensor:
    """Return the divergence [N] of each token's distribution from its teacher's, with gradient."""
    flags = config.distillation
    assert scores.vocabulary is not None and inputs.teacher is not None
    kind = cast(DivergenceKind, flags.opd_loss)
    top = inputs.teacher.top
    if top is None:
        return scores.vocabulary.divergence(inputs.teacher.rows, kind, flags.opd_jsd_beta)
    own = scores.vocabulary.log_probs_at(top.ids)
    return top_divergence(own, top.log_probs.to(own.dtype), kind, beta=flags.opd_jsd_beta)


def _correct_mismatch(
    token_loss: Tensor,
    old: Tensor,
    inputs: LossInputs,
    config: Config,
    functions: UserFunctions,
    taken: Collection[str],
) -> tuple[Tensor, Tensor, Metrics]:
    """Correct token losses and masks for the difference between trainer and engine; the per-token
    metrics, also returned, must not have names in ``taken``."""
    flags = config.algorithm
    if inputs.rollout_log_probs is None:
        raise UserError(
            "--use-tis, --use-rs and --get-mismatch-metrics need the engine's log-probs",
            why="the samples of this rollout carry none",
            fix="let the generate function fill rollout_log_probs (Sample.append_response_tokens "
            "does)",
        )
    trained = old if inputs.trained_log_probs is None else inputs.trained_log_probs
    if functions.tis is None:
        log_ratio = trained - inputs.rollout_log_probs
        return _weigh_and_reject(token_loss, log_ratio, inputs, flags)
    if not inputs.samples:
        return token_loss, inputs.masks, {}
    lengths = inputs.lengths.tolist()
    origin = named(str(flags.custom_tis_function_path), TIS)
    given = UserValues(token_loss)
    returned = functions.tis(
        functions.args,
        pg_loss=token_loss,
        train_log_probs=list(trained.split(lengths)),
        rollout_log_probs=list(inputs.rollout_log_probs.split(lengths)),
        loss_masks=list(inputs.masks.split(lengths)),
        total_lengths=inputs.total_lengths,
        response_lengths=lengths,
    )
    metrics = mismatch_metrics(returned, token_loss, taken, origin)
    if not flags.use_tis:
        return token_loss, inputs.masks, metrics
    return *corrected_loss(returned, given, token_loss, inputs, origin), metrics


def _weigh_and_reject(
    token_loss: Tensor, log_ratio: Tensor, inputs: LossInputs, flags: AlgorithmConfig
) -> tuple[Tensor, Tensor, Metrics]:
    masks = inputs.masks
    metrics: Metrics = {}
    if flags.use_tis:
        at_level = log_ratio_at(flags.tis_level, log_ratio, masks, inputs.lengths)
        correct = icepop if flags.tis_mode == "icepop" else truncated_importance_sampling
        corrected = correct(at_level, flags.tis_clip_low, flags.tis_clip)
        token_loss = token_loss * corrected.weights
        metrics |= corrected.metrics
    if flags.use_rs:
        rejection = rejection_mask(
            log_ratio,
            masks,
            inputs.lengths,
            flags.rs_level,
            flags.rs_lower_bound,
            flags.rs_upper_bound,
            flags.rs_veto_threshold,
        )
        masks = masks * rejection.keep
        metrics |= rejection.metrics
    return token_loss, masks, metrics


def _reduce_policy_loss(
    token_loss: Tensor,
    weights: Tensor,
    masks: Tensor,
    inputs: LossInputs,
    config: Config,
    functions: UserFunctions,
) -> Tensor:
    """Reduce the loss of each token; ``masks`` [T] are those after any correction."""
    if functions.reducer is None or not inputs.samples:
        return weighted_sum(token_loss, weights)
    lengths = inputs.lengths.tolist()
    per_token = config.algorithm.calculate_per_token_loss
    origin = named(str(config.algorithm.custom_pg_loss_reducer_function_path), REDUCER)
    given = UserValues(token_loss)
    make = functions.reducer
    reduce = make(inputs.total_lengths, lengths, list(masks.split(lengths)), per_token)
    with given.without_backward(origin):
        returned = reduce(token_loss)
    loss = reduced_loss(returned, given, masks, origin)

    def alone(position: int) -> Any:
        at = _tokens_of(inputs, position)
        of_sample = make(
            inputs.total_lengths[position : position + 1],
            lengths[position : position + 1],
            [masks[at]],
            per_token,
        )
        return of_sample(token_loss[at].detach())

    if functions.compares(REDUCER, inputs.lengths, config):
        tell_unless_sum(loss, alone, len(lengths), origin)
    return loss * inputs.sample_weight


# -- the user's own --------------------------------------------------------------------------------


def _custom_loss(
    scores: TokenScores, inputs: LossInputs, config: Config, functions: UserFunctions
) -> tuple[Tensor, Metrics]:
    """Call the user's `slime.user_code.hooks.LossFunction`, and check what it returns."""
    assert functions.loss is not None, (
        "--loss-type custom_loss is refused at launch without its function"
    )
    if not inputs.samples:
        return scores.log_probs.sum(), {}
    function = functions.loss
    origin = named(str(config.algorithm.custom_loss_function_path), LOSS)
    given = UserValues(scores.log_probs, scores.logits)

    def call(log_probs: Tensor, logits: Tensor | None, inputs: LossInputs) -> Any:
        def sum_of_sample_mean(values: Tensor) -> Tensor:
            """Sum, over trajectories, the mean of ``values`` [T] over each one's trained tokens,
            as far as they are in this micro-batch. With --calculate-per-token-loss: the plain sum
            over trained tokens."""
            check_summed(values, inputs.masks, origin)
            return weighted_sum(values, inputs.weights) / inputs.sample_weight

        return function(functions.args, _batch_of(log_probs, inputs), logits, sum_of_sample_mean)

    def alone(position: int) -> Any:
        own = _of_sample(inputs, position)
        at = _tokens_of(inputs, position)
        logits = None if scores.logits is None else scores.logits[at].detach()
        return call(scores.log_probs[at].detach(), logits, own)[0]

    with given.without_backward(origin):
        returned = call(scores.log_probs, scores.logits, inputs)
    loss, metrics = loss_and_metrics(returned, given, inputs.masks, origin)
    if functions.compares(LOSS, inputs.lengths, config):
        tell_unless_sum(loss, alone, len(inputs.samples), origin)
    return loss * inputs.sample_weight, {
        name: value * inputs.sample_weight for name, value in metrics.items()
    }


def _batch_of(log_probs: Tensor, inputs: LossInputs) -> dict[str, Any]:
    """Return the ``batch`` of a loss function."""
    lengths = inputs.lengths.tolist()

    def per_sample(values: Tensor | None) -> list[Tensor] | None:
        return None if values is None else list(values.split(lengths))

    return {
        "sample_indices": inputs.sample_indices,
        "response_lengths": lengths,
        "total_lengths": inputs.total_lengths,
        "loss_masks": per_sample(inputs.masks),
        "advantages": per_sample(inputs.advantages),
        "log_probs": per_sample(inputs.old_log_probs),
        "ref_log_probs": per_sample(inputs.ref_log_probs),
        "rollout_log_probs": per_sample(inputs.rollout_log_probs),
        "current_log_probs": per_sample(log_probs),
    }


def _tokens_of(inputs: LossInputs, position: int) -> slice:
    """Return the place of a sample's response tokens in flat tensors."""
    start = int(inputs.lengths[:position].sum())
    return slice(start, start + int(inputs.lengths[position]))


def _of_sample(inputs: LossInputs, position: int) -> LossInputs:
    """Return what the user's functions get of one sample."""
    at = _tokens_of(inputs, position)

    def part(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[at]

    one = slice(position, position + 1)
    return replace(
        inputs,
        samples=inputs.samples[one],
        sample_indices=inputs.sample_indices[one],
        lengths=inputs.lengths[one],
        total_lengths=inputs.total_lengths[one],
        masks=inputs.masks[at],
        weights=inputs.weights[at],
        advantages=part(inputs.advantages),
        old_log_probs=part(inputs.old_log_probs),
        ref_log_probs=part(inputs.ref_log_probs),
        rollout_log_probs=part(inputs.rollout_log_probs),
    )


# -- which there are -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossType:
    """A ``--loss-type``: its function and the inputs that must be computed for it. No field has a
    default: an entry sets all of them, or replaces some of another entry's.

    Attributes:
        compute: the loss of a micro-batch; see `micro_batch_loss`.
        takes_advantages: advantages are computed for it.
        needs_advantages: it cannot be computed without advantages.
        takes_old_log_probs: log-probs of the policy before the rollout's first step are computed.
        reuses_train_logprobs: if the rollout has one step, the log-probs of the step's own forward
            pass may replace the old ones.
        at_sampling_temperature: log-probs are taken at the sampling temperature, not at 1.
        takes_entropy: the entropy of each token's distribution is computed.
        takes_logits: it receives the logits [N, V / tp].
    """

    compute: Callable[[Any, LossInputs, Config, UserFunctions], tuple[Tensor, Metrics]]
    takes_advantages: bool
    needs_advantages: bool
    takes_old_log_probs: bool
    reuses_train_logprobs: bool
    at_sampling_temperature: bool
    takes_entropy: bool
    takes_logits: bool


_POLICY_LOSS = LossType(
    compute=_policy_loss,
    takes_advantages=True,
    needs_advantages=True,
    takes_old_log_probs=True,
    reuses_train_logprobs=True,
    at_sampling_temperature=True,
    takes_entropy=True,
    takes_logits=False,
)
#: Needs only the model's own log-probs.
_SFT_LOSS = LossType(
    compute=_sft_loss,
    takes_advantages=False,
    needs_advantages=False,
    takes_old_log_probs=False,
    reuses_train_logprobs=False,
    at_sampling_temperature=False,
    takes_entropy=False,
    takes_logits=False,
)

LOSS_TYPES: dict[str, LossType] = {
    "policy_loss": _POLICY_LOSS,
    "sft_loss": _SFT_LOSS,
    "preference_loss": replace(_SFT_LOSS, compute=_preference_loss),
    "custom_loss": replace(
        _POLICY_LOSS,
        compute=_custom_loss,
        needs_advantages=False,
        reuses_train_logprobs=False,
        takes_entropy=False,
        takes_logits=True,
    ),
}

#: The loss of a critic, whichever of the above trains the policy.
VALUE_LOSS = replace(_SFT_LOSS, compute=_value_loss)
