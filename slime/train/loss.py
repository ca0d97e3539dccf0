"""The loss of one micro-batch: `slime.algorithms` put together as the flags say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.corrections import Correction, off_policy_sequence_mask, truncated_importance_sampling
from slime.algorithms.kl import kl_estimate
from slime.algorithms.losses import POLICY_LOSSES, PolicyInputs, sft_loss
from slime.algorithms.reduce import sequence_mean, weighted_sum
from slime.config import Config
from slime.errors import UserError
from slime.hook_loading import load_function
from slime.train.records import LossInputs, TokenScores

Metrics = dict[str, Tensor]


@dataclass
class LossHooks:
    """The user's functions that take part in the loss, loaded once; ``args`` is their first argument."""

    args: Any
    loss: Callable[..., Any] | None = None
    tis: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    per_token: bool = False

    @staticmethod
    def load(config: Config) -> LossHooks:
        def find(path: str | None) -> Callable[..., Any] | None:
            return load_function(path) if path else None

        flags = config.algorithm
        return LossHooks(
            config.flat(),
            loss=find(flags.custom_loss_function_path),
            tis=find(flags.custom_tis_function_path),
            reducer=find(flags.custom_pg_loss_reducer_function_path),
            per_token=flags.calculate_per_token_loss,
        )


def micro_batch_loss(
    scores: TokenScores, inputs: LossInputs, config: Config, hooks: LossHooks
) -> tuple[Tensor, Metrics]:
    """This micro-batch's part of the step's loss, with gradient, and its part of each metric, without.

    A micro-batch without tokens gives a 0 that is connected to the model, so that its rank's backward pass runs and
    takes part in every collective. Functions of the user's are not called for it.
    """
    kind = config.algorithm.loss_type
    if kind == "sft_loss":
        loss = weighted_sum(sft_loss(scores.log_probs), inputs.weights)
        metrics: Metrics = {}
    elif kind == "custom_loss":
        loss, metrics = _custom_loss(scores, inputs, hooks)
    else:
        loss, metrics = _policy_loss(scores, inputs, config, hooks)
    if scores.log_probs.numel() == 0:
        loss = loss + scores.log_probs.sum()
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


def _policy_loss(scores: TokenScores, inputs: LossInputs, config: Config, hooks: LossHooks) -> tuple[Tensor, Metrics]:
    flags = config.algorithm
    log_probs, weights = scores.log_probs, inputs.weights
    old = inputs.old_log_probs if inputs.old_log_probs is not None else log_probs.detach()
    assert inputs.advantages is not None, "the policy loss runs after the advantages"
    policy = POLICY_LOSSES[flags.advantage_estimator](
        PolicyInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=inputs.advantages,
            masks=inputs.masks,
            lengths=inputs.lengths,
            eps_clip=flags.eps_clip,
            eps_clip_high=flags.eps_clip_high,
            eps_clip_c=flags.eps_clip_c,
        )
    )
    token_loss = policy.loss
    means = {"pg_clipfrac": policy.clipped, "ppo_kl": policy.ppo_kl}
    if flags.use_opsm:
        keep = off_policy_sequence_mask(
            log_probs, old, inputs.advantages, inputs.masks, inputs.lengths, flags.opsm_delta
        )
        token_loss = token_loss * keep
        means["opsm_clipfrac"] = 1.0 - keep
    if inputs.rollout_log_probs is not None:
        trained = log_probs.detach() if flags.use_rollout_logprobs else old
        means["train_rollout_logprob_abs_diff"] = (trained - inputs.rollout_log_probs).abs()
    if flags.use_tis or flags.get_mismatch_metrics:
        token_loss, weights, extra = _correct_mismatch(token_loss, old, inputs, config, hooks)
        means.update(extra, ois=torch.exp(-policy.ppo_kl.detach()))
    pg_loss = _reduce_policy_loss(token_loss, weights, inputs, hooks)
    loss, metrics = pg_loss, {"pg_loss": pg_loss}
    if scores.entropy is not None:
        entropy = weighted_sum(scores.entropy, inputs.weights)
        metrics["entropy_loss"] = entropy
        if flags.entropy_coef:
            loss = loss - flags.entropy_coef * entropy
    if flags.use_kl_loss:
        assert inputs.ref_log_probs is not None, "the KL loss runs after the reference's log-probs"
        ratio = log_probs - old if flags.use_unbiased_kl else None
        kl_loss = weighted_sum(kl_estimate(log_probs, inputs.ref_log_probs, flags.kl_loss_type, ratio), inputs.weights)
        metrics["kl_loss"] = kl_loss
        loss = loss + flags.kl_loss_coef * kl_loss
    return loss, {**metrics, **{name: weighted_sum(value, inputs.weights) for name, value in means.items()}}


