"""Transformer Engine's layers, with ``--transformer-impl transformer_engine``.

The block is the local one with linear layers, norms and core attention on packed sequences
(``thd``) replaced by Transformer Engine's. Unlike Megatron's own Transformer Engine spec, it does
not fuse norms with linear layers (``LayerNormLinear``). Parameters therefore have the same names in
both implementations, and converters, checkpoints and weight sync work with both.

FP8 flags (``--fp8-format``, ``--fp8-recipe``, …) are fields of `TransformerConfig` and reach these
layers through it.

Written for megatron-core 0.16 and the Transformer Engine versions that it supports (2.9 to 2.11).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from slime.config.config import Config
from slime.config.te_flags import INSTALL, is_installed, missing
from slime.errors import UserError
from slime.trainer.megatron.attention import PackedAttention
from slime.trainer.megatron.layers import RMSNorm, with_bias
from slime.trainer.megatron.packed import PackedSequences


def check(config: Config) -> None:
    """Check that Transformer Engine is installed on this host if a flag needs it.

    Raises:
        UserError: it is not installed.
    """
    error = missing(vars(config.flat()), installed=is_installed())
    if error is not None:
        raise error


def is_used(config: Config) -> bool:
    return config.train.transformer_impl == "transformer_engine"


def transformer_arguments(config: Config) -> dict[str, Any]:
    """Return the fields of `TransformerConfig` that say which implementation runs."""
    if not is_used(config):
        return {"transformer_impl": "local"}
    return {
        "transformer_impl": "transformer_engine",
        # from it Megatron sets Transformer Engine's environment variables when it builds the model
        "attention_backend": AttnBackend[config.train.attention_backend],
    }


def replace_parts(block: TransformerBlockSubmodules, parts: dict[type, type] | None = None) -> None:
    """Replace the local classes of a block spec by Transformer Engine's, in place.

    Args:
        parts: local class → replacement; default: Transformer Engine's classes.
    """
    parts = parts or _parts()
    seen: set[int] = set()

    def walk(spec: Any) -> None:
        is_submodules = dataclasses.is_dataclass(spec) and not isinstance(spec, type)
        if id(spec) in seen or not (isinstance(spec, ModuleSpec) or is_submodules):
            return
        seen.add(id(spec))
        if isinstance(spec, ModuleSpec):
            spec.module = _replaced(spec.module, parts)
            walk(spec.submodules)
            return
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if isinstance(value, list):
                for item in value:
                    walk(item)
            else:
                setattr(spec, field.name, _replaced(value, parts))
                walk(value)

    walk(block)


def _replaced(value: Any, parts: dict[type, type]) -> Any:
    return parts.get(value, value) if isinstance(value, type) else value


def _check_usable() -> None:
    """Check that Megatron could import Transformer Engine.

    Raises:
        UserError: Megatron could not; the message has the reason, which Megatron hides.
    """
    from megatron.core.extensions import transformer_engine as extension

    if extension.HAVE_TE:
        return
    try:
        importlib.import_module("transformer_engine.pytorch.fp8")  # what Megatron looks for
        problem = "it could be imported only now"
    except (ImportError, OSError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UserError("Transformer Engine is installed but cannot be used", why=problem, fix=INSTALL)


@functools.cache
def _parts() -> dict[type, type]:
    _check_usable()
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    return {
        ColumnParallelLinear: TEColumnParallelLinear,
        RowParallelLinear: TERowParallelLinear,
        with_bias(ColumnParallelLinear): with_bias(TEColumnParallelLinear),
        with_bias(RowParallelLinear): with_bias(TERowParallelLinear),
        RMSNorm: TENorm,
        PackedAttention: _attention_class(),
    }


@functools.cache
def _attention_class() -> type:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class TEPackedAttention(TEDotProductAttention):
        """Transformer Engine's attention with the interface of `PackedAttention`."""

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
        ) -> Tensor:
            """query [T, heads, dim], key [T, groups, dim], value [T, groups, own dim] → [T, heads,
            own dim]."""
            described = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=sequences.cu_seqlens_q,
                cu_seqlens_kv=sequences.cu_seqlens_kv,
                max_seqlen_q=sequences.max_seqlen_q,
                max_seqlen_kv=sequences.max_seqlen_kv,
            )
            context = sequences.context
            if context is None:
                out = super().forward(
                    query, key, value, None, AttnMaskType.padding_causal, None, described
                )
                return out.view(*query.shape[:2], value.size(-1))
            # each rank has whole sequences for some heads, so Transformer Engine's own context
            # parallelism must be off
            described.local_cp_size = 1
            heads = context.to_heads(query, key, value)
            # the module checks this number, and has fewer groups here than it was built for
            self.num_gqa_groups_per_partition = heads[1].size(1)
            out = super().forward(*heads, None, AttnMaskType.padding_causal, None, described)
            return context.to_tokens(out.view(*heads[0].shape[:2], value.size(-1)))

    return TEPackedAttention
