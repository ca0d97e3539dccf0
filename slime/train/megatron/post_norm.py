"""Layers that normalise the outputs of attention and MLP before they are added to the residual (GLM-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime.train.megatron.layers import RMSNorm

OutputWithBias = tuple[Tensor, Tensor | None]
AddToResidual = Callable[[OutputWithBias, Tensor, float], Tensor]
MakeAdd = Callable[[bool, bool], AddToResidual]
"""Megatron's "bias, dropout, add": (training, fused) → the function."""


class PostNormTransformerLayer(TransformerLayer):
    """x + post_norm(attention(norm(x))), then the same around the MLP.

    megatron-core's layer has no such norms. They go in front of its two residual additions, the only places that see
    the outputs on their own; recomputation and the rest of the layer stay as they are.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        eps = config.layernorm_epsilon
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, eps)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, eps)
        add_attention: MakeAdd = self.self_attn_bda  # type: ignore[has-type]
        add_mlp: MakeAdd = self.mlp_bda  # type: ignore[has-type]
        self.self_attn_bda = _normalising(self.post_self_attn_layernorm, add_attention)
        self.mlp_bda = _normalising(self.post_mlp_layernorm, add_mlp)


def _normalising(norm: RMSNorm, make_add: MakeAdd) -> MakeAdd:
    """With the norm between the bias and the rest."""

    def make(training: bool, fused: bool) -> AddToResidual:
        add = make_add(training, fused)

        def normalise_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return normalise_and_add

    return make


def add_post_norms(block: TransformerBlockSubmodules) -> None:
    """Make every layer of the block a `PostNormTransformerLayer`."""
    for layer in block.layer_specs:
        assert isinstance(layer, ModuleSpec) and issubclass(layer.module, TransformerLayer)
        layer.module = PostNormTransformerLayer
