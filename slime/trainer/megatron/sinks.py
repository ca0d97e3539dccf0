"""Attention with sinks: each head has a learned score s, which belongs to no token and takes part
in the softmax (gpt-oss).

    p = softmax([scores | s]) without its last column

Every kernel that returns the log-sum-exp of the scores can be used. Its output is multiplied by a
factor, and with the changed output and log-sum-exp its own backward pass gives the gradients of
queries, keys and values:

    out' = out · sigmoid(lse - s)      lse' = logaddexp(lse, s)
    ds   = -Σ exp(s - lse') · ⟨dout, out'⟩, over all rows of the head
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime.trainer.megatron.attention import PackedAttention
from slime.trainer.megatron.flash import BlockKernel, Kernel, PackedKernel
from slime.trainer.megatron.layers import leave_as_it_is
from slime.trainer.megatron.packed import AttentionBlock, PackedSequences


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel
) -> Tensor:
    """Attend with ``kernel`` and one sink per head.

    Args:
        sinks: scores, one per head, in a shape that broadcasts to the kernel's log-sum-exp.
    Returns:
        The output, in the shape of ``query``.
    """
    return cast(Tensor, _AttendWithSinks.apply(query, key, value, sinks, kernel))


class _AttendWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: Kernel
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        scores = sinks.to(lse.dtype)
        out = (out * torch.sigmoid(lse - scores)[..., None]).to(query.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, torch.logaddexp(lse, scores))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(grad.contiguous(), query, key, value, out, lse)
        share = torch.exp(sinks.to(lse.dtype) - lse)
        products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        grad_sinks = -(share * products).sum_to_size(sinks.shape).to(sinks.dtype)
        return *grads, grad_sinks, None


def explicit_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Attend by the definition: query, key, value [B, heads, L, dim], ``sinks`` [heads], ``bias`` 0
    or -inf [B or 1, 1, L, L]."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale + bias
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


class SinkAttention(PackedAttention):
    """`PackedAttention` with sinks in ``softmax_offset`` (Megatron's name) [heads of this rank].

    On a GPU it uses torch's own kernel, also between Transformer Engine's layers.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        group = parallel_state.get_tensor_model_parallel_group()
        whole = torch.zeros(config.num_attention_heads, device=torch.cuda.current_device())
        if config.init_method is not None and config.init_method is not leave_as_it_is:
            config.init_method(whole[:, None])
        mine = whole.chunk(group.size())[group.rank()].to(config.params_dtype)
        self.softmax_offset = torch.nn.Parameter(mine)
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _sinks(self, heads: int, sequences: PackedSequences) -> Tensor:
        """Return the sinks of the ``heads`` that this rank computes; under context parallelism,
        these are a part of the tensor-parallel rank's heads."""
        context = sequences.context
        if context is None:
            return self.softmax_offset
        return self.softmax_offset[context.place.rank * heads :][:heads]

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> Tensor:
        kernel = PackedKernel.of(sequences, self.scale, self.window)
        return attend_with_sinks(query, key, value, self._sinks(query.size(1), sequences), kernel)

    def _in_block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block: AttentionBlock,
        sequences: PackedSequences,
    ) -> Tensor:
        heads = query.size(2)
        sinks = self._sinks(heads, sequences)
        if key.size(2) != heads:
            key, value = (x.repeat_interleave(heads // x.size(2), dim=2) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if query.is_cuda:  # float32, which the GPU's flash attention does not support
            return explicit_with_sinks(q, k, v, sinks, block.bias, self.scale).transpose(1, 2)
        kernel = BlockKernel(block, self.scale, query.dtype)
        return attend_with_sinks(q, k, v, sinks[:, None], kernel).transpose(1, 2)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return this rank's sinks as a shard of those of all heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
