"""MXFP4, the format of published gpt-oss models: stacks of experts in 4-bit floats.

    …experts.down_proj           [experts, in, out]                 in the model
    …experts.down_proj_blocks    uint8 [experts, out, in / 32, 16]  two numbers (e2m1) in a byte
    …experts.down_proj_scales    uint8 [experts, out, in / 32]      exponent of a block, plus 127

The first number of a byte is in its lower half. Source: OCP Microscaling Formats (MX) 1.0, sections
5.2 and 6; the order of axes and halves is that of the published files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.models.layouts import TensorSource, stack_slices

if TYPE_CHECKING:
    import torch

BLOCKS = "_blocks"
SCALES = "_scales"
#: Numbers that share a scale.
BLOCK = 32
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Midpoints between neighbouring magnitudes; ties are rounded to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SIGN = 8


def decode(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode blocks and concatenate them: uint8 [..., n, 16] and [..., n] → [..., 32 n].

    bfloat16 and float32 represent all values exactly.
    """
    import torch

    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], dtype=dtype)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - _BIAS
    numbers = values.to(blocks.device)[halves.int()]
    return torch.ldexp(numbers.float(), exponents).to(dtype).flatten(-2)


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (blocks, scales) nearest to a weight [..., columns]. Values from `decode` are
    reproduced exactly.

    The scale of a block is the smallest power of two with which its largest value is at most 6, so
    nothing is clipped.

    Raises:
        ValueError: the number of columns is not a multiple of 32.
    """
    import torch

    if weight.shape[-1] % BLOCK:
        raise ValueError(f"{weight.shape[-1]} columns are no multiple of {BLOCK}")
    values = weight.float().unflatten(-1, (-1, BLOCK))
    largest = values.abs().amax(dim=-1)
    fraction, exponent = torch.frexp(largest)
    exponent = exponent - torch.where(fraction > 0.75, 2, 3)  # 6 is 0.75 · 2³
    exponent = exponent.masked_fill(largest == 0, 0).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(values, -exponent[..., None])
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for place, midpoint in enumerate(_MIDPOINTS):
        goes_up = scaled.abs() >= midpoint if place % 2 else scaled.abs() > midpoint
        codes += goes_up.to(torch.uint8)
    codes += torch.signbit(scaled).to(torch.uint8) * _SIGN
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + _BIAS).to(torch.uint8)


class Mxfp4Tensor:
    """A stack [experts, in, out] stored in MXFP4. Indexing (`[e:f]`, `[e:f, :, a:b]`, …) reads and
    decodes only the slice, in bfloat16.

    Args:
        blocks, scales: the stored tensors.
    """

    def __init__(self, blocks: TensorSource, scales: TensorSource) -> None:
        self._blocks = blocks
        self._scales = scales
        experts, rows, count, _ = blocks.shape
        self.shape: Sequence[int] = (experts, count * BLOCK, rows)

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch

        experts, columns, rows = stack_slices(index)
        start, stop, _ = columns.indices(self.shape[1])
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        numbers = decode(
            self._blocks[experts, rows, blocks], self._scales[experts, rows, blocks], torch.bfloat16
        )
        first = blocks.start * BLOCK
        return numbers[..., start - first : stop - first].transpose(-1, -2)


def base_names(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Find MXFP4 stacks among names of stored tensors: name → (blocks, scales)."""
    stored = set(names)
    stems = [name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)]
    return {stem: (stem + BLOCKS, stem + SCALES) for stem in stems if stem + SCALES in stored}
