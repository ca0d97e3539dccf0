"""Causal attention over packed sequences, without Transformer Engine.

On a GPU: flash attention for variable lengths. On a CPU, and in float32, which flash attention does
not support, sequences of similar length share one dense call. The mask keeps real queries from the
padding after them; only the discarded rows of padding attend to it.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from slime.errors import UserError
from slime.log import get_logger
from slime.memory.hardware import FLASH4_NARROWEST, FLASH4_WIDEST
from slime.models.spec import RotaryKind
from slime.trainer.gpu_kernels import no_windows
from slime.trainer.megatron import device
from slime.trainer.megatron.image_attention import attend_within_images
from slime.trainer.megatron.layers import NormOfRotated, RMSNorm, recomputed
from slime.trainer.megatron.packed import AttentionBlock, PackedSequences, PaddedLayout
from slime.trainer.megatron.rotary import Rotate

# below this length a bfloat16 CPU is faster with explicit products than with torch's blocked kernel
# (2.4x to 6x on AVX512-bf16, forward and backward); above it, or in float32, the blocked kernel
# wins
_EXPLICIT_BELOW = 320

logger = get_logger(__name__)


class PackedAttention(torch.nn.Module):
    """``core_attention`` of the local layer spec. Grouped queries; no dropout.

    Args:
        torch_only: on a GPU, use torch's own kernel even if a faster one is installed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        torch_only: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise UserError(
                f"--attention-dropout {config.attention_dropout} cannot be honoured",
                why="attention to packed sequences has no dropout here",
                fix="leave it out",
            )
        own = 1.0 / math.sqrt(config.kv_channels)
        self.scale = own if softmax_scale is None else softmax_scale
        self.torch_only = torch_only
        self.window = window_of(config, layer_number)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> Tensor:
        """query [T, heads, dim], key [T, groups, dim], value [T, groups, own dim] → [T, heads, own
        dim]; T is the number of tokens of this rank's stripe."""
        context = sequences.context
        if context is None:
            return self._whole(query, key, value, sequences)
        return context.to_tokens(self._whole(*context.to_heads(query, key, value), sequences))

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> Tensor:
        if sequences.later is not None:
            kernel = attend_within_images
        else:
            kernel = torch_varlen if self.torch_only else _flash_packed
        return kernel(query, key, value, sequences, self.scale, self.window)

    def _in_block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block: AttentionBlock,
        sequences: PackedSequences,
    ) -> Tensor:
        return _dense(query, key, value, block, self.scale)

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> Tensor:
        layout = sequences.padded
        if layout is None:
            return self._packed(query, key, value, sequences)
        padded = [_Pad.apply(x, layout) if not layout.identity else x for x in (query, key, value)]
        outputs = []
        start = 0
        for block in layout.blocks:
            cells = slice(start, start + block.batch * block.length)
            q, k, v = (x[cells].view(block.batch, block.length, *x.shape[1:]) for x in padded)
            seen = block.within(self.window)
            outputs.append(self._in_block(q, k, v, seen, sequences).flatten(0, 1))
            start = cells.stop
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if layout.identity else _Unpad.apply(out, layout)


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return to how many tokens each token attends in a layer (numbered from 1), including itself;
    None: to all earlier tokens."""
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    return int(config.window_size[0]) + 1


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with a forward pass for packed training only: no caches, no
    inference modes.

    Parameters, names and sharding are Megatron's. Unlike there, the rotary angles are computed once
    per micro-batch.

    Attributes:
        rotary_kind: which of the micro-batch's angles this layer uses (`PolicyModel` sets it).
    """

    rotary_kind: RotaryKind = "main"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert packed_seq_params is not None and packed_seq_params.rotary is not None
        heads = self._heads_in_one_pass if self._takes_one_pass(hidden_states) else self._heads
        query, key, value, *gates = heads(
            hidden_states, *packed_seq_params.rotary[self.rotary_kind]
        )
        if packed_seq_params.query_factors is not None:
            query = query * packed_seq_params.query_factors
        core = functools.partial(self.core_attention, sequences=packed_seq_params)
        out = attend(self, core, query, key, value)
        for gate in gates:
            out = recomputed(_gated, out, gate)
        return self.linear_proj(out.to(query.dtype).reshape(out.size(0), 1, -1))

    def _heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return normalised and rotated query [T, heads, dim] and key, and value [T, groups, dim];
        with gated outputs also the gates [T, heads, dim]."""
        gated = self.config.attention_output_gate
        found = self.get_query_key_value_tensors(hidden, output_gate=gated)
        query, key, value, *gates = (x.squeeze(1) for x in found)
        interleaved = self.config.rotary_interleaved
        query = Rotate.apply(query, cos, sin, interleaved)
        key = Rotate.apply(key, cos, sin, interleaved)
        if isinstance(self.q_layernorm, NormOfRotated):
            query = self.q_layernorm.normalised(query)
            key = self.k_layernorm.normalised(key)
        return (query, key, value, *(self._own_part(gate, query) for gate in gates))

    def _own_part(self, gate: Tensor, query: Tensor) -> Tensor:
        """Return the gates of the rank's own query heads. If several ranks share keys and values of
        a group, Megatron returns the gates of the whole group."""
        gate = gate.reshape(query.size(0), -1, query.size(-1))
        own = query.size(1)
        if gate.size(1) == own:
            return gate
        place = self.pg_collection.tp.rank() % (gate.size(1) // own)
        return gate[:, place * own : (place + 1) * own]

    def _takes_one_pass(self, hidden: Tensor) -> bool:
        """Tell whether the fused kernel can be used: it needs Triton, query and key norms of class
        `RMSNorm` or none, whole groups per rank, and no gates."""
        kinds = {type(self.q_layernorm), type(self.k_layernorm)}
        known = kinds == {RMSNorm} or kinds <= {IdentityOp, type(None)}
        whole_groups = self.config.num_query_groups >= self.world_size
        is_plain = known and whole_groups and not self.config.attention_output_gate
        return hidden.is_cuda and is_plain and device.has_kernels()

    def _heads_in_one_pass(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Do what `_heads` does without gates, in one kernel."""
        from slime.trainer.kernels.attention_heads import SplitNormRotate

        mixed, _ = self.get_query_key_value_tensors(hidden, split_qkv=False)
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        eps = 0.0
        if isinstance(self.q_layernorm, RMSNorm):
            weights = (self.q_layernorm.factor(), self.k_layernorm.factor())
            eps = self.q_layernorm.eps
        per_group = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        return SplitNormRotate.apply(
            mixed.flatten(0, 1), *weights, cos, sin, per_group, eps, self.config.rotary_interleaved
        )


