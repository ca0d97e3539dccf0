"""Critic and reward model as megatron-core modules: the policy's layers with one output per token.

embedding ─► decoder ─► rows that predict responses ─► value head ─► V before each response token
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.algorithms.values import ReturnScale
from slime.models.spec import ModelSpec
from slime.trainer.megatron.model import PolicyModel
from slime.trainer.megatron.packed import PackedMicroBatch
from slime.trainer.records import TokenValues


class ValueHead(torch.nn.Module):
    """One float32 output per token, and the scale of the returns on which it was trained.

    Weights start at 0, so that the first advantages equal those without a critic and do not depend
    on a seed. Every tensor-parallel rank holds the full head and computes the same.
    """

    scale: Tensor

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        # fields of `ReturnScale`, in a buffer so that checkpoints contain them
        self.register_buffer("scale", torch.zeros(3, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        """[N, H] → [N], in the unit of the normalised returns."""
        return rows.float() @ self.weight.float()[0] + self.bias.float()

    @property
    def return_scale(self) -> ReturnScale:
        return ReturnScale(*self.scale.tolist())

    @return_scale.setter
    def return_scale(self, new: ReturnScale) -> None:
        self.scale.copy_(torch.tensor(dataclasses.astuple(new), dtype=torch.float64))


class RewardHead(torch.nn.Module):
    """One float32 output per token, like transformers' sequence classifiers. It has no bias, which
    would cancel in differences of rewards.

    Weights start at 0, so that the first loss is ln 2. Every tensor-parallel rank has all of them.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """[N, H] → [N]."""
        return rows.float() @ self.weight.float()[0]


class ValueModel(PolicyModel):
    """The policy's architecture whose output is the value before each response token."""

    head: type[ValueHead] | type[RewardHead] = ValueHead

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, vp_stage: int | None, **kwargs: Any
    ) -> None:
        # the head is not an output layer to which the embedding could be tied
        super().__init__(
            dataclasses.replace(spec, tie_embeddings=False), config, vp_stage, **kwargs
        )
        if self.post_process:
            self.output_layer = self.head(config.hidden_size, config.params_dtype)

    def forward(  # type: ignore[override]
        self, batch: PackedMicroBatch
    ) -> Tensor | TokenValues:
        """Return hidden states [T, 1, H] on inner pipeline stages, `TokenValues` on the last."""
        hidden = self.hidden_states(batch)
        if not self.post_process:
            return hidden
        values = self.output_layer(self.predicting_rows(hidden, batch))
        context = batch.sequences.context
        return TokenValues(values if context is None else context.whole(values))

    def predicting_rows(self, hidden: Tensor, batch: PackedMicroBatch) -> Tensor:
        """Return the hidden states before response tokens, [N, H]. All tensor-parallel ranks have
        the same rows and the same gradient, so gradients are not summed over the ranks."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden[:, 0].index_select(0, batch.rows)


class RewardModel(ValueModel):
    """The policy's architecture whose output is a reward; a sample's loss mask selects the token
    whose output is the reward."""

    head = RewardHead
