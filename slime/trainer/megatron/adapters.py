"""Low-rank adapters beside frozen Linear layers, at every parallel layout.

    column-parallel   x ─ A ─► [T, parts · rank] ─ copied / gathered ─► spread B ─► + output
    row-parallel      x ─ A ─► [T, rank] ─ summed / scattered ─► B ─► + output
    routed experts    rows ─ A of the expert ─► B of the expert ─► + output
    embedding         tokens ─ rows of Aᵀ ─► [T, rank] ─ summed / scattered ─► B ─► + output
    output layer      x ─ A ─► [T, rank] ─ copied / gathered ─► B, within the log-probs' product

An adapter's collectives exchange rows as wide as its rank, once per direction. If every
tensor-parallel rank holds a side (A or B), its gradient is complete on each rank or, under sequence
parallelism, covers only that rank's tokens. Megatron's mark ``sequence_parallel`` says the latter.

Routed experts compute inside the dispatch, which allows no collectives. Sides that several ranks
hold get partial gradients there, which `finish_gradients` adds up once per step:

    A of gate and up, B of down             over the expert-tensor-parallel ranks
    the same, shared by all experts         over the tensor-parallel ranks; data parallelism, whose
                                            ranks hold all experts, does the rest

Except for routed experts, the backward pass computes gradients in float32 and adds them to
Megatron's buffer itself: autograd would round them to the parameters' 16 bits per micro-batch.

`slime.models.adapters` defines parameters and names. `attach` changes the class of each adapted
layer to a subclass, which works for local layers and for Transformer Engine's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.layers import (
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.checkpoints.hf_io import fill_adapters
from slime.checkpoints.megatron_names import global_name
from slime.models import table_of
from slime.models.adapters import (
    AdaptedLayer,
    AdapterConfig,
    adapted_layers,
    adapter_family,
    begins_with_zeros,
    with_single_experts,
)
from slime.models.layouts import GATE_UP, STACKED_GATE_UP, Shard, SomeParts
from slime.models.spec import ModelSpec
from slime.models.table import shapes_of
from slime.trainer.megatron.experts import StackedLinear, grouped_linear, sharded_tensor

_ALIGNMENT = 8
"""Grouped products need row widths that are a multiple of this many elements."""


class LowRankAdapter(nn.Module):
    """Base class of the adapters of all kinds of layers.

    Args:
        layer: the rules of the adapted layer and of its adapter.
        spread: [rows of ``up``, parts]: 1 where a row belongs to a part that has an adapter.
        down, up: shapes of this rank's shards of A and B.
    Attributes:
        is_on: if False, only the base layer is computed.
        dropout: the current dropout probability of the inputs.
    """

    def __init__(
        self,
        layer: AdaptedLayer,
        spread: Tensor,
        down: tuple[int, ...],
        up: tuple[int, ...],
        config: TransformerConfig,
    ) -> None:
        super().__init__()
        parts = sum(layer.present)
        self.scaling = layer.scaling
        self.is_on = True
        self.dropout = 0.0
        self.halves = 2 if _is_gated(layer) else 1
        like = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.down = nn.Parameter(torch.zeros(down, **like))
        self.up = nn.Parameter(torch.zeros(up, **like))
        is_plain = parts == 1 and all(layer.present)
        self.spread: Tensor | None
        self.register_buffer("spread", None, persistent=False)
        if not is_plain:
            self.spread = spread[:, :, None].to(config.params_dtype).to(self.up.device)

    @property
    def begins_with_zeros(self) -> Tensor:
        """The side (A or B) that is initialised with zeros, so that the adapter has no effect."""
        return self.up

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return both sides as shards that every layout can load."""
        assert metadata is not None
        return self._shards(prefix, sharded_offsets, metadata["dp_cp_group"].rank())

    def _shards(self, prefix: str, offsets: tuple[Any, ...], replica: int) -> ShardedStateDict:
        """Do the work of `sharded_state_dict` on data- and context-parallel rank ``replica``."""
        raise NotImplementedError


def _wide(up: Tensor, spread: Tensor | None) -> Tensor:
    """Return [..., rows, parts · rank]: each row of ``up`` in its part's columns, else zeros."""
    return up if spread is None else (up.unsqueeze(-2) * spread).flatten(-2)


