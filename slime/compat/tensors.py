"""Losses, advantages and the micro-batch schedule under their earlier signatures, for one rank
without context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms import advantages as estimates
from slime.algorithms.advantages import (
    AdvantageInputs,
    discounted_returns,
    temporal_differences,
)
from slime.algorithms.kl import kl_estimate
from slime.algorithms.losses import (
    PolicyInputs,
    cispo_loss,
    off_policy_sequence_mask,
    ppo_clip_loss,
)
from slime.algorithms.reduce import sequence_mean
from slime.samples.packing import PackingRules, plan_steps

# -- losses ----------------------------------------------------------------------------------------


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """`slime.algorithms.kl.kl_estimate`, of the same shape; weighted by ``importance_ratio`` if it
    is given."""
    log_ratio = None if importance_ratio is None else importance_ratio.log()
    return kl_estimate(log_probs.float(), log_probs_base.float(), kl_loss_type, log_ratio)


def compute_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss, clipped), each [T]; ``ppo_kl`` [T] is the old minus the current log-prob."""
    inputs = _inputs(
        -ppo_kl, torch.zeros_like(ppo_kl), advantages, eps_clip, eps_clip_high, eps_clip_c
    )
    loss = ppo_clip_loss(inputs)
    return loss.loss, loss.clipped


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return (loss, clipped), each [T]; the gradient flows only through ``log_probs``."""
    old = (log_probs + ppo_kl).detach()
    loss = cispo_loss(_inputs(log_probs, old, advantages, eps_clip, eps_clip_high))
    return loss.loss, loss.clipped


def _inputs(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    ceiling: float | None = None,
) -> PolicyInputs:
    lengths = torch.tensor([log_probs.numel()], device=log_probs.device)
    return PolicyInputs(
        log_probs, old, advantages, torch.ones_like(log_probs), lengths, low, high, ceiling
    )


def compute_gspo_kl(
    full_log_probs: list[Tensor],
    full_old_log_probs: list[Tensor],
    local_log_probs: list[Tensor],
    loss_masks: list[Tensor],
) -> Tensor:
    """[T]: for each local token, the mean of old minus current log-prob over its sample's trained
    tokens."""
    means = [
        sequence_mean(old - new, mask.to(new), _length(new))
        for new, old, mask in zip(full_log_probs, full_old_log_probs, loss_masks)
    ]
    return torch.cat([mean[:1].expand_as(local) for mean, local in zip(means, local_log_probs)])


def compute_opsm_mask(
    args: Any,
    full_log_probs: list[Tensor],
    full_old_log_probs: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """([T] mask by ``args.opsm_delta``, number of samples that it removes)."""
    masks = [
        off_policy_sequence_mask(new, old, advantage, mask.to(new), _length(new), args.opsm_delta)
        for new, old, advantage, mask in zip(
            full_log_probs, full_old_log_probs, advantages, loss_masks
        )
    ]
    return torch.cat(masks), sum((1 - mask).mean() for mask in masks) + torch.zeros(
        (), device=masks[0].device
    )


def _length(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.numel()], device=tensor.device)


# -- advantages ------------------------------------------------------------------------------------


def get_grpo_returns(rewards: Sequence[float] | Tensor, kl: list[Tensor]) -> list[Tensor]:
    """Return the reward of each sample, repeated for each of its tokens."""
    return estimates.grpo(AdvantageInputs(_numbers(rewards), kl, []))[0]


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | Tensor,
    kl: list[Tensor],
    loss_masks: list[Tensor],
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return the discounted returns of REINFORCE++; the two arguments with lengths are ignored."""
    return estimates.reinforce_plus_plus(
        AdvantageInputs(_numbers(rewards), kl, loss_masks, kl_coef, gamma)
    )[0]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor, kl: list[Tensor], loss_masks: list[Tensor], kl_coef: float
) -> list[Tensor]:
    """Return the rewards, already centred by group, minus the KL penalty of each token."""
    return estimates.reinforce_plus_plus_baseline(
        AdvantageInputs(_numbers(rewards), kl, loss_masks, kl_coef)
    )[0]


def _numbers(rewards: Sequence[float] | Tensor) -> list[float]:
    return [float(reward) for reward in rewards]


def _generalised(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns [L] of GAE (arXiv:1506.02438): temporal differences,
    discounted by γλ."""
    errors = temporal_differences(rewards, values, gamma)
    advantages = discounted_returns(errors, gamma * lambd)
    return advantages, advantages + values


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """Returns [B, T] of rewards [B, T]; ``chunk_size`` is ignored: it is fixed."""
    return torch.stack([discounted_returns(row, discount) for row in rewards])


def vanilla_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [B, T] like ``rewards`` and ``values``."""
    rows = [_generalised(*row, gamma, lambd) for row in zip(rewards, values)]
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Return the result of `vanilla_gae`; ``chunk_size`` is ignored: it is fixed."""
    return vanilla_gae(rewards, values, gamma, lambd)


def get_advantages_and_returns(
    total_len: int, response_len: int, values: Tensor, rewards: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of one sample, each [response_len]."""
    return _generalised(rewards, values, gamma, lambd)


def get_advantages_and_returns_batch(
    total_lengths: list[int],
    response_lengths: list[int],
    values_list: list[Tensor],
    rewards_list: list[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) of each sample."""
    rows = [
        _generalised(rewards, values, gamma, lambd)
        for rewards, values in zip(rewards_list, values_list)
    ]
    return [row[0] for row in rows], [row[1] for row in rows]


# -- packing ---------------------------------------------------------------------------------------


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Run `slime.samples.packing.plan_steps`; return (sample positions of each data-parallel rank,
    each rank's micro-batches as indices into them, micro-batches per rank of each step,
    trajectories of each step).

    No sample is dropped: trajectories that do not fill a step are spread over the others.
    """
    stages = train_parallel_config.get("vpp_size") or 1
    multiple = train_parallel_config.get("microbatch_group_size_per_vp_stage") or 1
    dynamic = getattr(args, "use_dynamic_batch_size", False)
    rules = PackingRules(
        global_batch_size=global_batch_size,
        data_parallel_size=train_parallel_config["dp_size"],
        micro_batch_multiple=multiple if stages > 1 else 1,
        micro_batch_size=getattr(args, "micro_batch_size", None) or 1,
        max_tokens=args.max_tokens_per_gpu * (train_parallel_config.get("cp_size") or 1)
        if dynamic
        else None,
        balance=bool(getattr(args, "balance_data", False)),
    )
    plan = plan_steps(total_lengths, rollout_indices, total_lengths, rules)
    micro_batches = [
        [bin_ for step in steps for bin_ in step.micro_batches] for steps in plan.steps
    ]
    first = plan.steps[0]
    return (
        plan.shards,
        micro_batches,
        [len(step.micro_batches) for step in first],
        [s.global_batch_size for s in first],
    )
