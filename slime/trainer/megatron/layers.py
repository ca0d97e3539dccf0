"""Norms, activations, embedding and transformer layers that megatron-core has only with Transformer
Engine, computes less efficiently, or lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.models.activations import QUICK_GELU_SLOPE, gated, gelu_tanh, quick_gelu
from slime.models.spec import ModelSpec
from slime.trainer.megatron import device


def leave_as_it_is(tensor: Tensor) -> Tensor:
    """Skip initialisation, for parameters that are loaded from a checkpoint."""
    return tensor


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``; save only the arguments and recompute in the backward
    pass."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    found = checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check="none",
    )
    assert isinstance(found, Tensor)
    return found


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that also works under sequence parallelism.

    megatron-core's wrapper of ``torch.nn.RMSNorm`` refuses sequence parallelism. It only needs a
    mark on the weight: Megatron then sums the gradient over the tensor-parallel ranks, each of
    which saw only some tokens.

    With ``layernorm_zero_centered_gamma`` the factor is 1 + weight (Gemma), in float32.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centred else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and device.has_kernels():
            from slime.trainer.kernels.rms_norm import RMSNormFunction

            return RMSNormFunction.apply(x, self.factor(), self.eps)
        if self.zero_centred:
            return F.rms_norm(x.float(), self.shape, self.factor(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def factor(self) -> Tensor:
        """Return the factor of the normalised entries, [hidden_size]."""
        return 1.0 + self.weight.float() if self.zero_centred else self.weight


class NormOfRotated(RMSNorm):
    """The norm of queries or keys after the rotary embedding (Hunyuan).

    Megatron calls norms before the rotation. `forward` therefore returns its input unchanged, and
    the attention calls `normalised` after the rotation.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalised(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WideNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of queries or of keys together (OLMo-2).

    Tensor parallelism shards heads and weight, so the ranks add up their sums of squares.

    Args:
        heads: number of heads over all ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.width = heads * hidden_size
        self.group = parallel_state.get_tensor_model_parallel_group()
        local = self.width // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[…, heads of this rank, dim] → the same shape."""
        return _WideNormFunction.apply(x, self.weight, self.width, self.eps, self.group)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the rank's rows as a shard of the full weight."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class _WideNormFunction(torch.autograd.Function):
    """The norm of ``x`` [..., heads of this rank, dim] over ``width`` entries on all ranks of
    ``group``; saves its input, which is part of a product that is kept anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, width: int, eps: float, group: dist.ProcessGroup
    ) -> Tensor:
        wide = x.flatten(-2).float()
        squares = _sum_over_ranks(wide.square().sum(dim=-1, keepdim=True), group)
        scale = torch.rsqrt(squares / width + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.width = width
        ctx.group = group
        return (weight * (wide * scale)).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad.flatten(-2).float()
        normed = x.flatten(-2).float() * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        grad = grad * weight
        shared = _sum_over_ranks((grad * normed).sum(dim=-1, keepdim=True), ctx.group)
        grad_x = (grad - normed * (shared / ctx.width)).mul_(scale)
        return grad_x.to(x.dtype).view_as(x), grad_weight, None, None, None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


@functools.cache
def with_bias(linear: type) -> type:
    """Return a subclass of a parallel linear layer that always has a bias.

    Megatron's field ``add_bias_linear`` applies to all linear layers of a model, but some models
    have biases in only some layers.
    """

    class Biased(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    Biased.__name__ = Biased.__qualname__ = f"{linear.__name__}WithBias"
    return Biased


#: Activation → its backward pass: (gradient of the output, input, grad_input=).
_BACKWARD: dict[Callable[[Tensor], Tensor], Callable[..., Any]] = {
    F.silu: torch.ops.aten.silu_backward.grad_input,
    gelu_tanh: functools.partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
}


class GatedUnit(torch.autograd.Function):
    """activation(a) · b for ``x = [a | b]``, with SiLU or the tanh approximation of GELU; saves
    only ``x`` for the backward pass.

    The plain expression also saves activation(a), and writes the two halves of the gradient twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        a, b = x.chunk(2, dim=-1)
        return activation(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_a, grad_b = grad_x.chunk(2, dim=-1)
        torch.mul(grad, ctx.activation(a), out=grad_b)
        _BACKWARD[ctx.activation](grad * b, a, grad_input=grad_a)
        return grad_x, None


class ClampedGLU(torch.autograd.Function):
    """quick_gelu(min(a, limit)) · (clamp(b, ±limit) + offset) for ``x = [a | b]`` (gpt-oss); saves
    only ``x`` for the backward pass. Entries beyond the limit have gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float | None, offset: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = torch.inf if limit is None else limit
        ctx.offset = offset
        a, b = x.chunk(2, dim=-1)
        return gated(a, b, quick_gelu, ctx.limit, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        gate = a.clamp(max=ctx.limit)
        up = b.clamp(-ctx.limit, ctx.limit) + ctx.offset
        slope = torch.sigmoid(QUICK_GELU_SLOPE * gate)
        grad_b = (grad * gate * slope).masked_fill_(b.abs() > ctx.limit, 0.0)
        by_gate = slope * (1 + QUICK_GELU_SLOPE * gate * (1 - slope))
        grad_a = (grad * up * by_gate).masked_fill_(a > ctx.limit, 0.0)
        return torch.cat([grad_a, grad_b], dim=-1), None, None


class GatedActivation(torch.nn.Module):
    """The activation of an MLP with `ModelSpec.has_plain_gate` on ``[gate | up]``, as a module in
    Megatron's layer spec."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.activation = config.activation_func

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and self.activation is F.silu:
            # Megatron's expression, which torch.compile fuses there
            return bias_swiglu_impl(x, None, False, False)
        return GatedUnit.apply(x, self.activation)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return {}; Megatron's MLP calls this method of each submodule."""
        return {}


#: The choice of --recompute-modules for `ActivationRecomputingMLP`.
RECOMPUTE_ACTIVATION = "mlp_act"


class ActivationRecomputingMLP(MLP):
    """Megatron's MLP that frees the activated product of gate and up behind the down projection,
    and computes it again in the backward pass."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        gate_and_up, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            gate_and_up = gate_and_up + bias
        if not self.training or not torch.is_grad_enabled():
            return self.linear_fc2(self.activation_func(gate_and_up))
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        product = checkpoint.checkpoint(self.activation_func, gate_and_up)
        output, bias = self.linear_fc2(product)
        checkpoint.discard_output_and_register_recompute(output)
        return output, bias


class EmbeddingLookup(torch.autograd.Function):
    """An embedding lookup that adds its gradient directly to Megatron's gradient buffer.

    Autograd would first build a dense gradient of the whole vocabulary, nearly all zeros.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.main_grad = main_grad
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1)).to(ctx.main_grad.dtype)
        ctx.main_grad.index_add_(0, ids.reshape(-1), rows)
        return None, None, None


