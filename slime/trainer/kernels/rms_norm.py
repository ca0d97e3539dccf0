"""Root-mean-square norm, forward and backward in one pass each.

torch needs several passes (measured in docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_PROGRAM = 4096  # a tile in registers: rows × columns
# backward programs, each with a partial gradient of the weight: 8 per multiprocessor of an H200
_MAX_PROGRAMS = 1056


@triton.jit
def _forward(
    x_ptr, w_ptr, y_ptr, n, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    here = (rows < n) & (columns < WIDTH)
    x = tl.load(x_ptr + rows * WIDTH + columns, mask=here, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(
        y_ptr + rows * WIDTH + columns,
        (x * scale[:, None] * w).to(y_ptr.dtype.element_ty),
        mask=here,
    )


@triton.jit
def _backward(
    g_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, n, eps, tiles, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)[None, :]
    w = tl.load(w_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles * ROWS
    for tile in range(tiles):
        rows = first + tile * ROWS + tl.arange(0, ROWS)[:, None]
        here = (rows < n) & (columns < WIDTH)
        x = tl.load(x_ptr + rows * WIDTH + columns, mask=here, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + rows * WIDTH + columns, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        x *= scale
        dw += g * x
        g *= w
        dx = scale * (g - x * (tl.sum(g * x, axis=1) / WIDTH)[:, None])
        tl.store(dx_ptr + rows * WIDTH + columns, dx.to(dx_ptr.dtype.element_ty), mask=here)
    columns = tl.arange(0, COLUMNS)
    total = tl.sum(dw, axis=0)
    tl.store(dw_ptr + tl.program_id(0) * WIDTH + columns, total, mask=columns < WIDTH)


def _shape(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS_PER_PROGRAM // columns)
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": rows,
        "num_warps": 4 if columns <= 2048 else 8,
    }


class RMSNormFunction(torch.autograd.Function):
    """x [..., H] · weight [H] / rms(x), computed in float32; saves only ``x`` and the weight.

    Args of ``apply``: x, weight, eps.
    Source: Zhang & Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.size(-1)
        n = x.numel() // width
        shape = _shape(width)
        if n:
            _forward[(triton.cdiv(n, shape["ROWS"]),)](x, weight, y, n, eps, **shape)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(x)
        width = x.size(-1)
        n = x.numel() // width
        shape = _shape(width)
        if not n:
            return dx, torch.zeros_like(weight), None
        all_tiles = triton.cdiv(n, shape["ROWS"])
        tiles = triton.cdiv(all_tiles, min(all_tiles, _MAX_PROGRAMS))
        programs = triton.cdiv(all_tiles, tiles)
        dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _backward[(programs,)](grad, x, weight, dx, dw, n, ctx.eps, tiles, **shape)
        return dx, dw.sum(dim=0).to(weight.dtype), None
