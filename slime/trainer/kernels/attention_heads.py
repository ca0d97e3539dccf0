"""Fused kernel between the QKV projection and attention: split the heads, normalise and rotate
(RoPE) query and key, in one pass over memory, and one in the backward pass.

    mixed [T, groups, (per group + 2) · dim] ─► query [T, groups · per group, dim]  norm, rotation
       q q q q k v │ q q q q k v │ …            key   [T, groups, dim]              norm, rotation
                                                value [T, groups, dim]

Unfused, these are a copy, two norms and two rotations, each of which reads and writes its whole
tensor, and twice as many passes in the backward pass. The arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 32  # tokens of a tile; a tile covers one head
# tiles per backward program, which sums them to one partial gradient of a norm's weight
_TILES = 4


@triton.jit
def _offsets(HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the pairs' indices, and the columns of their first and second members."""
    i = tl.arange(0, BLOCK)[None, :]
    if INTERLEAVED:
        return i, 2 * i, 2 * i + 1
    return i, i, i + HALF


@triton.jit
def _locate_head(
    q_ptr,
    k_ptr,
    v_ptr,
    wq_ptr,
    wk_ptr,
    t,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return the slot of this program's head in its group (queries, key, value), pointers to its
    tokens ``t`` in the query, key or value tensor, and the pointer to the weight of its norm."""
    group = tl.program_id(1) // (PER_GROUP + 2)
    slot = tl.program_id(1) % (PER_GROUP + 2)
    if slot < PER_GROUP:
        place = q_ptr + (t * GROUPS * PER_GROUP + group * PER_GROUP + slot) * DIM
        w_ptr = wq_ptr
    elif slot == PER_GROUP:
        place = k_ptr + (t * GROUPS + group) * DIM
        w_ptr = wk_ptr
    else:
        place = v_ptr + (t * GROUPS + group) * DIM
        w_ptr = wk_ptr
    return slot, place, w_ptr


@triton.jit
def _forward(
    mixed_ptr, q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, n, eps,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, WITH_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = t < n
    i, first, second = _offsets(HALF, BLOCK, INTERLEAVED)
    pairs = inside & (i < HALF)
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    others = inside & (rest < DIM)
    source = mixed_ptr + (t * GROUPS * (PER_GROUP + 2) + tl.program_id(1)) * DIM
    x1 = tl.load(source + first, mask=pairs, other=0.0).to(tl.float32)
    x2 = tl.load(source + second, mask=pairs, other=0.0).to(tl.float32)
    x3 = tl.load(source + rest, mask=others, other=0.0).to(tl.float32)
    slot, target, w_ptr = _locate_head(
        q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, t, GROUPS, PER_GROUP, DIM
    )
    if slot <= PER_GROUP:
        if WITH_NORM:
            squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1) + tl.sum(x3 * x3, axis=1)
            scale = tl.rsqrt(squares / DIM + eps)[:, None]
            x1 = x1 * scale * tl.load(w_ptr + first, mask=i < HALF, other=0.0).to(tl.float32)
            x2 = x2 * scale * tl.load(w_ptr + second, mask=i < HALF, other=0.0).to(tl.float32)
            x3 = x3 * scale * tl.load(w_ptr + rest, mask=rest < DIM, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + t * HALF + i, mask=pairs, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * HALF + i, mask=pairs, other=0.0).to(tl.float32)
        rotated = x1 * cos - x2 * sin
        x2 = x2 * cos + x1 * sin
        x1 = rotated
    tl.store(target + first, x1.to(q_ptr.dtype.element_ty), mask=pairs)
    tl.store(target + second, x2.to(q_ptr.dtype.element_ty), mask=pairs)
    tl.store(target + rest, x3.to(q_ptr.dtype.element_ty), mask=others)


@triton.jit
def _backward(
    mixed_ptr, dq_ptr, dk_ptr, dv_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dmixed_ptr, dw_ptr, n, eps,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, WITH_NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    i, first, second = _offsets(HALF, BLOCK, INTERLEAVED)
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    dw1 = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    dw2 = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    dw3 = tl.zeros([TOKENS, REST], dtype=tl.float32)
    for tile in range(TILES):
        t = (tl.program_id(0).to(tl.int64) * TILES + tile) * TOKENS + tl.arange(0, TOKENS)[:, None]
        inside = t < n
        pairs = inside & (i < HALF)
        others = inside & (rest < DIM)
        slot, grad, w_ptr = _locate_head(
            dq_ptr, dk_ptr, dv_ptr, wq_ptr, wk_ptr, t, GROUPS, PER_GROUP, DIM
        )
        g1 = tl.load(grad + first, mask=pairs, other=0.0).to(tl.float32)
        g2 = tl.load(grad + second, mask=pairs, other=0.0).to(tl.float32)
        g3 = tl.load(grad + rest, mask=others, other=0.0).to(tl.float32)
        place = (t * GROUPS * (PER_GROUP + 2) + tl.program_id(1)) * DIM
        if slot <= PER_GROUP:
            cos = tl.load(cos_ptr + t * HALF + i, mask=pairs, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + t * HALF + i, mask=pairs, other=0.0).to(tl.float32)
            unrotated = g1 * cos + g2 * sin
            g2 = g2 * cos - g1 * sin
            g1 = unrotated
            if WITH_NORM:
                x1 = tl.load(mixed_ptr + place + first, mask=pairs, other=0.0).to(tl.float32)
                x2 = tl.load(mixed_ptr + place + second, mask=pairs, other=0.0).to(tl.float32)
                x3 = tl.load(mixed_ptr + place + rest, mask=others, other=0.0).to(tl.float32)
                squares = (
                    tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1) + tl.sum(x3 * x3, axis=1)
                )
                scale = tl.rsqrt(squares / DIM + eps)[:, None]
                x1 *= scale
                x2 *= scale
                x3 *= scale
                dw1 += g1 * x1
                dw2 += g2 * x2
                dw3 += g3 * x3
                g1 *= tl.load(w_ptr + first, mask=i < HALF, other=0.0).to(tl.float32)
                g2 *= tl.load(w_ptr + second, mask=i < HALF, other=0.0).to(tl.float32)
                g3 *= tl.load(w_ptr + rest, mask=rest < DIM, other=0.0).to(tl.float32)
                along = (
                    tl.sum(g1 * x1, axis=1) + tl.sum(g2 * x2, axis=1) + tl.sum(g3 * x3, axis=1)
                )[:, None] / DIM
                g1 = scale * (g1 - x1 * along)
                g2 = scale * (g2 - x2 * along)
                g3 = scale * (g3 - x3 * along)
        tl.store(dmixed_ptr + place + first, g1.to(dmixed_ptr.dtype.element_ty), mask=pairs)
        tl.store(dmixed_ptr + place + second, g2.to(dmixed_ptr.dtype.element_ty), mask=pairs)
        tl.store(dmixed_ptr + place + rest, g3.to(dmixed_ptr.dtype.element_ty), mask=others)
    if WITH_NORM and tl.program_id(1) % (PER_GROUP + 2) <= PER_GROUP:
        partial = dw_ptr + (tl.program_id(0) * GROUPS * (PER_GROUP + 2) + tl.program_id(1)) * DIM
        tl.store(partial + first, tl.sum(dw1, axis=0)[None, :], mask=i < HALF)
        tl.store(partial + second, tl.sum(dw2, axis=0)[None, :], mask=i < HALF)
        tl.store(partial + rest, tl.sum(dw3, axis=0)[None, :], mask=rest < DIM)


class SplitNormRotate(torch.autograd.Function):
    """Split the QKV projection into heads; normalise and rotate query and key.

    Args of ``apply``:
        mixed: [T, groups, (per group + 2) · dim].
        query_weight, key_weight: [dim], weights of the norms over each head; None: no norms.
        cos, sin: [T, 1, rotated dimensions / 2].
        per_group: query heads per key head.
        eps: epsilon of the norms.
        interleaved: pairs of rotated dimensions are (0, 1), (2, 3), … instead of (0, half), ….
    Returns:
        query [T, groups · per group, dim], key and value [T, groups, dim]; contiguous.
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, query_weight: Tensor | None, key_weight: Tensor | None,
        cos: Tensor, sin: Tensor, per_group: int, eps: float, interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        mixed = mixed.contiguous()
        cos = cos.contiguous()
        sin = sin.contiguous()
        n, groups, width = mixed.shape
        dim = width // (per_group + 2)
        half = cos.size(-1)
        shape = {
            "GROUPS": groups, "PER_GROUP": per_group, "DIM": dim, "HALF": half,
            "BLOCK": triton.next_power_of_2(half),
            "REST": triton.next_power_of_2(max(dim - 2 * half, 1)),
            "WITH_NORM": query_weight is not None, "INTERLEAVED": interleaved, "TOKENS": _TOKENS,
            "num_warps": 4,
        }  # fmt: skip
        query = mixed.new_empty(n, groups * per_group, dim)
        key = mixed.new_empty(n, groups, dim)
        value = mixed.new_empty(n, groups, dim)
        weights = (mixed, mixed) if query_weight is None else (query_weight, key_weight)
        if n:
            grid = (triton.cdiv(n, _TOKENS), groups * (per_group + 2))
            _forward[grid](mixed, query, key, value, *weights, cos, sin, n, eps, **shape)
        kept = (mixed, query_weight, key_weight) if query_weight is not None else (None, None, None)
        ctx.save_for_backward(*kept, cos, sin)
        ctx.shape = shape
        ctx.eps = eps
        ctx.size = mixed.shape
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        shape = ctx.shape
        (n, groups, width) = ctx.size
        slots = shape["PER_GROUP"] + 2
        dim = shape["DIM"]
        grad_mixed = grads[0].new_empty(n, groups, width)
        programs = triton.cdiv(n, _TOKENS * _TILES)
        with_norm = query_weight is not None
        partial = torch.empty(
            programs if with_norm else 0, groups, slots, dim, dtype=torch.float32, device=cos.device
        )
        if not with_norm:  # placeholders that the kernel does not read
            mixed = query_weight = key_weight = grad_mixed
        if n:
            _backward[(programs, groups * slots)](
                mixed, *grads, query_weight, key_weight, cos, sin, grad_mixed, partial, n, ctx.eps,
                **shape, TILES=_TILES,
            )  # fmt: skip
        unused = (None,) * 5
        if not with_norm:
            return grad_mixed, None, None, *unused
        grad_query = partial[:, :, :-2].sum(dim=(0, 1, 2)).to(query_weight.dtype)
        grad_key = partial[:, :, -2].sum(dim=(0, 1)).to(key_weight.dtype)
        return grad_mixed, grad_query, grad_key, *unused
