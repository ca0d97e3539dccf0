"""Metrics of an update: sums over micro-batches, token means of the rollout's tensors, means over
optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.distillation import sampled_reverse_kl
from slime.algorithms.kl import kl_estimate
from slime.algorithms.reduce import token_weights, weighted_sum
from slime.config.config import Config
from slime.samples.batch import TrainBatch, TrainedTokens
from slime.trainer.ranks import Ranks
from slime.trainer.records import MicroBatchResult, RolloutTensors

#: Metrics that compare the policy *before* the rollout's first step with the engine.
_BEFORE_TRAINING = frozenset({"train/train_rollout_logprob_abs_diff"})
_LEARNING_RATES = ("train/lr-", "train/critic-lr-")


def sum_metrics(
    config: Config, ranks: Ranks, results: Sequence[MicroBatchResult]
) -> dict[str, float]:
    """Sum the metrics, which are already weighted, over micro-batches and ranks. Collective."""
    flags = config.algorithm
    names = sorted({name for result in results for name in result.metrics})
    # a rank without samples does not know the names of the user's metrics
    if flags.custom_loss_function_path or flags.custom_tis_function_path:
        names = ranks.union(names)
    if not ranks.has_output:
        return {}
    zero = torch.zeros((), device=ranks.device)
    table = torch.stack(
        [torch.stack([r.metrics.get(name, zero).float() for name in names]) for r in results]
    )
    sums = ranks.sum_over_replicas(table.sum(dim=0).to(ranks.device))
    return dict(zip(names, sums.tolist()))


def token_means(
    config: Config, ranks: Ranks, batch: TrainBatch, data: RolloutTensors
) -> dict[str, float]:
    """Return the token means of the rollout's tensors, weighted as in the loss.

    If log-probs are known only for the first step's samples (`RolloutTensors.before_training`),
    their mean is over these.
    """
    if not ranks.has_output:
        return {}
    weights = _weights(config, ranks, batch, data, None)
    columns = {
        "rollout/ref_log_probs": data.ref_log_probs,
        "rollout/rollout_log_probs": data.rollout_log_probs,
        "rollout/advantages": data.advantages,
        "rollout/returns": data.returns,
        "rollout/values": data.values,
        "rollout/kl": _kl_to_reference(config, data),
    }
    sums = {
        name: _weighted_sum(values, weights)
        for name, values in columns.items()
        if values is not None
    }
    if data.log_probs is not None:
        sums["rollout/log_probs"] = _weighted_sum(
            data.log_probs, _weights(config, ranks, batch, data, data.before_training)
        )
    if not sums:
        return {}
    totals = ranks.sum_over_replicas(torch.stack(list(sums.values())).float())
    return dict(zip(sums, totals.tolist()))


def old_log_probs(config: Config, data: RolloutTensors) -> list[Tensor] | None:
    """Return the log-probs of the policy that generated the rollout, by engine or trainer."""
    return data.rollout_log_probs if config.algorithm.use_rollout_logprobs else data.log_probs


def _kl_to_reference(config: Config, data: RolloutTensors) -> list[Tensor] | None:
    """Return the KL estimate of each token, also where only the loss has a KL penalty."""
    old = old_log_probs(config, data)
    if old is None or data.ref_log_probs is None or config.algorithm.preference is not None:
        return None
    kind = config.algorithm.kl_loss_type
    return [kl_estimate(lp, ref, kind) for lp, ref in zip(old, data.ref_log_probs)]


def distillation_metrics(
    config: Config, ranks: Ranks, batch: TrainBatch, data: RolloutTensors
) -> dict[str, float]:
    """Compare the log-probs of the sampled tokens with the teacher's, before training; see
    `slime.algorithms.distillation.sampled_reverse_kl`. Collective."""
    teacher = None if data.teacher is None else data.teacher.log_probs
    old = old_log_probs(config, data)
    if not ranks.has_output or teacher is None or old is None:
        return {}
    weights = _weights(config, ranks, batch, data, data.before_training)
    apart = sampled_reverse_kl(old, teacher)
    columns = {
        "reverse_kl": apart,
        "prefers_ratio": [d < 0 for d in apart],
        "first_quarter_reverse_kl": [d * _quarter(d, 0) for d in apart],
        "last_quarter_reverse_kl": [d * _quarter(d, 3) for d in apart],
    }
    sums = {name: _weighted_sum(values, weights) for name, values in columns.items()}
    for number, name in ((0, "first"), (3, "last")):
        share = _weighted_sum([_quarter(d, number) for d in apart], weights)
        sums[f"{name}_share"] = share
    totals = dict(
        zip(sums, ranks.sum_over_replicas(torch.stack(list(sums.values())).float()).tolist())
    )
    for name in ("first", "last"):
        share = totals.pop(f"{name}_share")
        totals[f"{name}_quarter_reverse_kl"] /= share or 1.0
    return {f"rollout/opd_{name}": value for name, value in totals.items()}


def _quarter(values: Tensor, number: int) -> Tensor:
    """Return a mask of the response tokens that are in quarter ``number`` of the response."""
    places = torch.arange(values.numel(), device=values.device)
    return (places * 4).div(values.numel(), rounding_mode="floor") == number


def _weighted_sum(values: list[Tensor], weights: Tensor) -> Tensor:
    """Sum per-sample tensors with flat weights; 0 on a rank without samples."""
    return weighted_sum(torch.cat(values), weights) if values else weights.new_zeros(())


def _weights(
    config: Config, ranks: Ranks, batch: TrainBatch, data: RolloutTensors, only: list[int] | None
) -> Tensor:
    """Return flat weights of all tokens. With ``only``, which must be samples of the first step,
    those of other samples are 0."""
    steps = batch.steps if only is None else batch.steps[:1]
    trajectories = sum(step.global_batch_size for step in steps)
    per_token = config.algorithm.averages_tokens
    tokens = sum(step.num_loss_tokens for step in steps) if per_token else None
    masks = data.loss_masks
    if only is not None:
        chosen = set(only)
        masks = [mask if i in chosen else torch.zeros_like(mask) for i, mask in enumerate(masks)]
    return token_weights(masks, batch.rollout_mask_sums, max(trajectories, 1), tokens).to(
        ranks.device
    )


def worst_mismatch(ranks: Ranks, data: RolloutTensors) -> dict[str, float]:
    """Return the largest difference between trainer's and engine's log-prob of a trained token. The
    mean hides a few wrong tokens (after a wrong prefix-cache hit, say) among thousands."""
    if not ranks.has_output or data.log_probs is None or data.rollout_log_probs is None:
        return {}
    worst = torch.zeros(1, device=ranks.device)
    for i in data.samples_before_training():
        mask = data.loss_masks[i]
        if mask.numel():
            difference = torch.where(
                mask > 0, (data.log_probs[i] - data.rollout_log_probs[i]).abs(), 0.0
            )
            worst = torch.maximum(worst, difference.amax())  # NaN stays NaN
    return {"train/train_rollout_logprob_abs_diff_max": ranks.max_over_replicas(worst).item()}


def quantisation_metrics(
    config: Config, ranks: Ranks, batch: TrainBatch, data: RolloutTensors
) -> dict[str, float]:
    """Split ``train/train_rollout_logprob_abs_diff`` with ``--measure-quantisation`` into the
    effect of quantisation within the trainer, and the difference between trainer and engine with
    equal weights. Collective."""
    scored = data.engine_log_probs
    if not ranks.has_output or scored is None or data.log_probs is None:
        return {}
    weights = _weights(config, ranks, batch, data, data.before_training)
    others = {"quantisation_logprob_abs_diff": data.log_probs}
    if data.rollout_log_probs is not None:
        others["quantised_rollout_logprob_abs_diff"] = data.rollout_log_probs
    apart = {
        name: [(a - b).abs() for a, b in zip(scored, values)] for name, values in others.items()
    }
    sums = torch.stack([_weighted_sum(values, weights) for values in apart.values()])
    totals = ranks.sum_over_replicas(sums.float()).tolist()
    return {f"train/{name}": value for name, value in zip(apart, totals)}


def mean_of_steps(
    steps: Sequence[dict[str, float]], *, first_only: bool = False
) -> dict[str, float]:
    """Average metrics over the optimizer steps that have them. Learning rates are the last step's;
    skipped steps are counted.

    Args:
        first_only: take the difference from the engine of the first step alone. It is measured in
            the training passes, and in later steps would include the effect of training.
    """
    if not steps:
        return {}
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name.startswith(_LEARNING_RATES):
            means[name] = values[-1]
        elif name in ("train/skipped", "train/critic-skipped"):
            means[f"{name}_steps"] = sum(values)
        elif first_only and name in _BEFORE_TRAINING:
            means[name] = values[0]
        else:
            means[name] = sum(values) / len(values)
    return means


# -- single tokens ---------------------------------------------------------------------------------


def trained_tokens(ranks: Ranks, batch: TrainBatch, data: RolloutTensors) -> list[TrainedTokens]:
    """Return advantages and log-prob differences of the shard's samples in ``batch.recorded``, if
    this rank speaks for the shard.

    Differences are those from before training, see `RolloutTensors.before_training`.
    """
    if not (batch.recorded and ranks.has_output and ranks.speaks_for_shard):
        return []
    places = [i for i in range(batch.num_samples) if batch.key(i) in batch.recorded]
    advantages = {} if data.advantages is None else _on_host(data.advantages, places)
    differences: dict[int, np.ndarray] = {}
    if data.log_probs is not None and data.rollout_log_probs is not None:
        known = set(data.samples_before_training())
        compared = [i for i in places if i in known]
        ours = _on_host(data.log_probs, compared)
        theirs = _on_host(data.rollout_log_probs, compared)
        differences = {i: ours[i] - theirs[i] for i in compared}
    found = [TrainedTokens(batch.key(i), advantages.get(i), differences.get(i)) for i in places]
    return [one for one in found if one.advantages is not None or one.log_prob_diffs is not None]


def reference_tokens(
    config: Config, ranks: Ranks, batch: TrainBatch, data: RolloutTensors
) -> list[TrainedTokens]:
    """Return the reference's log-probs of the shard's samples, if they were computed for this
    rollout and later epochs need them again, and this rank speaks for the shard."""
    computed = None if batch.ref_log_probs is not None else data.ref_log_probs
    wanted = config.algorithm.preference is not None and ranks.speaks_for_shard
    if computed is None or not (wanted and ranks.has_output):
        return []
    values = _on_host(computed, range(batch.num_samples))
    return [TrainedTokens(batch.key(i), ref_log_probs=one) for i, one in values.items()]


def _on_host(values: Sequence[Tensor], places: Sequence[int]) -> dict[int, np.ndarray]:
    """Copy the values at these places to the host, in one transfer."""
    if not places:
        return {}
    flat = torch.cat([values[i].detach() for i in places]).float().cpu()
    parts = flat.split([values[i].numel() for i in places])
    return {i: part.numpy() for i, part in zip(places, parts)}
