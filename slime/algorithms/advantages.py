"""Advantages and returns of a rollout, one tensor per sample.

`slime.algorithms.baseline` has already centred and scaled rewards within their groups, if the
estimator asks for it. It runs when samples are converted, because the ranks that compute advantages
may each hold only a part of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SCAN_CHUNK = 128


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an advantage estimator.

    Attributes:
        rewards: R_i, post-processed.
        kl: float32 [L_i] per sample, the KL estimate of each response token against the reference;
            zeros when ``kl_coef`` is 0.
        loss_masks: [L_i] per sample, 0 or 1.
        kl_coef: weight of the KL penalty inside the reward.
        gamma: discount per trained token.
        values: float32 [L_i] per sample, the critic's V before each response token; None without a
            critic.
        lambd, critic_lambd: λ of generalised advantage estimation, for the advantages and for the
            returns that the critic learns.
        token_rewards: float32 [L_i] per sample, the part of R_i that each token earned. The last
            trained token gets the remainder. None: it gets all of R_i.
    """

    rewards: Sequence[float]
    kl: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    kl_coef: float = 0.0
    gamma: float = 1.0
    values: Sequence[Tensor] | None = None
    lambd: float = 1.0
    critic_lambd: float = 1.0
    token_rewards: Sequence[Tensor] | None = None


Estimate = tuple[list[Tensor], list[Tensor]]
"""(advantages, returns), each [L_i] per sample."""


def grpo(inputs: AdvantageInputs) -> Estimate:
    """A_t = R, the normalised reward, for every token t of a sample. Also used for GSPO and CISPO.

    ``kl_coef`` has no effect here: the reward is one number per sample (use the KL loss instead).

    Source: Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1.2.

    Example:
        >>> a, _ = grpo(AdvantageInputs(
        ...     [0.5, -0.5], [torch.zeros(2), torch.zeros(1)], [torch.ones(2), torch.ones(1)]))
        >>> [t.tolist() for t in a]
        [[0.5, 0.5], [-0.5]]
    """
    advantages = [torch.full_like(kl, reward) for reward, kl in zip(inputs.rewards, inputs.kl)]
    return advantages, list(advantages)


