"""Rotary position embedding: angles once per micro-batch instead of twice per layer, for every sequence of the pack."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.fusion import fused
from slime.errors import UserError


def inverse_frequencies(
    dim: int, base: float, scaling: dict[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Rotation per position of each pair of dimensions, and the factor on cos and sin.

    Args:
        dim: rotated dimensions per head.
        base: theta.
        scaling: transformers' scaling dict with "rope_type"; None for plain rotary embedding.
    Returns:
        (float32 [dim / 2], attention factor).
    Raises:
        UserError: a kind of scaling that is not implemented.
    Source: Su et al. (arXiv:2104.09864); "llama3": Llama 3.1's reference code; "yarn": Peng et al. (arXiv:2309.00071).

    Example:
        >>> inverse_frequencies(4, 100.0, None, 16)[0].tolist()
        [1.0, 0.10000000149011612]
    """
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if kind == "yarn":
        return _yarn(inverse, dim, base, scaling, max_position_embeddings)
    raise UserError(
        f"rotary scaling of type {kind!r} is not supported by the trainer",
        why="the model's config.json asks for it",
        fix="supported are: default, linear, llama3, yarn",
    )


def _llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > trained / low, inverse / factor, inverse)
    blend = (trained / wavelength - low) / (high - low)
    smooth = (1 - blend) * scaled / factor + blend * scaled
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, smooth, scaled)


def _yarn(
    inverse: Tensor, dim: int, base: float, scaling: dict[str, Any], max_position_embeddings: int
) -> tuple[Tensor, float]:
    factor = scaling["factor"]
    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings

    def scale_of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = scale_of(mscale) / scale_of(mscale_all) if mscale and mscale_all else scale_of(1.0)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(attention)


class RotaryAngles:
    """cos and sin for packed positions, in the dtype that queries and keys have."""

    def __init__(self, inverse: Tensor, attention_factor: float, device: torch.device, dtype: torch.dtype) -> None:
        self.inverse = inverse.to(device)
        self.attention_factor = attention_factor
        self.dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [T] → (cos, sin), each [T, 1, dim / 2]."""
        angles = positions.float()[:, None] * self.inverse[None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(self.dtype)[:, None, :], sin.to(self.dtype)[:, None, :]


class Rotate(torch.autograd.Function):
    """Rotate the first dimensions of each head; the backward pass is the rotation by the opposite angle.

    Args of ``apply``: x [T, heads, head_dim]; cos, sin [T, 1, dim / 2] with dim <= head_dim; interleaved: pairs are
    (0, 1), (2, 3), … instead of (0, dim / 2), ….
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
    first, second = (slice(0, half), slice(half, 2 * half))
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    x1, x2 = x[..., first], x[..., second]
    out[..., first] = (x1 * cos).addcmul_(x2, sin, value=-1)
    out[..., second] = (x2 * cos).addcmul_(x1, sin)
    if x.size(-1) > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
