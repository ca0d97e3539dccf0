"""Rotary position embedding of packed sequences, with angles computed once per micro-batch instead
of twice per layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.algorithms.fusion import fused


class RotaryAngles:
    """cos and sin for packed positions, in the dtype of queries and keys.

    Args:
        axes: int64 [dim / 2], which of a token's three positions rotates each pair; None for models
            whose tokens have one position.
    """

    def __init__(
        self,
        inverse: Tensor,
        attention_factor: float,
        device: torch.device,
        dtype: torch.dtype,
        axes: Tensor | None = None,
    ) -> None:
        self.inverse = inverse.to(device)
        self.axes = None if axes is None else axes.to(device)
        self.attention_factor = attention_factor
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [T] or [3, T] → (cos, sin), each [T, 1, dim / 2]."""
        if positions.dim() == 2:
            assert self.axes is not None
            angles = positions.float()[self.axes].t() * self.inverse[None, :]
        else:
            angles = positions.float()[:, None] * self.inverse[None, :]
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return cos.to(self.dtype)[:, None, :], sin.to(self.dtype)[:, None, :]


class Rotate(torch.autograd.Function):
    """Rotate the first dimensions of each head; the backward pass is the rotation by the opposite
    angle.

    Args of ``apply``: x [T, heads, head_dim]; cos, sin [T, 1, dim / 2] with dim <= head_dim;
    interleaved: pairs are (0, 1), (2, 3), … instead of (0, dim / 2), ….
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin, ctx.interleaved), None, None, None


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[x1, x2] → [x1·cos - x2·sin, x2·cos + x1·sin] for each pair of rotated dimensions.

    Example (a quarter turn):
        >>> rotate(torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).tolist()
        [[[0.0, 1.0]]]
    """
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first = slice(0, half)
    second = slice(half, 2 * half)
    if interleaved:
        first = slice(0, 2 * half, 2)
        second = slice(1, 2 * half, 2)
    x1 = x[..., first]
    x2 = x[..., second]
    out[..., first] = (x1 * cos).addcmul_(x2, sin, value=-1)
    out[..., second] = (x2 * cos).addcmul_(x1, sin)
    if x.size(-1) > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