def _in_one_width(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``kernel``, which needs heads of one width, take queries and keys of another width than
    values: the shorter ones are padded with zeros, which do not change the result."""

    @functools.wraps(kernel)
    def padded(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        own = value.size(-1)
        common = max(query.size(-1), own)
        heads = [
            F.pad(x, (0, common - x.size(-1))) if x.size(-1) < common else x
            for x in (query, key, value)
        ]
        return kernel(*heads, *options)[..., :own]

    return padded


def _gated(output: Tensor, gate: Tensor) -> Tensor:
    precise = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (output * precise.sigmoid()).to(gate.dtype)


def attend(
    layer: Attention, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return ``core(query, key, value)``; ``--recompute-modules core_attn`` recomputes it in the
    backward pass."""
    if layer.checkpoint_core_attention and layer.training:
        return tensor_parallel.checkpoint(core, False, query, key, value)
    return core(query, key, value)


def _flash_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with the package flash-attn-4, which comes with SGLang and is twice as fast on Hopper,
    or with torch's kernel."""
    fast = None
    if not torch.are_deterministic_algorithms_enabled():
        fast = _flash4(query.device, query.size(-1), value.size(-1))
    if fast is None:
        return torch_varlen(query, key, value, sequences, scale, window)
    ends = sequences.cu_seqlens_q
    longest = sequences.max_seqlen_q
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    out = fast(
        query,
        key,
        value,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        **options,
    )
    return out[0] if isinstance(out, tuple) else out


def _flash4(place: torch.device, *widths: int) -> Callable[..., Any] | None:
    """Return flash-attn-4's kernel for packed sequences; None if it is not installed or does not
    take heads of these widths on this GPU."""
    widest = FLASH4_WIDEST.get(torch.cuda.get_device_capability(place)[0], 0)
    takes = min(widths) >= FLASH4_NARROWEST and max(widths) <= widest
    return _flash4_kernel() if takes else None


@functools.cache
def _flash4_kernel() -> Callable[..., Any] | None:
    # later processes then reuse compiled kernels
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        logger.info(
            "attention by torch's kernel; flash-attn-4 would be faster on this GPU (%s)", error
        )
        return None
    logger.info("attention by flash-attn-4")
    return cast(Callable[..., Any], flash_attn_varlen_func)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@_in_one_width
def torch_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with torch's flash attention; arguments as for `PackedAttention.forward`.

    Raises:
        UserError: ``window`` is set, and this torch version does not support windows.
    """
    from torch.nn.attention.varlen import varlen_attn

    accepted = _parameters(varlen_attn)
    options: dict[str, Any] = {"scale": scale}
    if "window_size" in accepted:  # torch >= 2.12
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None:
        raise no_windows(str(torch.__version__), window)
    else:
        options["is_causal"] = True
    if "scale" not in accepted:  # torch 2.11 fixes the scale to 1 / sqrt(dim)
        query = query * (options.pop("scale") * math.sqrt(query.size(-1)))
    if key.size(1) != query.size(1):
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            repeats = query.size(1) // key.size(1)
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
    longest = sequences.max_seqlen_q
    cu_seqlens = sequences.cu_seqlens_q
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out


@_in_one_width
def _dense(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float
) -> Tensor:
    """[B, L, heads, dim] and [B, L, groups, dim] → [B, L, heads, dim]; each query attends to the
    keys that the block allows."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.dtype == torch.bfloat16 and block.length < _EXPLICIT_BELOW:
        return _explicit(q, k, v, block.bias, scale).transpose(1, 2)
    mask: dict[str, Any] = {"is_causal": True}
    if block.masked:
        # half precision takes masks in float32; float64 reads them as its own dtype
        mask = {"attn_mask": block.bias.to(torch.promote_types(q.dtype, torch.float32))}
    out = F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=k.size(1) != q.size(1), **mask
    )
    return out.transpose(1, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend with two batched matrix products, one per group, and a softmax in float32."""
    batch, heads, length, dim = q.shape
    groups = k.size(1)
    grouped = q.reshape(batch, groups, heads // groups * length, dim)
    scores = torch.matmul(grouped, k.transpose(-1, -2)).view(batch, heads, length, length).float()
    weights = torch.softmax(scores.mul_(scale).add_(bias), dim=-1).to(q.dtype)
    return torch.matmul(weights.view(batch, groups, -1, length), v).view(batch, heads, length, dim)


# -- between packed and padded ---------------------------------------------------------------------
#
# Each packed token has exactly one cell, so the gradient of the gather is also a gather. Autograd
# would scatter-add row by row, which on a CPU costs more than the attention itself.


class _Pad(torch.autograd.Function):
    """[T, …] → [cells, …]. A padding cell's gradient is 0, so it does not change that of the token
    that the cell repeats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PaddedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.cells), None


class _Unpad(torch.autograd.Function):
    """[cells, …] → [T, …]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PaddedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.gather).masked_fill_(ctx.layout.padding, 0.0), None