def give_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Add a gradient to the parameter's gradient buffer, and return the tensor for autograd: an
    uninitialised dummy, as in Megatron's own layers. Without a buffer, return the gradient in the
    parameter's dtype."""
    buffer = getattr(parameter, "main_grad", None)
    if buffer is None:
        return gradient.to(parameter.dtype)
    buffer.add_(gradient)
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(parameter)


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32 for factors of any dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.ops.aten.mm.dtype(a, b, torch.float32)
    return a.float() @ b.float()


def _is_gated(layer: AdaptedLayer) -> bool:
    layout = layer.up.layout
    return (layout.fused if isinstance(layout, SomeParts) else layout) in (GATE_UP, STACKED_GATE_UP)


class LinearAdapter(LowRankAdapter):
    """The adapter of a column- or row-parallel layer, including the output layer."""

    def __init__(
        self, layer: AdaptedLayer, spread: Tensor, weight: Tensor, config: TransformerConfig
    ) -> None:
        rows, columns = weight.shape
        ranks = sum(layer.present) * layer.rank
        super().__init__(layer, spread, (ranks, columns), (rows, layer.rank), config)
        self.of_vocabulary = layer.base.is_output
        self.is_row_parallel = layer.is_row_parallel
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.sequence_parallel = config.sequence_parallel and self.group.size() > 1
        cut, whole, axis = (
            (self.down, self.up, 1) if self.is_row_parallel else (self.up, self.down, 0)
        )
        set_tensor_model_parallel_attributes(cut, True, axis, 1)
        whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, x: Tensor, compute_base: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer with its adapter.

        Args:
            x: inputs of the layer on this rank, [T, 1, in].
            compute_base: the frozen layer, returns outputs [T, 1, out] and bias; called once.
        Returns:
            The result of ``compute_base``, with the adapter's output added to the outputs.
        """
        if not self.is_on:
            return compute_base(x)
        x, hidden = self.low_rank(x)
        output, bias = compute_base(x)
        return _added(output, hidden, self), bias

    def low_rank(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, 1, in] on this rank → an alias of x that only the frozen layer may use, and A·x
        [T, 1, rank] for the tokens whose outputs this rank computes."""
        if self.dropout:
            _, hidden = _Down.apply(F.dropout(x, self.dropout), self.down)
        else:
            x, hidden = _Down.apply(x, self.down)
        group = self.group
        if group.size() == 1:
            return x, hidden
        if self.is_row_parallel:
            return x, _summed(hidden, group, self.sequence_parallel)
        if self.sequence_parallel:
            return x, gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        return x, copy_to_tensor_model_parallel_region(hidden, group=group)

    def _shards(self, prefix: str, offsets: tuple[Any, ...], replica: int) -> ShardedStateDict:
        place = (1 if self.is_row_parallel else 0, self.group.rank(), self.group.size())
        cut = (0, 0, replica)
        whole = (0, self.group.rank(), replica)
        if self.is_row_parallel:
            down = sharded_tensor(f"{prefix}down", self.down, offsets, place, cut)
            return down | sharded_tensor(f"{prefix}up", self.up, offsets, None, whole)
        down = sharded_tensor(f"{prefix}down", self.down, offsets, None, whole)
        return down | sharded_tensor(
            f"{prefix}up", self.up, offsets, place, cut, self.halves, is_padded=self.of_vocabulary
        )


class EmbeddingAdapter(LowRankAdapter):
    """The adapter of the vocabulary-parallel embedding, without dropout, as in PEFT."""

    def __init__(
        self, layer: AdaptedLayer, base: VocabParallelEmbedding, config: TransformerConfig
    ) -> None:
        tokens, width = base.weight.shape
        no_parts = torch.ones(1, 1)
        super().__init__(layer, no_parts, (tokens, layer.rank), (width, layer.rank), config)
        self.first_token = base.vocab_start_index
        self.group = base.tp_group
        self.sequence_parallel = base.reduce_scatter_embeddings
        set_tensor_model_parallel_attributes(self.down, True, 0, 1)
        # each rank has the outputs of some tokens
        self.up.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def begins_with_zeros(self) -> Tensor:
        return self.down

    def forward(self, tokens: Tensor, compute_base: Callable[[Tensor], Tensor]) -> Tensor:
        """Token ids int64 [1, T] → the result of ``compute_base`` plus the adapter's output,
        [1, T, hidden], or [T / ranks, 1, hidden] under sequence parallelism."""
        output = compute_base(tokens)
        if not self.is_on:
            return output
        local = tokens - self.first_token
        is_here = (local >= 0) & (local < self.down.size(0))
        hidden = _LookedUp.apply(local.where(is_here, 0), is_here, self.down)
        if self.sequence_parallel:
            hidden = hidden.transpose(0, 1).contiguous()
        if self.group.size() > 1:
            hidden = _summed(hidden, self.group, self.sequence_parallel)
        return _added(output, hidden, self)

    def _shards(self, prefix: str, offsets: tuple[Any, ...], replica: int) -> ShardedStateDict:
        rank = self.group.rank()
        place = (0, rank, self.group.size())
        down = sharded_tensor(
            f"{prefix}down", self.down, offsets, place, (0, 0, replica), is_padded=True
        )
        return down | sharded_tensor(f"{prefix}up", self.up, offsets, None, (0, rank, replica))


