"""Attention kernels of torch that return the log-sum-exp of the scores.

A row's output and log-sum-exp can be changed to those of a softmax over more scores, such as a sink
or the keys of another call. The backward pass of flash attention computes the probabilities from
the log-sum-exp, and the gradient of the softmax from the output. So with the changed values it
gives the exact gradients of its own scores' part.

Source: Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slime.trainer.megatron.packed import AttentionBlock, PackedSequences


class Kernel(Protocol):
    """Attention by one call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output in the shape of ``query`` [..., dim], and the log-sum-exp of each row's
        scores, float32 [...]."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""


class PackedKernel:
    """torch's causal flash attention for packed sequences: query [T, heads, dim], keys and values
    [T, groups, dim].

    Args:
        ends: int32 [sequences + 1], the cumulative lengths of the sequences.
        longest: the largest length.
    """

    def __init__(self, ends: Tensor, longest: int, scale: float, window: int | None = None) -> None:
        self._ends = ends
        self._longest = longest
        self._options = {
            "scale": scale,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }
        self._state: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(sequences: PackedSequences, scale: float, window: int | None) -> PackedKernel:
        return PackedKernel(sequences.cu_seqlens_q, sequences.max_seqlen_q, scale, window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, self._ends, self._ends, self._longest, self._longest, 0.0, True,
            False, **self._options,
        )  # fmt: skip
        self._state = state, unused
        return out, lse.t()  # the kernel returns [heads, T]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._state is not None
        grads = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse.t().contiguous(), self._ends, self._ends,
            self._longest, self._longest, 0.0, True, *self._state, **self._options,
        )  # fmt: skip
        return cast(tuple[Tensor, Tensor, Tensor], grads)


class BlockKernel:
    """torch's CPU flash attention on a dense block: query, key and value [B, heads, L, dim] with
    equal numbers of heads."""

    def __init__(self, block: AttentionBlock, scale: float, dtype: torch.dtype) -> None:
        self._options: dict[str, Any] = {"scale": scale}
        if block.masked:
            self._options["attn_mask"] = block.bias.to(dtype)
        self._is_causal = not block.masked

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self._is_causal, **self._options
        )
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, self._is_causal, **self._options
        )
        return cast(tuple[Tensor, Tensor, Tensor], grads)
