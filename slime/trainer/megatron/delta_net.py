"""Gated delta nets (arXiv:2412.06464) over packed sequences.

    hidden ─► in_proj ──► query, key, value ─► convolution ─► gated delta rule ─► norm · gate ─► out
                      └─► gate, b (how much is written), a (how much decays)

Rows of ``in_proj`` and channels of the convolution are grouped by key head, so that tensor and
context parallelism can split them between any two heads. A context-parallel rank computes whole
sequences for its part of the heads, as in attention (`slime.trainer.megatron.context`). Samples
that share a prompt continue from the state at the end of the prompt.

On a CPU, and for micro-batches that share prompts, torch computes the rule
(`slime.models.delta_rule`) and recomputes it in the backward pass, so that only its inputs are
saved. On GPUs the kernels of flash-linear-attention compute it, if installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime.log import get_logger
from slime.models import delta_rule
from slime.models.layouts import DeltaNetSizes
from slime.models.spec import ModelSpec
from slime.trainer.megatron.context import swap
from slime.trainer.megatron.layers import recomputed
from slime.trainer.megatron.packed import DeltaRuns, PackedSequences

logger = get_logger(__name__)

#: Parameters that tensor parallelism shards, and the sharded axis of each.
_CUT = {"conv_weight": 0, "A_log": 0, "dt_bias": 0}


@dataclass
class DeltaNetParts:
    """Classes of the two linear layers; `te_layers` may replace them by Transformer Engine's."""

    in_proj: type | ModuleSpec = ColumnParallelLinear
    linear_proj: type | ModuleSpec = RowParallelLinear


def delta_net_spec(spec: ModelSpec) -> ModuleSpec:
    """Return the spec that replaces self-attention in the layers with a gated delta net."""
    return ModuleSpec(
        module=PackedGatedDeltaNet, params={"sizes": spec.delta_net}, submodules=DeltaNetParts()
    )


class PackedGatedDeltaNet(MegatronModule):
    """A gated delta net with the interface of Megatron's self-attention.

    A_log and the norm's weight are float32 for every model dtype, because some published
    checkpoints store them in float32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetParts,
        layer_number: int,
        *,
        sizes: DeltaNetSizes,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])
        self.layer_number = layer_number
        self.tp_group = groups.tp
        self.sizes = sizes
        self.key_heads = sizes.key_heads // self.tp_group.size()
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sizes.key_heads * sum(sizes.of_key_head),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.tp_group,
        )
        own = config.params_dtype
        self.conv_weight = self._cut_parameter((sizes.mixed, 1, sizes.conv), own, self._draw)
        self.A_log = self._cut_parameter((sizes.value_heads,), torch.float32, _spread)
        self.dt_bias = self._cut_parameter((sizes.value_heads,), own, torch.ones_like)
        self.norm_weight = torch.nn.Parameter(torch.ones(sizes.value))
        self.linear_proj = build_module(
            submodules.linear_proj,
            sizes.value_heads * sizes.value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp_group,
        )

    def _cut_parameter(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], Tensor]
    ) -> torch.nn.Parameter:
        """Return this rank's rows of a parameter. Each rank draws the full one, so that random
        weights do not depend on the layout."""
        whole = fill(torch.empty(shape, dtype=torch.float32))
        part = whole.chunk(self.tp_group.size())[self.tp_group.rank()]
        parameter = torch.nn.Parameter(part.to(dtype).contiguous())
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def _draw(self, weight: Tensor) -> Tensor:
        self.config.init_method(weight)
        return weight

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] → ([T, 1, H], None); under sequence parallelism T is this rank's part."""
        assert packed_seq_params is not None
        sequences = packed_seq_params
        projected, _ = self.in_proj(hidden_states)
        by_head = projected.view(projected.size(0), self.key_heads, -1)
        query, key, values, gates, writes, decays = self.sizes.of_key_head
        mixed, gate, scalars = by_head.split([query + key + values, gates, writes + decays], dim=-1)
        output = self._mixed_over_time(mixed, scalars, sequences)
        gate = gate.unflatten(2, (self.sizes.per_key, -1))
        output = output.view(gate.shape)
        # each rank computes only its own heads, so the gradient is the sum over the ranks
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        if self._by_kernels(mixed, sequences.delta_runs):
            # the gate is kept for the backward pass, and as a view it would keep all of `projected`
            gate = gate.contiguous()
        normed = recomputed(
            delta_rule.gated_norm, output, gate, weight, self.config.layernorm_epsilon
        )
        return self.linear_proj(normed.reshape(normed.size(0), 1, -1))

    def _mixed_over_time(
        self, mixed: Tensor, scalars: Tensor, sequences: PackedSequences
    ) -> Tensor:
        """Return the rule's output [t, value heads, value width] for this rank's tokens, given
        queries, keys and values [t, key heads, …] and scalars b and a [t, key heads, …]."""
        weights = (self.conv_weight[:, 0], self.A_log, self.dt_bias)
        context = sequences.context
        if context is None:
            return self._rule(mixed, scalars, weights, sequences.delta_runs)
        place = context.place
        parts = [x.reshape(x.size(0), place.size, -1) for x in (mixed, scalars)]
        heads = self.key_heads // place.size
        mixed, scalars = (x.flatten(0, 1).unflatten(1, (heads, -1)) for x in swap(parts, place))
        conv_weight, a_log, dt_bias = (x.chunk(place.size)[place.rank] for x in weights)
        output = self._rule(mixed, scalars, (conv_weight, a_log, dt_bias), sequences.delta_runs)
        return context.to_tokens(output)

    def _rule(
        self,
        mixed: Tensor,
        scalars: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        runs: DeltaRuns,
    ) -> Tensor:
        arguments = (mixed, scalars, *weights, runs, self.sizes)
        if self._by_kernels(mixed, runs):
            return _with_kernels(*arguments)
        return recomputed(_with_torch, *arguments)

    def _by_kernels(self, mixed: Tensor, runs: DeltaRuns) -> bool:
        in_16_bits = mixed.is_cuda and mixed.dtype != torch.float32
        return in_16_bits and runs.are_whole and _kernels() is not None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the rank's parameters as shards of the full ones."""
        found: dict[str, Any] = {}
        for name, module in self.named_children():
            found |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in (*_CUT, "norm_weight")}
        return found | make_sharded_tensors_for_checkpoint(own, prefix, _CUT, sharded_offsets)


