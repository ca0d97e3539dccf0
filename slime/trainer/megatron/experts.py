"""The experts of one rank as stacked weights: one parameter per projection, one product over all
experts.

    rows [R, H], sorted by expert ─ fc1 ─► [gate | up] ─ swiglu · weight ─► [R, F] ─ fc2 ─► [R, H]

On a GPU in bfloat16 the product is `torch._grouped_mm`, one kernel for all experts; elsewhere a
loop over them. Neither needs the number of rows per expert to be a multiple of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.models.activations import quick_gelu
from slime.trainer.megatron.layers import ClampedGLU, GatedUnit, leave_as_it_is


class GroupedExperts(MegatronModule):
    """The local experts of a layer, in the slot for experts of Megatron's MoE layers.

    Args:
        num_local_experts: experts on this rank; ``pg_collection`` gives the rank's position among
            the expert ranks.
        biases: both projections have a bias.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        biases: bool = False,
    ) -> None:
        super().__init__(config)
        width = config.moe_ffn_hidden_size
        assert width is not None
        gated = config.gated_linear_unit
        self.linear_fc1 = StackedLinear(
            config,
            num_local_experts,
            config.hidden_size,
            width,
            pg_collection,
            cut="out",
            halves=2 if gated else 1,
            bias=biases,
        )
        self.linear_fc2 = StackedLinear(
            config,
            num_local_experts,
            width,
            config.hidden_size,
            pg_collection,
            cut="in",
            init=config.output_layer_init_method,
            bias=biases,
        )
        self.activation_recompute = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(self, rows: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """Rows [R, H] sorted by expert → weighted outputs [R, H]; under expert tensor parallelism
        the partial sum of this shard.

        Args:
            ends: int32 [local experts], where each expert's rows end.
            weights: router weights, float32 [R].
        """
        hidden = self.linear_fc1(rows, ends)
        if not self.activation_recompute:
            return self.linear_fc2(self._activate(hidden, weights), ends, weights)
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        activated = checkpoint.checkpoint(self._activate, hidden, weights)
        output = self.linear_fc2(activated, ends, weights)
        checkpoint.discard_output_and_register_recompute(output)
        return output

    def _activate(self, hidden: Tensor, weights: Tensor) -> Tensor:
        config = self.config
        weights = weights[:, None]
        if config.gated_linear_unit and config.activation_func is torch.nn.functional.silu:
            if hidden.device.type == "cuda":  # torch.compile fuses Megatron's expression there
                return weighted_bias_swiglu_impl(hidden, None, weights)
            activated = GatedUnit.apply(hidden, config.activation_func)
        elif config.gated_linear_unit and config.activation_func is quick_gelu:
            activated = ClampedGLU.apply(
                hidden, config.activation_func_clamp_value, config.glu_linear_offset
            )
        elif config.gated_linear_unit:
            gate, up = hidden.chunk(2, dim=-1)
            activated = config.activation_func(gate) * up
        else:
            activated = config.activation_func(hidden)
        return (activated * weights).to(hidden.dtype)

    def backward_dw(self) -> None:
        """Do nothing: this is Megatron's hook for delayed weight gradients, which are not used."""


class StackedLinear(torch.nn.Module):
    """One projection of all local experts: ``weight`` [experts, out, in], sharded over the expert
    tensor-parallel ranks, and ``bias`` [experts, out], sharded with the rows of the weight.

    Args:
        width_in, width_out: widths of one unsharded expert; ``width_out`` is that of one half.
        cut: the side that expert tensor parallelism shards, "in" or "out".
        halves: 2 for [gate | up], of which every shard has a part each; else 1.
        init: initialises the weight of one unsharded expert; default: ``config.init_method``.
        bias: add a bias; otherwise the attribute ``bias`` is None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_local_experts: int,
        width_in: int,
        width_out: int,
        groups: ProcessGroupCollection,
        *,
        cut: str,
        halves: int = 1,
        init: Callable[[Tensor], Any] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.cut_axis = 1 if cut == "out" else 2
        self.halves = halves
        self.shard = groups.expt_tp.rank()
        self.shards = groups.expt_tp.size()
        self.expert_rank = groups.ep.rank()
        self.expert_ranks = groups.ep.size()
        self.replica = groups.expt_dp.rank()
        rows = width_out * halves // (self.shards if cut == "out" else 1)
        columns = width_in // (self.shards if cut == "in" else 1)
        size = (num_local_experts, rows, columns)
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(size, dtype=config.params_dtype, device=device)
        )
        # Megatron's gradient buffers, optimizers and norms recognise expert weights by this mark.
        # It is set at every expert-parallel size, so that the layout of optimizer states does not
        # depend on that size.
        self.weight.allreduce = False  # type: ignore[attr-defined]
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, self.cut_axis, 1)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            values = torch.zeros(size[:2], dtype=config.params_dtype, device=device)
            self.bias = torch.nn.Parameter(values)
            self.bias.allreduce = False  # type: ignore[attr-defined]
            # if all shards hold the same values, gradient norms count only the first shard
            is_own = cut == "out" or self.shard == 0
            tensor_parallel.set_tensor_model_parallel_attributes(self.bias, is_own, 1, 1)
        self._initialise(init or config.init_method, halves * width_out, width_in)

    @torch.no_grad()
    def _initialise(self, init: Callable[[Tensor], Any], rows: int, columns: int) -> None:
        # every rank draws all experts unsharded, so that random weights do not depend on the layout
        if init is leave_as_it_is:
            return
        local = self.weight.size(0)
        first = local * self.expert_rank
        for expert in range(local * self.expert_ranks):
            whole = torch.empty(rows, columns, device=self.weight.device)
            init(whole)
            if first <= expert < first + local:
                halves = whole.chunk(self.halves, dim=0)
                part = torch.cat(
                    [half.chunk(self.shards, dim=self.cut_axis - 1)[self.shard] for half in halves]
                )
                self.weight[expert - first].copy_(part)

    def forward(self, rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """[R, in] sorted by expert → [R, out].

        Args:
            weights: float32 [R], factors of the bias, if ``rows`` are already weighted.
        """
        output = grouped_linear(rows, self.weight, ends)
        if self.bias is None:
            return output
        bias = self.bias
        if self.cut_axis == 2 and self.shards > 1:
            # the shards' outputs are summed, so each shard adds its share of the bias
            bias = _Share.apply(bias, self.shards)
        return add_expert_bias(output, bias, ends, weights)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return weight and bias as parts of tensors [all experts, out, in] and [all experts, out],
        which every expert layout can load."""
        of_experts = ((len(sharded_offsets), self.expert_rank, self.expert_ranks),)
        found = sharded_tensor(
            f"{prefix}weight",
            self.weight,
            sharded_offsets,
            (self.cut_axis, self.shard, self.shards),
            (0, 0, self.replica),
            self.halves,
            of_experts=of_experts,
        )
        if self.bias is not None:
            is_cut = self.cut_axis == 1
            found |= sharded_tensor(
                f"{prefix}bias",
                self.bias,
                sharded_offsets,
                (1, self.shard, self.shards) if is_cut else None,
                (0, 0 if is_cut else self.shard, self.replica),
                self.halves,
                of_experts=of_experts,
            )
        return found


def sharded_tensor(
    key: str,
    tensor: Tensor,
    offsets: tuple[Any, ...],
    place: tuple[int, int, int] | None,
    replica_id: ReplicaId,
    halves: int = 1,
    *,
    of_experts: tuple[Any, ...] = (),
    is_padded: bool = False,
) -> ShardedStateDict:
    """Return this rank's part of a tensor, for a checkpoint that every layout can load.

    Args:
        place: (sharded axis, shard, number of shards); None if the tensor is not sharded.
        halves: 2 if each shard has a part of gate and one of up, else 1.
        of_experts: the offset of this rank's experts, if the tensor holds those of all ranks.
        is_padded: the full tensor has padding rows after the vocabulary, depending on the layout.
    """
    before = len(offsets)

    def shards(
        key: str, part: Tensor, replica_id: ReplicaId, flattened_range: slice | None = None
    ) -> list[ShardedTensor]:
        assert flattened_range is None, "optimizers keep these tensors whole"
        pieces = part.chunk(halves, dim=place[0]) if place and halves > 1 else [part]
        found = []
        for i, piece in enumerate(pieces):
            cut: tuple[Any, ...] = ()
            if place is not None:
                axis, number, count = place
                cut = ((before + axis, number + i * count, count * halves),)
            found.append(
                ShardedTensor.from_rank_offsets(
                    key,
                    piece,
                    *offsets,
                    *of_experts,
                    *cut,
                    replica_id=replica_id,
                    prepend_axis_num=before,
                    allow_shape_mismatch=is_padded,
                )
            )
        return found

    if halves == 1:
        (one,) = shards(key, tensor, replica_id)
        one.data = tensor
        return {key: one}
    assert place is not None
    axis = place[0]
    return {
        key: ShardedTensorFactory(
            key, tensor, shards, lambda parts: torch.cat(parts, axis), replica_id
        )
    }


class _Share(torch.autograd.Function):
    """x / shards, but the gradient of x is that of the shards' sum, which equals x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: int) -> Tensor:
        return x / shards

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def add_expert_bias(
    rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Add to each row [R, width] its expert's bias, times the row's weight.

    Args:
        bias: [experts, width].
        ends: int32 [experts], where each expert's rows end.
        weights: float32 [R]; None stands for 1.

    Example (two rows for expert 0, none for expert 1):
        >>> ends = torch.tensor([2, 2], dtype=torch.int32)
        >>> bias = torch.tensor([[1.0], [9.0]])
        >>> add_expert_bias(torch.zeros(2, 1), bias, ends, torch.tensor([1.0, 0.5])).tolist()
        [[1.0], [0.5]]
    """
    return cast(Tensor, _AddExpertBias.apply(rows, bias, ends, weights))


class _AddExpertBias(torch.autograd.Function):
    """Saves no rows for the backward pass. The gradient of a bias sums its expert's rows in a fixed
    order, so it is deterministic on a GPU too."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None
    ) -> Tensor:
        lengths = ends.diff(prepend=ends.new_zeros(1)).long()
        ctx.save_for_backward(bias, lengths, weights)
        return rows + _weighted(_per_row(bias, lengths, rows), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        bias, lengths, weights = ctx.saved_tensors
        grad_bias = grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_bias = torch.segment_reduce(
                _weighted(grad.float(), weights),
                "sum",
                lengths=lengths,
                axis=0,
                unsafe=True,
                initial=0.0,
            ).to(bias.dtype)
        if weights is not None and ctx.needs_input_grad[3]:
            products = grad.float() * _per_row(bias, lengths, grad)
            grad_weights = products.sum(dim=-1).to(weights.dtype)
        return grad, grad_bias, None, grad_weights


def _per_row(bias: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    return bias.repeat_interleave(lengths, dim=0, output_size=rows.size(0))


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else (rows * weights[:, None]).to(rows.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Row r of expert e → ``weight[e] @ rows[r]``; the gradient of an expert without rows is
    exactly 0.

    Args:
        rows: [R, in], sorted by expert; R may be 0.
        weight: [experts, out, in].
        ends: int32 [experts], where each expert's rows end; the last one is R.

    Example (two rows for expert 0, none for expert 1):
        >>> weight = torch.tensor([[[2.0]], [[3.0]]])
        >>> ends = torch.tensor([2, 2], dtype=torch.int32)
        >>> grouped_linear(torch.tensor([[1.0], [5.0]]), weight, ends).tolist()
        [[2.0], [10.0]]
    """
    return cast(Tensor, _GroupedLinear.apply(rows, weight, ends))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return products(rows, weight)[0](rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        multiply, weight_gradient = products(rows, weight)
        grad_rows = (
            multiply(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
        )
        grad_weight = weight_gradient(grad, rows, ends) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def products(rows: Tensor, weight: Tensor) -> tuple[Product, Product]:
    """Return two functions: (rows [R, in], weight [E, out, in], ends) → [R, out] and (gradient
    [R, out], rows [R, in], ends) → [E, out, in]."""
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])
    if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and rows.size(0) > 0:
        return grouped_product, grouped_weight_gradient
    return looped_product, looped_weight_gradient


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def grouped_weight_gradient(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    result = torch._grouped_mm(grad.t(), rows, offs=ends)
    # the kernel may leave uninitialised memory for experts without rows
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return result.masked_fill_(empty[:, None, None], 0)


def looped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result = rows.new_empty(rows.size(0), weight.size(1))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[expert].t(), out=result[start:end])
        start = end
    return result


def looped_weight_gradient(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    result = grad.new_zeros(ends.numel(), grad.size(1), rows.size(1))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(grad[start:end].t(), rows[start:end], out=result[expert])
        start = end
    return result