def _summed(hidden: Tensor, group: Any, is_scattered: bool) -> Tensor:
    """Sum A·x over the ranks; with ``is_scattered`` each rank gets only the rows of its tokens."""
    if is_scattered:
        return reduce_scatter_to_sequence_parallel_region(hidden, group=group)
    return reduce_from_tensor_model_parallel_region(hidden, group=group)


def _added(output: Tensor, hidden: Tensor, adapter: LowRankAdapter) -> Tensor:
    if output._is_view():  # Megatron's reduction may return a view of its input
        output = output.clone()
    return _AddProduct.apply(output, hidden, adapter.up, adapter.spread, adapter.scaling)


class _LookedUp(torch.autograd.Function):
    """Rows of ``down`` [tokens, r] by index [1, T] → [1, T, r]; zeros where not ``is_here``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, is_here: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(local, is_here)
        ctx.down = down
        return F.embedding(local, down) * is_here[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        local, is_here = ctx.saved_tensors
        rows = (grad.float() * is_here[..., None]).flatten(0, -2)
        gradient = rows.new_zeros(ctx.down.shape).index_add_(0, local.flatten(), rows)
        return None, None, give_gradient(ctx.down, gradient)


class _Down(torch.autograd.Function):
    """x [T, 1, in], down [r, in] → an alias of x for the frozen layer, and x · downᵀ [T, 1, r].

    The backward pass adds the adapter's input gradient to the frozen layer's in place. Only the
    frozen layer uses the alias of x, so nothing else uses that gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.down = down
        return x.view_as(x), F.linear(x, down)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        (x,) = ctx.saved_tensors
        down = ctx.down
        rows = grad_hidden.flatten(0, -2)
        grad_down = give_gradient(down, _float_product(rows.t(), x.flatten(0, -2)))
        if not ctx.needs_input_grad[0]:
            return None, grad_down
        grad_x.view(-1, grad_x.size(-1)).addmm_(rows, down)
        return grad_x, grad_down


