"""Causal attention in which the tokens of an image also attend to the later tokens of their image.

Two causal calls of flash attention compute it, without a mask. The first one is that of text. The
second one has the tokens of images in reversed order, each with the token after it as its key:

    an image's tokens       s   s+1  ...  e-1
    queries of call two     e-2  ...  s+1   s        a query attends to its own column and to those
    keys of call two        e-1  ...  s+2  s+1       before it: to all later tokens of its image

No pair of tokens is in both calls. Their outputs are joined by the log-sum-exp of their scores, and
each call's own backward pass gives the gradients (`slime.trainer.megatron.flash`). A window limits
the first call only.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from slime.trainer.megatron.flash import Kernel, PackedKernel
from slime.trainer.megatron.packed import LaterTokens, PackedSequences


def attend_within_images(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with torch's flash attention; arguments as for `PackedAttention.forward`."""
    later = sequences.later
    assert later is not None
    causal = PackedKernel.of(sequences, scale, window)
    own = PackedKernel(later.ends, later.longest, scale)
    return cast(Tensor, _AttendWithinImages.apply(query, key, value, later, causal, own))


class _AttendWithinImages(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        later: LaterTokens,
        causal: Kernel,
        own: Kernel,
    ) -> Tensor:
        out, lse = causal.forward(query, key, value)
        rows = later.queries
        keys = later.keys
        later_out, later_lse = own.forward(query[rows], key[keys], value[keys])
        earlier_lse = lse[rows]
        joint = torch.logaddexp(earlier_lse, later_lse)
        earlier_share = torch.exp(earlier_lse - joint)[..., None]
        later_share = torch.exp(later_lse - joint)[..., None]
        joined = out[rows] * earlier_share + later_out * later_share
        out[rows] = joined.to(out.dtype)
        lse = lse.index_copy(0, rows, joint)
        ctx.kernels = causal, own
        ctx.later = later
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        causal, own = ctx.kernels
        rows = ctx.later.queries
        keys = ctx.later.keys
        grad = grad.contiguous()
        grads = causal.backward(grad, query, key, value, out, lse)
        parts = own.backward(grad[rows], query[rows], key[keys], value[keys], out[rows], lse[rows])
        # no place occurs twice in rows or in keys
        for whole, part, places in zip(grads, parts, (rows, keys, keys), strict=True):
            whole[places] += part
        return *grads, None, None, None