def _spread(values: Tensor) -> Tensor:
    """Return the log of evenly spaced values from 1 to 16, in the shape of ``values`` [heads]."""
    return torch.linspace(1.0, 16.0, values.numel()).log()


def _heads(convolved: Tensor, heads: int, sizes: DeltaNetSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Split into query and key [T, key heads, width] and values [T, value heads, width]."""
    by_head = convolved.view(convolved.size(0), heads, -1)
    query, key, values = by_head.split(sizes.of_key_head[:3], dim=-1)
    return query, key, values.reshape(values.size(0), -1, sizes.value)


def _gates(
    scalars: Tensor, a_log: Tensor, dt_bias: Tensor, sizes: DeltaNetSizes
) -> tuple[Tensor, Tensor]:
    """Return decay and write strength (beta), [T, value heads] each."""
    b, a = (x.reshape(x.size(0), -1) for x in scalars.split(sizes.per_key, dim=-1))
    beta = b.to(torch.promote_types(b.dtype, torch.float32)).sigmoid()
    return delta_rule.decay_of(a, a_log, dt_bias), beta


def _with_torch(
    mixed: Tensor,
    scalars: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    runs: DeltaRuns,
    sizes: DeltaNetSizes,
) -> Tensor:
    """mixed and scalars [T, key heads, …] → [T, value heads, value width]."""
    reads = runs.reads(sizes.conv)
    convolved = delta_rule.CausalConv.apply(mixed.flatten(1), conv_weight, reads)
    query, key, value = _heads(convolved, scalars.size(1), sizes)
    query, key = delta_rule.normalised(query, key)
    decay, beta = _gates(scalars, a_log, dt_bias, sizes)
    return delta_rule.chunked(query, key, value, decay, beta, runs.chunks)[0]


def _with_kernels(
    mixed: Tensor,
    scalars: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    runs: DeltaRuns,
    sizes: DeltaNetSizes,
) -> Tensor:
    """Compute the same as `_with_torch`, for runs that do not continue another run."""
    kernels = _kernels()
    assert kernels is not None
    convolve, rule = kernels
    convolved, _ = convolve(
        mixed.flatten(1)[None], conv_weight.contiguous(), activation="silu", cu_seqlens=runs.ends
    )
    query, key, value = _heads(convolved[0], scalars.size(1), sizes)
    decay, beta = _gates(scalars, a_log, dt_bias, sizes)
    output, _ = rule(
        query.contiguous()[None],
        key.contiguous()[None],
        value.contiguous()[None],
        g=decay[None],
        beta=beta.to(value.dtype)[None],
        scale=sizes.key**-0.5,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=runs.ends,
        cu_seqlens_cpu=runs.host_ends,
    )
    return output[0]


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return convolution and rule of flash-linear-attention; None if they cannot be used."""
    try:
        import fla.utils

        # for these versions on Hopper the library refuses its wrong Triton backward kernel and
        # needs tilelang; `slime.trainer.gpu_kernels.delta_net_gap` checks this before a launch
        is_wrong = fla.utils.TRITON_ABOVE_3_4_0 and not fla.utils.TRITON_ABOVE_3_7_1
        if fla.utils.IS_NVIDIA_HOPPER and is_wrong:
            importlib.import_module("tilelang")
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except (ImportError, OSError) as error:  # OSError: a shared library does not load
        logger.warning(
            "gated delta nets are computed by torch, which is many times slower than kernels on "
            "this GPU (%s); pip install 'slime-rl[delta-net]'",
            error,
        )
        return None
    logger.info("gated delta nets by flash-linear-attention")
    return causal_conv1d, chunk_gated_delta_rule
