"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packed sequences.

    hidden ─► q_down ─► norm ─► q_up ──► per head [q without position | q with position ⟲]
    hidden ─► kv_down ─► [latent | k with position ⟲, one for all heads]
                          └─► norm ─► kv_up ──► per head [k without position | v]

Parameters, names and sharding are those of Megatron's `MLASelfAttention`. The forward pass differs:
angles are computed once per micro-batch, positions are those of packed sequences, and gradients are
correct under tensor parallelism without Transformer Engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.trainer.megatron.attention import attend
from slime.trainer.megatron.layers import RMSNorm
from slime.trainer.megatron.packed import PackedSequences
from slime.trainer.megatron.rotary import Rotate

# without Transformer Engine, megatron-core's placeholder imports without error, and this module
# would mistake it for Transformer Engine
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)

#: DeepSeek's code and transformers use this value for the two latent norms and ignore the config's
#: epsilon, which applies to the other norms (1e-5 for Moonlight).
LATENT_NORM_EPS = 1e-6


class LatentNorm(RMSNorm):
    """The norm of a compressed query or of a compressed key and value."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = LATENT_NORM_EPS, **_: Any
    ) -> None:
        super().__init__(config, hidden_size, LATENT_NORM_EPS)


class PackedMLASelfAttention(MLASelfAttention):
    """Megatron's multi-latent attention with a forward pass for packed training only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = None  # the micro-batch has the angles

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] → ([T, 1, H], None); under sequence parallelism T is this rank's part."""
        assert packed_seq_params is not None and packed_seq_params.rotary is not None
        sequences = packed_seq_params
        latents = self._compressed(hidden_states)
        if self.recompute_up_proj and self.training:
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput()
            query, key, value = self.qkv_up_checkpoint.checkpoint(
                lambda q, kv, position: self._expanded(q, kv, position, sequences), *latents
            )
        else:
            query, key, value = self._expanded(*latents, sequences)
        core = partial(self.core_attention, sequences=sequences)
        out = attend(self, core, query, key, value)
        out = out.reshape(out.size(0), 1, -1)
        if self.qkv_up_checkpoint is not None:
            self.qkv_up_checkpoint.discard_output_and_register_recompute(out)
            self.qkv_up_checkpoint = None
        return self.linear_proj(out)

    def _compressed(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (input of the query up-projection, latent of keys and values, rotary key part);
        the latents are normalised.

        Under sequence parallelism the first two are split along the sequence, as the
        up-projections expect. The third has all tokens, [T, qk_pos_emb_head_dim].
        """
        config = self.config
        query = hidden
        if config.q_lora_rank is not None:
            down = self._whole(self.linear_q_down_proj(hidden)[0])
            query = self.q_layernorm(self._split_again(down))
        latent, key_position = self._whole(self.linear_kv_down_proj(hidden)[0]).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        # each rank uses this key for its own heads, so its gradient is the sum over the ranks
        key_position = copy_to_tensor_model_parallel_region(key_position, group=self.tp_group)
        return query, self.kv_layernorm(self._split_again(latent)), key_position[:, 0]

    def _whole(self, x: Tensor) -> Tensor:
        """Gather all ranks' features of a column-parallel down-projection. Gradients are equal on
        all ranks, so each takes its part in the backward pass."""
        if self.tp_group.size() == 1:
            return x
        return gather_from_tensor_model_parallel_region(x, group=self.tp_group)

    def _split_again(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sequence, which a column-parallel projection gathered."""
        if not self.config.sequence_parallel:
            return x
        return scatter_to_sequence_parallel_region(x, group=self.tp_group)

    def _expanded(
        self, query_latent: Tensor, latent: Tensor, key_position: Tensor, sequences: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [T, heads, qk_head_dim + qk_pos_emb_head_dim] and value [T, heads,
        v_head_dim]."""
        config = self.config
        heads = self.num_attention_heads_per_partition
        assert sequences.rotary is not None
        cos, sin = sequences.rotary["main"]
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = up(query_latent)[0].view(-1, heads, self.q_head_dim)
        query_plain, query_position = query.split(
            [config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1
        )
        expanded = self.linear_kv_up_proj(latent)[0].view(
            -1, heads, config.qk_head_dim + config.v_head_dim
        )
        key_plain, value = expanded.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # this family's weights use interleaved pairs
        query_position = Rotate.apply(query_position, cos, sin, True)
        key_position = Rotate.apply(key_position[:, None], cos, sin, True)
        query = torch.cat([query_plain, query_position], dim=-1)
        key = torch.cat([key_plain, key_position.expand(-1, heads, -1)], dim=-1)
        return query, key, value.contiguous()