class _AddProduct(torch.autograd.Function):
    """output [T, 1, out] += scaling · hidden [T, 1, parts · r] · wideᵀ. This can work in place,
    because a frozen layer does not save its outputs. ``wide`` is the result of `_wide`."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, up: Tensor, spread: Tensor | None, scaling: float
    ) -> Tensor:
        wide = _wide(up, spread)
        ctx.save_for_backward(hidden, wide, spread)
        ctx.up = up
        ctx.scaling = scaling
        ctx.mark_dirty(output)
        output.view(-1, wide.size(0)).addmm_(hidden.flatten(0, -2), wide.t(), alpha=scaling)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        hidden, wide, spread = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_hidden = (rows @ wide).mul_(ctx.scaling)
        grad_up = _float_product(rows.t(), hidden.flatten(0, -2)).mul_(ctx.scaling)
        if spread is not None:
            grad_up = (grad_up.unflatten(-1, (spread.size(1), -1)) * spread).sum(1)
        given = give_gradient(ctx.up, grad_up)
        return grad, grad_hidden.view(hidden.shape), given, None, None


class ExpertAdapter(LowRankAdapter):
    """The adapters of one projection of all local experts."""

    def __init__(
        self, layer: AdaptedLayer, spread: Tensor, base: StackedLinear, config: TransformerConfig
    ) -> None:
        experts, rows, columns = base.weight.shape
        down = (sum(layer.present) * layer.rank, columns)
        up = (rows, layer.rank)
        super().__init__(
            layer,
            spread,
            (experts, *down) if layer.down.is_expert else down,
            (experts, *up) if layer.up.is_expert else up,
            config,
        )
        self.is_row_parallel = layer.is_row_parallel
        self.shard = base.shard
        self.shards = base.shards
        self.expert_rank = base.expert_rank
        self.expert_ranks = base.expert_ranks
        self.replica = base.replica
        cut, whole = (self.down, self.up) if self.is_row_parallel else (self.up, self.down)
        cut.allreduce = False  # type: ignore[attr-defined]  # as of expert weights
        set_tensor_model_parallel_attributes(cut, True, 2 if self.is_row_parallel else 1, 1)
        if whole.dim() == 2:
            whole.summed_over = "tensor"  # type: ignore[attr-defined]
            return
        whole.allreduce = False  # type: ignore[attr-defined]
        # "parallel", as other ranks hold other experts; "shared" excludes duplicates from norms
        set_tensor_model_parallel_attributes(whole, True, 1, 1)
        whole.shared = self.shard > 0  # type: ignore[attr-defined]
        whole.summed_over = "expert tensor"  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, output: Tensor, ends: Tensor) -> Tensor:
        """Rows [R, in] sorted by expert, outputs [R, out] → outputs plus the adapters' outputs,
        [R, out]."""
        if not self.is_on:
            return output
        down: Tensor = self.down
        up = _wide(self.up, self.spread)
        missing = -down.size(-2) % _ALIGNMENT
        if missing:
            down = F.pad(down, (0, 0, 0, missing))
            up = F.pad(up, (0, missing))
        added = _product(_product(rows, down, ends), up, ends)
        return torch.add(output, added, alpha=self.scaling)

    def _shards(self, prefix: str, offsets: tuple[Any, ...], replica: int) -> ShardedStateDict:
        """Return one tensor per side for all experts."""
        axis = 2 if self.is_row_parallel else 1
        found: ShardedStateDict = {}
        for name, side in (("down", self.down), ("up", self.up)):
            is_cut = (name == "down") == self.is_row_parallel
            if side.dim() == 2:  # one for all experts
                tensor_rank = parallel_state.get_tensor_model_parallel_rank()
                found |= sharded_tensor(
                    f"{prefix}{name}", side, offsets, None, (0, tensor_rank, replica)
                )
                continue
            found |= sharded_tensor(
                f"{prefix}{name}",
                side,
                offsets,
                (axis, self.shard, self.shards) if is_cut else None,
                (0, 0 if is_cut else self.shard, self.replica),
                self.halves if is_cut else 1,
                of_experts=((len(offsets), self.expert_rank, self.expert_ranks),),
            )
        return found


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.linear(rows, weight) if weight.dim() == 2 else grouped_linear(rows, weight, ends)


# -- into the model --------------------------------------------------------------------------------


@functools.cache
def _adapted(linear: type) -> type:
    """Return a subclass of a layer's class that adds what ``self.adapter`` computes."""

    class Adapted(linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, StackedLinear):
                return self.adapter(args[0], super().forward(*args, **kwargs), args[1])
            base = super().forward
            return self.adapter(args[0], lambda x: base(x, *args[1:], **kwargs))

        def sharded_state_dict(
            self,
            prefix: str = "",
            sharded_offsets: tuple[Any, ...] = (),
            metadata: dict[str, Any] | None = None,
        ) -> ShardedStateDict:
            # the layer's own method treats parameters of submodules as the layer's
            adapter = self._modules.pop("adapter")
            try:
                found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            finally:
                self._modules["adapter"] = adapter
            own = adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
            return {**found, **own}

    Adapted.__name__ = Adapted.__qualname__ = f"{linear.__name__}WithAdapter"
    return Adapted


