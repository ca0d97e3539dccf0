"""Frequencies of the rotary position embedding, for the trainer and for the embedded engine.
Imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slime.models.spec import ModelSpec, QueryScaling, RotaryKind


def inverse_frequencies(
    dim: int, base: float, scaling: dict[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Return the rotation per position of each pair of dimensions, and the factor on cos and sin.

    Args:
        dim: rotated dimensions per head.
        base: theta.
        scaling: transformers' scaling dict with "rope_type"; None: not scaled.
    Returns:
        (float32 [dim / 2], attention factor).
    Source: Su et al. (arXiv:2104.09864); "llama3": Llama 3.1's reference code; "yarn": Peng et al.
    (arXiv:2309.00071); "longrope": Ding et al. (arXiv:2402.13753), with the factors for sequences
    of at most ``original_max_position_embeddings`` tokens.

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
    if kind == "longrope":
        return _longrope(inverse, scaling)
    assert kind == "yarn", "slime.models.spec.ROPE_TYPES are checked with the config"
    return _yarn(inverse, dim, base, scaling, max_position_embeddings)


def layer_frequencies(spec: ModelSpec, kind: RotaryKind) -> tuple[Tensor, float]:
    """Return the result of `inverse_frequencies` for the layers with this kind of rotary embedding.
    Without rotation, the frequencies are 0."""
    if kind == "none":
        return torch.zeros(spec.rotary_dim // 2), 1.0
    base = spec.rotary_base
    scaling = spec.rotary_scaling
    if kind == "local":
        assert spec.local_rotary is not None
        base = spec.local_rotary.base
        scaling = spec.local_rotary.scaling
    return inverse_frequencies(spec.rotary_dim, base, scaling, spec.max_position_embeddings)


def frequency_axes(spec: ModelSpec) -> Tensor | None:
    """Return which of a token's three positions rotates each pair of dimensions: int64 [rotated
    dimensions / 2]; None if tokens have one position."""
    if spec.vision is None or not spec.vision.kind.has_axes:
        return None
    return torch.from_numpy(spec.vision.frequency_axes(spec.rotary_dim // 2))


def query_factors(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Return the factor on the queries of each position; float32, of the shape of ``positions``.

    Example:
        >>> query_factors(QueryScaling(0.5, 4), torch.tensor([0, 3, 4])).tolist()
        [1.0, 1.0, 1.3465735912322998]
    """
    return 1 + scaling.beta * torch.log(1 + torch.floor(positions / scaling.length))


def _llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor = scaling["factor"]
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
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
    attention = scaling.get("attention_factor")
    if attention is None:
        mscale = scaling.get("mscale")
        mscale_all = scaling.get("mscale_all_dim")
        attention = yarn_mscale(factor, 1.0)
        if mscale and mscale_all:
            attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(attention)


def _longrope(inverse: Tensor, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    attention = scaling.get("attention_factor")
    if attention is None:
        growth = max(math.log(scaling["factor"]), 0.0)
        trained = scaling["original_max_position_embeddings"]
        attention = math.sqrt(1 + growth / math.log(trained))
    return inverse / torch.tensor(scaling["short_factor"], dtype=torch.float32), float(attention)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Peng et al. (arXiv:2309.00071), section 3.4, with DeepSeek's weight on the logarithm.

    Example:
        >>> round(yarn_mscale(40.0, 1.0), 4)
        1.3689
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
