"""The layers that stand in for what megatron-core leaves to Transformer Engine or computes anew in every layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that also works under sequence parallelism.

    megatron-core's own wrapper of ``torch.nn.RMSNorm`` refuses sequence parallelism. All that is needed is the mark
    on the weight, by which its gradient is summed over the tensor-parallel ranks, each of which saw some tokens only.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class SwiGLU(torch.autograd.Function):
    """silu(a) · b for ``x = [a | b]``; keeps ``x`` alone for the backward pass.

    The plain expression keeps silu(a) too and writes the two halves of the gradient twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_a, grad_b = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(a), out=grad_b)
        torch.ops.aten.silu_backward.grad_input(grad * b, a, grad_input=grad_a)
        return grad_x


class SwiGLUActivation(torch.nn.Module):
    """The activation of a gated MLP on ``[gate | up]``, in Megatron's slot for such a module."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":  # Megatron's expression, which torch.compile fuses there
            return bias_swiglu_impl(x, None, False, False)
        return SwiGLU.apply(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to checkpoint; Megatron's MLP asks each of its parts."""
        return {}
