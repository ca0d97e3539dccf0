"""Matrix products of the decoder: one weight, several ways to multiply by it.

On CPU the weight is kept twice: as it is (its Hugging Face names address views of it) and in oneDNN's blocked layout,
which multiplies 1.5 to 3 times faster at the few rows of a decode step, in bfloat16 and in float32. Whoever writes to
the weight calls `Linear.invalidate`; the blocked copy is made again before its next use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

#: Rows per product in deterministic mode. Each product then has one shape, whatever is batched together.
FIXED_ROWS = 32


class Linear:
    """``y = x Wᵀ + b`` for x [rows, in_features].

    Args:
        weight: [out_features, in_features], contiguous.
        bias: [out_features] or None.
        fixed_rows: multiply in blocks of exactly `FIXED_ROWS` rows, padded, so that a row's result does not depend
            on its neighbours.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, fixed_rows: bool = False) -> None:
        self.weight, self.bias, self.fixed_rows = weight, bias, fixed_rows
        self._packed: torch.Tensor | None = None
        self._packs = can_pack(weight)

    def invalidate(self) -> None:
        """The weight was written to."""
        self._packed = None

    @property
    def packed_nbytes(self) -> int:
        return 0 if self._packed is None else self.weight.numel() * self.weight.element_size()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``y``, or ``residual + y``."""
        if self.fixed_rows:
            return self._in_fixed_blocks(x, residual)
        return self._multiply(x, residual)

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if not self._packs:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else residual + y
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")

    def _in_fixed_blocks(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        blocks = [self._multiply(block, None) for block in _padded(x).split(FIXED_ROWS)]
        y = (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:rows]
        return y if residual is None else residual + y


@dataclass
class Mlp:
    """``down(silu(gate x) · up x)``; gate and up in one matrix."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), residual=residual)


def _padded(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[0] % FIXED_ROWS
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by a blocked copy of this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