class Embedding(VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding, with `EmbeddingLookup` where no gradient hook is
    needed."""

    direct_grad = False

    def forward(self, input_: Tensor) -> Tensor:
        trains = self.direct_grad and self.weight.requires_grad and torch.is_grad_enabled()
        is_whole = self.tp_group.size() == 1 and not self.reduce_scatter_embeddings
        if not trains or not is_whole or input_.device.type == "cuda":
            return super().forward(input_)
        return EmbeddingLookup.apply(self.weight, self.weight.main_grad, input_)


# -- the outputs of attention and MLP, before they are added to the residual -----------------------

OutputWithBias = tuple[Tensor, Tensor | None]
AddToResidual = Callable[[OutputWithBias, Tensor, float], Tensor]
MakeAdd = Callable[[bool, bool], AddToResidual]
"""Megatron's "bias, dropout, add": (training, fused) → the function."""


class PostNormTransformerLayer(TransformerLayer):
    """x + post_norm(attention(norm(x))), then the same for the MLP.

    megatron-core's layer has no post-norms. They are applied in its two residual additions, which
    are the only code that gets the outputs separately; the rest of the layer is unchanged.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        eps = config.layernorm_epsilon
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, eps)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, eps)
        add_attention: MakeAdd = self.self_attn_bda  # type: ignore[has-type]
        add_mlp: MakeAdd = self.mlp_bda  # type: ignore[has-type]
        self.self_attn_bda = _changing(self.post_self_attn_layernorm, add_attention)
        self.mlp_bda = _changing(self.post_mlp_layernorm, add_mlp)


class ScaledTransformerLayer(TransformerLayer):
    """x + scale · attention(norm(x)), then the same for the MLP (Granite)."""

    def __init__(
        self, config: TransformerConfig, *args: Any, residual_scale: float, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        add_attention: MakeAdd = self.self_attn_bda  # type: ignore[has-type]
        add_mlp: MakeAdd = self.mlp_bda  # type: ignore[has-type]
        self.self_attn_bda = _changing(lambda x: x * residual_scale, add_attention)
        self.mlp_bda = _changing(lambda x: x * residual_scale, add_mlp)


def _changing(change: Callable[[Tensor], Tensor], make_add: MakeAdd) -> MakeAdd:
    """Apply ``change`` to output plus bias before the residual addition."""

    def make(training: bool, fused: bool) -> AddToResidual:
        add = make_add(training, fused)

        def change_and_add(
            output_with_bias: OutputWithBias, residual: Tensor, dropout: float
        ) -> Tensor:
            output, bias = output_with_bias
            changed = change(output if bias is None else output + bias)
            return add((changed, None), residual, dropout)

        return change_and_add

    return make


def change_outputs(block: TransformerBlockSubmodules, spec: ModelSpec) -> None:
    """Use layers that normalise or scale the outputs of attention and MLP, if the model does."""
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec) and issubclass(layer.module, TransformerLayer)
        if spec.post_norms:
            layer.module = PostNormTransformerLayer
        elif spec.residual_scale != 1.0:
            layer.module = ScaledTransformerLayer
            layer.params = {**layer.params, "residual_scale": spec.residual_scale}
