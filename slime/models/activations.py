"""Activation functions by the names that `ModelSpec` gives them. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

QUICK_GELU_SLOPE = 1.702


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return the sigmoid approximation of GELU (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return x * torch.sigmoid(QUICK_GELU_SLOPE * x)


def gated(
    gate: Tensor,
    up: Tensor,
    activation: Callable[[Tensor], Tensor],
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Return ``activation(gate) · (up + offset)``.

    Args:
        limit: ``gate`` is clamped to at most this, ``up`` to ± this; None: no clamp.
    """
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return activation(gate) * (up + offset if offset else up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "quick_gelu": quick_gelu,
}
