"""Quantise weights on a GPU in one pass over memory, to the same bits as
`slime.engines.wire.quantised`.

The torch functions there need twenty passes and launches per weight; compressed-tensors' need twice
as many, and synchronise with the GPU. They make a push five to thirteen times as long as one of
plain weights (docs/performance.md).

Imports triton, which only torch's CUDA builds include: import this module only for tensors on a
GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.models.quantised import NIBBLES, Fp8, Int4

_LARGEST_FP8 = tl.constexpr(448.0)
#: 2²³ + 2²²: adding and subtracting it rounds a small float32 to an integer, halves to even.
_ROUNDS = tl.constexpr(12582912.0)
_NIBBLES = tl.constexpr(NIBBLES)
_ELEMENTS_PER_PROGRAM = 4096
#: Elements that one program can hold in registers: a block of 128×128.
_MAX_ELEMENTS = 1 << 14


def takes(scheme: Int4 | Fp8) -> bool:
    """Tell whether there is a kernel for this format; the torch functions support all formats."""
    sizes = (
        (scheme.group_size, NIBBLES)
        if isinstance(scheme, Int4)
        else tuple(size or 1 for size in scheme.block)
    )
    if any(size & (size - 1) for size in sizes):
        return False
    if isinstance(scheme, Int4):
        return scheme.symmetric and NIBBLES <= scheme.group_size <= _ELEMENTS_PER_PROGRAM
    # one scale per block, or one for the whole weight; blocks of whole rows have an unknown size
    return sizes[0] * sizes[1] <= _MAX_ELEMENTS if all(scheme.block) else not any(scheme.block)


def quantise(weight: Tensor, scheme: Int4 | Fp8) -> dict[str, Tensor]:
    """Quantise a weight [rows, columns] on a GPU; keys are the last parts of the names. If one
    scale covers a whole weight, a stack [weights, rows, columns] works too.

    No scale is 0, and the host does not wait for the GPU.
    """
    weight = weight.contiguous()
    if isinstance(scheme, Int4):
        return _int4(weight, scheme)
    return _fp8_blocks(weight, scheme) if any(scheme.block) else _fp8_whole(weight, scheme)


# -- FP8 -------------------------------------------------------------------------------------------


@triton.jit
def _block_kernel(
    x_ptr, q_ptr, s_ptr, rows, columns, EPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    most = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    scale = tl.div_rn(most, tl.cast(_LARGEST_FP8, tl.float32))
    scale = tl.where(scale == 0.0, EPS, scale)
    tl.store(s_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    tl.store(q_ptr + at, _as_fp8(x, scale).to(q_ptr.dtype.element_ty), mask=here)


@triton.jit
def _whole_kernel(x_ptr, q_ptr, most_ptr, s_ptr, n, EPS: tl.constexpr, SIZE: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    scale = tl.div_rn(tl.load(most_ptr + matrix).to(tl.float32), tl.cast(_LARGEST_FP8, tl.float32))
    scale = tl.where(scale == 0.0, EPS, scale)
    if tl.program_id(0) == 0:
        tl.store(s_ptr + matrix, scale)
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = place < n
    at = matrix * n + place
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    tl.store(q_ptr + at, _as_fp8(x, scale).to(q_ptr.dtype.element_ty), mask=here)


@triton.jit
def _as_fp8(x, scale):
    """Return x / scale, clamped: the smallest scales are rounded, so the quotient may exceed the
    largest FP8 number."""
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return tl.minimum(tl.maximum(x, -_LARGEST_FP8), _LARGEST_FP8)


def _fp8_blocks(weight: Tensor, scheme: Fp8) -> dict[str, Tensor]:
    (rows, columns) = weight.shape
    (height, width) = scheme.block
    grid = scheme.blocks((rows, columns))
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(grid, dtype=torch.float32, device=weight.device)
    if weight.numel():
        eps = torch.finfo(torch.float32).eps
        _block_kernel[grid](
            weight, numbers, scales, rows, columns, EPS=eps, HEIGHT=height, WIDTH=width, num_warps=8
        )  # fmt: skip
    return {"weight": numbers, scheme.scale: scales}


def _fp8_whole(weight: Tensor, scheme: Fp8) -> dict[str, Tensor]:
    most = torch.linalg.vector_norm(weight, torch.inf, dim=(-2, -1))
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty((*weight.shape[:-2], 1), dtype=torch.float32, device=weight.device)
    n = weight.shape[-2] * weight.shape[-1]
    grid = (triton.cdiv(n, _ELEMENTS_PER_PROGRAM), scales.numel())
    eps = torch.finfo(torch.float32).eps
    _whole_kernel[grid](weight, numbers, most, scales, n, EPS=eps, SIZE=_ELEMENTS_PER_PROGRAM)
    return {"weight": numbers, scheme.scale: scales}


# -- INT4 ------------------------------------------------------------------------------------------


@triton.jit
def _group_kernel(
    x_ptr, packed_ptr, scale_ptr, shape_ptr, rows, columns, EPS: tl.constexpr, TINY: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    groups = tl.num_programs(0)
    group = tl.program_id(0)
    here = row < rows
    first = row.to(tl.int64) * columns + group * GROUP
    x = tl.load(
        x_ptr + first[:, None] + tl.arange(0, GROUP)[None, :], mask=here[:, None], other=0.0
    ).to(tl.float32)
    most = tl.max(tl.abs(x), axis=1)
    scale = tl.div_rn(most, tl.full(most.shape, 7.5, tl.float32))
    scale = tl.where(scale == 0.0, EPS, scale).to(scale_ptr.dtype.element_ty)
    # divide by the stored, rounded scale
    scale = tl.where(scale == 0.0, TINY, scale.to(tl.float32))
    tl.store(
        scale_ptr + row.to(tl.int64) * groups + group,
        scale.to(scale_ptr.dtype.element_ty),
        mask=here,
    )
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    x = tl.minimum(tl.maximum(x, -8.0), 7.0)
    number = ((x + _ROUNDS) - _ROUNDS).to(tl.int32) + 8
    number = tl.reshape(number, (ROWS, GROUP // _NIBBLES, _NIBBLES))
    word = tl.sum(number << (4 * tl.arange(0, _NIBBLES))[None, None, :], axis=2)
    words = columns // _NIBBLES
    at = (
        row.to(tl.int64)[:, None] * words
        + group * (GROUP // _NIBBLES)
        + tl.arange(0, GROUP // _NIBBLES)[None, :]
    )
    tl.store(packed_ptr + at, word, mask=here[:, None])
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(shape_ptr, tl.cast(rows, tl.int64))
        tl.store(shape_ptr + 1, tl.cast(columns, tl.int64))


def _int4(weight: Tensor, scheme: Int4) -> dict[str, Tensor]:
    rows, columns = weight.shape
    dtypes = {
        "weight_packed": torch.int32,
        "weight_scale": weight.dtype,
        "weight_shape": torch.int64,
    }
    shapes = {name: shape for name, (_, shape) in scheme.parts((rows, columns), "").items()}
    parts = {
        name: torch.empty(shapes[name], dtype=dtype, device=weight.device)
        for name, dtype in dtypes.items()
    }
    together = max(1, _ELEMENTS_PER_PROGRAM // scheme.group_size)
    grid = (columns // scheme.group_size, triton.cdiv(rows, together))
    eps = torch.finfo(torch.float32).eps
    tiny = torch.finfo(weight.dtype).tiny
    _group_kernel[grid](
        weight, *parts.values(), rows, columns, EPS=eps, TINY=tiny, GROUP=scheme.group_size,
        ROWS=together
    )  # fmt: skip
    return parts