def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """A_t = Σ_{s ≥ t} γ^(s-t) r_s with r_s = -kl_coef · kl_s, plus R on the last token; s and t
    count trained tokens only.

    An untrained token (of a tool's result) is no action of the policy: it is no time step, gets no
    reward and no advantage, and adds no discount. Whitening over the whole batch has to follow
    (``--normalize-advantages``).

    In a sample without a trained token (``remove_sample``) the reward is dropped and all returns
    are 0.

    Source: Hu et al., "REINFORCE++" (arXiv:2501.03262).

    Example (the last token is untrained, so the second gets the reward 1):
        >>> a, _ = reinforce_plus_plus(AdvantageInputs(
        ...     [1.0], [torch.tensor([0.5, 0.0, 0.0])], [torch.tensor([1.0, 1.0, 0.0])],
        ...     kl_coef=0.1))
        >>> [round(v, 3) for v in a[0].tolist()]
        [0.95, 1.0, 0.0]

    Example (with a tool's result between them, the two trained tokens are still one step apart, so
    the first gets γ · 1):
        >>> a, _ = reinforce_plus_plus(AdvantageInputs(
        ...     [1.0], [torch.zeros(4)], [torch.tensor([1.0, 0.0, 0.0, 1.0])], gamma=0.5))
        >>> a[0].tolist()
        [0.5, 0.0, 0.0, 1.0]
    """
    returns = []
    for i, (kl, mask) in enumerate(zip(inputs.kl, inputs.loss_masks)):
        sample_returns = torch.zeros_like(kl)
        trained = torch.nonzero(mask)[:, 0]
        if trained.numel() > 0:
            rewards = _step_rewards(inputs, i, trained)
            sample_returns[trained] = discounted_returns(rewards, inputs.gamma)
        returns.append(sample_returns)
    return returns, list(returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """A_t = R - kl_coef · kl_t, where R is the reward minus its group's mean. Whitening has to
    follow.

    Source: Hu et al., "REINFORCE++" (arXiv:2501.03262), the baseline variant.

    Example:
        >>> a, _ = reinforce_plus_plus_baseline(AdvantageInputs(
        ...     [0.5], [torch.tensor([1.0, 0.0])], [torch.ones(2)], kl_coef=0.1))
        >>> [round(v, 3) for v in a[0].tolist()]
        [0.4, 0.5]
    """
    advantages = [reward - inputs.kl_coef * kl for reward, kl in zip(inputs.rewards, inputs.kl)]
    return advantages, list(advantages)


def ppo(inputs: AdvantageInputs) -> Estimate:
    """A_t = Σ_{s ≥ t} (γλ)^(s-t) δ_s with δ_s = r_s + γ V_{s+1} - V_s, from the values V of a
    critic. The critic learns G_t = A_t + V_t, with its own λ. s and t count trained tokens only.

    r_s = -kl_coef · kl_s plus the token's own reward; the last trained token gets the rest of R. As
    in REINFORCE++, an untrained token is no time step: V_{s+1} is the value of the next trained
    token, without discount in between. V after the last one is 0, even if the response was
    truncated. An untrained token has advantage 0 and its own value as return.

    Source: Schulman et al., "PPO" (arXiv:1707.06347) and "GAE" (arXiv:1506.02438), eq. 16; two λ:
    Yuan et al., "VC-PPO" (arXiv:2503.01491), section 4.2.

    Example (the second token is a tool's; the critic expects 0.5, then 0.75, and the reward is 1):
        >>> a, g = ppo(AdvantageInputs(
        ...     [1.0], [torch.zeros(3)], [torch.tensor([1.0, 0.0, 1.0])],
        ...     values=[torch.tensor([0.5, 9.0, 0.75])], lambd=0.0))
        >>> a[0].tolist(), g[0].tolist()
        ([0.25, 0.0, 0.25], [1.0, 9.0, 1.0])
    """
    assert inputs.values is not None, "an estimator with a critic runs after its values"
    advantages = []
    returns = []
    for i, (values, mask) in enumerate(zip(inputs.values, inputs.loss_masks)):
        advantage = torch.zeros_like(values)
        target = values.clone()
        trained = torch.nonzero(mask)[:, 0]
        if trained.numel() > 0:
            v = values[trained]
            errors = temporal_differences(_step_rewards(inputs, i, trained), v, inputs.gamma)
            advantage[trained] = discounted_returns(errors, inputs.gamma * inputs.lambd)
            target[trained] = v + discounted_returns(errors, inputs.gamma * inputs.critic_lambd)
        advantages.append(advantage)
        returns.append(target)
    return advantages, returns


def _step_rewards(inputs: AdvantageInputs, i: int, trained: Tensor) -> Tensor:
    """Return the rewards of sample i's trained tokens, [trained]; they sum to R minus the KL
    penalty."""
    rewards = -inputs.kl_coef * inputs.kl[i][trained]
    if inputs.token_rewards is None:
        rewards[-1] += inputs.rewards[i]
        return rewards
    own = inputs.token_rewards[i].to(rewards)[trained]
    rewards += own
    rewards[-1] += inputs.rewards[i] - own.sum()
    return rewards


def temporal_differences(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    """δ_t = r_t + γ V_{t+1} - V_t, with V = 0 after the last step.

    Args:
        rewards, values: [L].

    Example:
        >>> temporal_differences(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), 1.0).tolist()
        [0.25, 0.25]
    """
    return rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G_{t+1}, computed by one small matrix product per 128 tokens instead of one
    step per token.

    Args:
        rewards: [L].

    Example:
        >>> discounted_returns(torch.tensor([0.0, 0.0, 1.0]), 0.5).tolist()
        [0.25, 0.5, 1.0]
    """
    if gamma == 1.0 and not (rewards.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return rewards.flip(0).cumsum(0).flip(0)  # cumsum has no deterministic GPU kernel
    length = rewards.numel()
    size = min(_SCAN_CHUNK, max(length, 1))
    steps = torch.arange(size, device=rewards.device)
    distance = steps[None, :] - steps[:, None]
    decay = torch.where(
        distance >= 0, torch.pow(gamma, distance.clamp(min=0).to(rewards.dtype)), 0.0
    )
    returns = torch.empty_like(rewards)
    carry = rewards.new_zeros(())
    for end in range(length, 0, -size):
        start = max(0, end - size)
        n = end - start
        to_end = torch.pow(gamma, (n - steps[:n]).to(rewards.dtype))
        returns[start:end] = decay[:n, :n] @ rewards[start:end] + to_end * carry
        carry = returns[start]
    return returns


def whiten(
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Shift and scale to mean 0 and variance 1 over the trained tokens of all ranks
    (Bessel-corrected).

    Args:
        all_reduce: sums a tensor over the data-parallel ranks. Every rank calls it equally often,
            even without samples.
        device: device of the sums on a rank without samples (NCCL reduces only CUDA tensors).

    Example:
        >>> w = whiten(
        ...     [torch.tensor([1.0, 3.0]), torch.tensor([9.0])], [torch.ones(2), torch.zeros(1)])
        >>> [round(v, 3) for v in w[0].tolist()]
        [-0.707, 0.707]
    """
    empty = torch.zeros(0, device=device)
    values = torch.cat(list(advantages)) if advantages else empty
    masks = torch.cat([mask.to(values) for mask in loss_masks]) if advantages else empty
    total, count = all_reduce(torch.stack([(values * masks).sum(), masks.sum()])).unbind()
    mean = total / count.clamp(min=1.0)
    squares = all_reduce(((values - mean).square() * masks).sum())
    scale = torch.rsqrt(squares / (count - 1.0).clamp(min=1.0) + 1e-8)
    return [(a - mean) * scale for a in advantages]