def _correct_mismatch(
    token_loss: Tensor, old: Tensor, inputs: LossInputs, config: Config, hooks: LossHooks
) -> tuple[Tensor, Tensor, Metrics]:
    """Token losses and weights corrected for the difference between trainer and engine, and per-token metrics."""
    flags = config.algorithm
    if inputs.rollout_log_probs is None:
        raise UserError(
            "--use-tis and --get-mismatch-metrics need the engine's log-probs",
            why="the samples of this rollout carry none",
            fix="let the generate function fill rollout_log_probs (Sample.append_response_tokens does)",
        )
    trained = old if inputs.trained_log_probs is None else inputs.trained_log_probs
    if hooks.tis is not None and not inputs.samples:
        return token_loss, inputs.weights, {}
    if hooks.tis is None:
        corrected: Correction = truncated_importance_sampling(
            trained - inputs.rollout_log_probs, flags.tis_clip_low, flags.tis_clip
        )
        return token_loss * corrected.weights, inputs.weights, corrected.metrics
    lengths = inputs.lengths.tolist()
    new_loss, new_masks, metrics = hooks.tis(
        hooks.args,
        pg_loss=token_loss,
        train_log_probs=list(trained.split(lengths)),
        rollout_log_probs=list(inputs.rollout_log_probs.split(lengths)),
        loss_masks=list(inputs.masks.split(lengths)),
        total_lengths=inputs.total_lengths,
        response_lengths=lengths,
    )
    if not flags.use_tis:
        return token_loss, inputs.weights, metrics
    # a token that the user masks leaves the numerator; the denominators stay those of the batch
    weights = torch.where(torch.cat(list(new_masks)) != 0, inputs.weights, 0.0)
    return new_loss, weights, metrics


def _reduce_policy_loss(token_loss: Tensor, weights: Tensor, inputs: LossInputs, hooks: LossHooks) -> Tensor:
    if hooks.reducer is None or not inputs.samples:
        return weighted_sum(token_loss, weights)
    lengths = inputs.lengths.tolist()
    masks = list(inputs.masks.split(lengths))
    reduce = hooks.reducer(inputs.total_lengths, lengths, masks, hooks.per_token)
    return reduce(token_loss) * inputs.sample_weight


def _custom_loss(scores: TokenScores, inputs: LossInputs, hooks: LossHooks) -> tuple[Tensor, Metrics]:
    assert hooks.loss is not None, "--loss-type custom_loss is refused at launch without its function"
    if not inputs.samples:
        return scores.log_probs.sum(), {}
    lengths = inputs.lengths.tolist()

    def sum_of_sample_mean(values: Tensor) -> Tensor:
        """Flat [N] → sum over samples of each sample's mean over its trained tokens (per token: the plain sum)."""
        if hooks.per_token:
            return (values * inputs.masks).sum()
        means = sequence_mean(values, inputs.masks, inputs.lengths)
        first = (inputs.lengths.cumsum(0) - inputs.lengths)[inputs.lengths > 0]
        return means.index_select(0, first).sum()

    def per_sample(values: Tensor | None) -> list[Tensor] | None:
        return None if values is None else list(values.split(lengths))

    batch = {
        "sample_indices": inputs.samples,
        "response_lengths": lengths,
        "total_lengths": inputs.total_lengths,
        "loss_masks": per_sample(inputs.masks),
        "advantages": per_sample(inputs.advantages),
        "log_probs": per_sample(inputs.old_log_probs),
        "ref_log_probs": per_sample(inputs.ref_log_probs),
        "rollout_log_probs": per_sample(inputs.rollout_log_probs),
        "current_log_probs": per_sample(scores.log_probs),
    }
    loss, metrics = hooks.loss(hooks.args, batch, scores.logits, sum_of_sample_mean)
    scale = inputs.sample_weight
    return loss * scale, {name: torch.as_tensor(value) * scale for name, value in metrics.items()}
