"""The critic: its loss per token, the normalisation of its targets, and its explained variance.

Flat tensors [T] are the response tokens of a micro-batch; lists have a tensor [L_i] per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Decay per rollout of the running statistics of returns.
_DECAY = 0.99
#: Minimum variance for normalisation: with equal rewards the critic would learn rounding noise.
_MIN_VARIANCE = 1e-2


@dataclass(frozen=True)
class ValueLoss:
    """Per token: the loss, and whether the value was clipped (0 or 1)."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float
) -> ValueLoss:
    """max((V - G)², (clip(V) - G)²), where clip(V) is within ``value_clip`` of the value before the
    update. There is no factor of ½.

    Args:
        values: of the current critic, with gradient.
        old_values: of the critic before the rollout's first step.
        returns: G of each token.
    Source: Schulman et al., baselines/ppo2 (2017); Engstrom et al. (arXiv:2005.12729), section 3.

    Example (the first value moved by 0.5, which is clipped to 0.25, so its gradient is 0):
        >>> out = clipped_value_loss(
        ...     torch.tensor([0.5, 0.125]), torch.zeros(2), torch.ones(2), value_clip=0.25)
        >>> out.loss.tolist(), out.clipped.tolist()
        ([0.5625, 0.765625], [1.0, 0.0])
    """
    limited = values.clamp(old_values - value_clip, old_values + value_clip)
    plain_loss = (values - returns).square()
    limited_loss = (limited - returns).square()
    clipped = (limited_loss > plain_loss).to(values.dtype)
    return ValueLoss(torch.maximum(plain_loss, limited_loss), clipped)


@dataclass(frozen=True)
class ReturnScale:
    """Mean and standard deviation of returns, for normalised critic targets
    (``--normalize-values``).

    Attributes:
        mean, square: running means of G and G²; ``weight`` corrects their bias from starting at 0.
    Source: van Hasselt et al. (arXiv:1602.07714), section 2; as a running mean: Yu et al., MAPPO
    (arXiv:2103.01955), section 5.1.

    Example (returns of 1 and 3: the critic learns -1 and 1):
        >>> scale = ReturnScale().updated(mean=2.0, square=5.0)
        >>> round(scale.normalised(torch.tensor([3.0])).item(), 6)
        1.0
        >>> round(scale.restored(torch.tensor([1.0])).item(), 6)
        3.0
    """

    mean: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def updated(self, mean: float, square: float) -> ReturnScale:
        """Return the scale after a rollout whose returns have this mean and mean square."""
        new = 1.0 - _DECAY
        return ReturnScale(
            _DECAY * self.mean + new * mean,
            _DECAY * self.square + new * square,
            _DECAY * self.weight + new,
        )

    @property
    def shift(self) -> float:
        return self.mean / self.weight if self.weight else 0.0

    @property
    def factor(self) -> float:
        if not self.weight:
            return 1.0
        variance = self.square / self.weight - self.shift**2
        return float(max(variance, _MIN_VARIANCE) ** 0.5)

    def normalised(self, returns: Tensor) -> Tensor:
        return (returns - self.shift) / self.factor

    def restored(self, outputs: Tensor) -> Tensor:
        return outputs * self.factor + self.shift


def return_statistics(
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Return statistics over the trained tokens of all ranks, with equal weight per token.

    Args:
        values: V before the update.
        all_reduce: sums a tensor over the data-parallel ranks; see
            `slime.algorithms.advantages.whiten`.
    Returns:
        ``tokens``, their number; ``mean`` and ``square`` of the returns; and
        ``explained_variance`` = 1 - Var(G - V) / Var(G): 1 for exact values, 0 for a constant,
        below 0 for values worse than a constant; 0 if all returns are equal.

    Example (values that predict half of each return):
        >>> v, g = torch.tensor([-0.5, 0.5]), torch.tensor([-1.0, 1.0])
        >>> return_statistics([v], [g], [torch.ones(2)])
        {'tokens': 2.0, 'mean': 0.0, 'square': 1.0, 'explained_variance': 0.75}
    """
    empty = torch.zeros(0, device=device)
    v = torch.cat(list(values)).double() if values else empty.double()
    g = torch.cat(list(returns)).double() if values else empty.double()
    mask = torch.cat(list(loss_masks)).double() if values else empty.double()
    g = torch.where(mask > 0, g, 0.0)
    errors = torch.where(mask > 0, g - v, 0.0)
    sums = all_reduce(torch.stack([mask.sum(), g.sum(), errors.sum(), g.square().sum()]))
    count, total, error, square = sums.unbind()
    count = count.clamp(min=1.0)
    squares = torch.stack([g - total / count, errors - error / count]).square() * mask
    spread, unexplained = all_reduce(squares.sum(dim=1)).tolist()
    return {
        "tokens": float(sums[0]),
        "mean": float(total / count),
        "square": float(square / count),
        "explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0,
    }