def attach(chunks: Sequence[nn.Module], spec: ModelSpec, adapters: AdapterConfig) -> None:
    """Freeze the model and give each target layer an adapter of zeros, which has no effect.

    Args:
        chunks: this rank's model chunks, before data-parallel wrapping.
    """
    family = with_single_experts(table_of(spec))
    rules = {layer.base: layer for layer in adapted_layers(family, spec, adapters)}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for name, module in list(chunk.named_modules()):
            weight = module._parameters.get("weight")
            if weight is None or weight.dim() < 2:
                continue
            is_stacked = isinstance(module, StackedLinear)
            match = family.match_megatron(
                global_name(chunk, f"{name}.weight{'0' if is_stacked else ''}"), spec
            )
            if match is None or match.rule not in rules:
                continue
            layer = rules[match.rule]
            config: Any = chunk.config
            if isinstance(module, StackedLinear):
                spread = _spread(layer, spec, Shard(module.shard, module.shards))
                module.adapter = ExpertAdapter(layer, spread, module, config)
            elif isinstance(module, VocabParallelEmbedding):
                module.adapter = EmbeddingAdapter(layer, module, config)
            else:
                group = parallel_state.get_tensor_model_parallel_group()
                spread = _spread(layer, spec, Shard(group.rank(), group.size()))
                module.adapter = LinearAdapter(layer, spread, weight, config)
            kind: Any = type(module)
            module.__class__ = _adapted(kind)


def _spread(layer: AdaptedLayer, spec: ModelSpec, shard: Shard) -> Tensor:
    """Return [rows of this rank's shard, parts with an adapter]: 1 where the row is of the part."""
    if len(layer.present) == 1:
        return torch.ones(1, 1)
    sizes = [shape[0] for shape in shapes_of(layer.base, spec)]
    numbers = iter(range(len(layer.present)))
    parts = [next(numbers) if is_there else -1 for is_there in layer.present]
    labels = [torch.full((size,), part) for size, part in zip(sizes, parts, strict=True)]
    part_of_row = layer.base.layout.load(labels, shard, spec)
    return (part_of_row[:, None] == torch.arange(sum(layer.present))).float()


class _FirstValues(Mapping[str, Tensor]):
    """The initial values of every A: uniform within ±1/√in, PEFT's default. For the embedding,
    those of B: normally distributed, as in PEFT. Each full tensor is drawn from the seed and its
    name, so values do not depend on the layout."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = {
            name: shape for name, shape in shapes.items() if not begins_with_zeros(name)
        }
        self._seed = seed

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode()) >> 1
        )
        if "lora_embedding" in name:
            return torch.empty(shape).normal_(generator=generator)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes


def draw_first_values(
    chunks: Sequence[nn.Module], spec: ModelSpec, adapters: AdapterConfig, seed: int
) -> None:
    """Fill every A (for the embedding, B) with random numbers that do not depend on the layout. The
    other side stays zero."""
    table = adapter_family(table_of(spec), spec, adapters)
    fill_adapters(chunks, table, spec, _FirstValues(dict(table.hf_tensors(spec)), seed))


# -- while it trains -------------------------------------------------------------------------------


def adapters_of(chunks: Sequence[nn.Module]) -> Iterator[LowRankAdapter]:
    """Iterate over all adapters of this rank."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, LowRankAdapter))


def adapter_tensors(chunks: Sequence[nn.Module]) -> list[Tensor]:
    """Return both sides of all adapters of this rank."""
    return [side for adapter in adapters_of(chunks) for side in (adapter.down, adapter.up)]


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Switch all adapters off inside the block."""
    found = list(adapters_of(chunks))
    try:
        for adapter in found:
            adapter.is_on = False
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


@contextmanager
def dropping_inputs(chunks: Sequence[nn.Module], dropout: float) -> Iterator[None]:
    """Apply dropout with this probability to the adapters' inputs inside the block."""
    found = list(adapters_of(chunks)) if dropout else []
    try:
        for adapter in found:
            adapter.dropout = dropout
        yield
    finally:
        for adapter in found:
            adapter.dropout = 0.0


@torch.no_grad()
def changes_nothing(chunks: Sequence[nn.Module]) -> bool:
    """Tell whether every B of this rank (for the embedding, A) is zero."""
    return not any(bool(one.begins_with_zeros.any()) for one in adapters_of(chunks))


def finish_gradients(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
    """Reduce the gradients as Megatron does, then sum those of the experts' adapters over the ranks
    that hold the same side. Collective."""
    finalize_model_grads(chunks, *args, **kwargs)
    for kind, group in (
        ("tensor", parallel_state.get_tensor_model_parallel_group()),
        ("expert tensor", parallel_state.get_expert_tensor_parallel_group()),
    ):
        gradients: list[Tensor] = [
            side.main_grad  # type: ignore[attr-defined]
            for adapter in adapters_of(chunks)
            for side in (adapter.down, adapter.up)
            if getattr(side, "summed_over", "") == kind
        ]
        if gradients and group.size() > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces):
                gradient.copy_(piece.view_as(gradient))
