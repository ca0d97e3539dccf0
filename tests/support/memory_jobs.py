"""What trainer ranks do in the tests of the memory plan: build tiny models, count parameters and
saved tensors."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from slime.config import Config
from slime.models import family_of
from tests.support.trainer_ranks import trainer_config

DECODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

#: config.json of a tiny model of every family, in the variants that differ in parameters.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**DECODER, "model_type": "llama"},
    "llama tied": {**DECODER, "model_type": "llama", "tie_word_embeddings": True},
    "llama, biases": {**DECODER, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {**DECODER, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**DECODER, "model_type": "qwen2"},
    "qwen3": {**DECODER, "model_type": "qwen3", "tie_word_embeddings": True},
    "glm4": {**DECODER, "model_type": "glm4", "attention_bias": True},
    "qwen3_moe": {**DECODER, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [2]},
    "glm4_moe": {
        **DECODER,
        **EXPERTS,
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        **DECODER,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 48,
    },
    "gemma3_text": {
        **DECODER,
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "query_pre_attn_scalar": 24,
    },
    "olmo2": {**DECODER, "model_type": "olmo2"},
    "hunyuan_v1_dense": {**DECODER, "model_type": "hunyuan_v1_dense"},
    "gpt_oss": {**DECODER, "model_type": "gpt_oss", "num_local_experts": 4},
    "deepseek_v3": {**DECODER, **EXPERTS, **LATENT, "model_type": "deepseek_v3"},
    "qwen3_5_text": {**DECODER, **DELTA, "model_type": "qwen3_5_text"},
    "qwen3_next": {
        **DECODER,
        **DELTA,
        **EXPERTS,
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 56,
    },
    "deepseek_v3, whole queries": {
        **DECODER,
        **EXPERTS,
        **LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "v_head_dim": 24,
    },
}


def config_for(info: Any, **flags: Any) -> Config:
    return trainer_config(actor_num_gpus_per_node=info.world_size, rollout_batch_size=8, **flags)


@contextmanager
def models(
    info: Any, names: list[str], flags: dict[str, Any]
) -> Iterator[Iterator[tuple[str, list[nn.Module]]]]:
    """(family, its chunks on this rank) one after the other, in one set of process groups."""
    from slime.models.layout_rules import virtual_stages
    from slime.trainer.megatron import backend, model, parallel

    assert backend is not None  # its import prepares megatron for this machine
    config = config_for(info, **flags)
    specs = {name: family_of(FAMILIES[name]).model_spec(FAMILIES[name]) for name in names}
    parallel.initialise(info, config, virtual_stages(next(iter(specs.values())), config))

    def build() -> Iterator[tuple[str, list[nn.Module]]]:
        for name, spec in specs.items():
            padded = spec.padded(config.megatron.tensor_model_parallel_size)
            chunks = model.build_model_chunks(padded, config, initialise=True)
            yield name, list(chunks)

    try:
        yield build()
    finally:
        parallel.shut_down()


def count_parameters(
    info: Any, names: list[str], flags: dict[str, Any]
) -> dict[str, dict[str, int]]:
    """Per family: entries of each parameter on this rank, by name with global layer numbers."""
    counted = {}
    with models(info, names, flags) as built:
        for name, chunks in built:
            found: dict[str, int] = {}
            for chunk in chunks:
                layers = chunk.get_submodule("decoder.layers")
                for parameter, tensor in chunk.named_parameters():
                    local = _LAYER.search(parameter)
                    if local is not None:
                        number = int(layers.get_submodule(local[1]).layer_number) - 1  # type: ignore[arg-type]
                        parameter = _LAYER.sub(f"decoder.layers.{number}.", parameter)
                    found[parameter] = tensor.numel()
            counted[name] = found
    return counted


class InputKeepingNorm(torch.autograd.Function):
    """Keeps what `slime.trainer.kernels.rms_norm` keeps. Forward pass only, as all that stands in
    for kernels here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return torch.rms_norm(x.to(weight.dtype), shape, weight, eps).to(x.dtype)


class OnePass(torch.autograd.Function):
    """Takes, returns and keeps what `slime.trainer.kernels.attention_heads.SplitNormRotate`
    does."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        per_group: int,
        eps: float,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, groups, width = mixed.shape
        heads = mixed.contiguous().view(tokens, groups, per_group + 2, width // (per_group + 2))
        query, key, value = heads.split([per_group, 1, 1], dim=2)
        kept = (mixed, query_weight, key_weight) if query_weight is not None else (None, None, None)
        ctx.save_for_backward(*kept, cos, sin)
        return query.flatten(1, 2).clone(), key.flatten(1, 2).clone(), value.flatten(1, 2).clone()


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Stand-ins that keep what the kernels keep."""
    from slime.trainer.megatron import attention, layers

    module = types.ModuleType("slime.trainer.kernels.attention_heads")
    module.SplitNormRotate = OnePass  # type: ignore[attr-defined]
    with (
        patch.object(
            layers.RMSNorm,
            "forward",
            lambda self, x: InputKeepingNorm.apply(x, self.shape, self.factor(), self.eps),
        ),
        patch.dict(sys.modules, {module.__name__: module}),
        patch.object(
            attention.PackedSelfAttention,
            "_takes_one_pass",
            lambda self, hidden: (
                not self.config.attention_output_gate
                and not isinstance(self.q_layernorm, (layers.NormOfRotated, layers.WideNorm))
            ),
        ),
    ):
        yield


def saved_bytes(
    info: Any, names: list[str], flags: dict[str, Any], lengths: list[int], fused: bool = False
) -> dict[str, float]:
    """Per family: bytes that a forward pass over sequences of these lengths keeps for the backward
    pass, weights and micro-batch left out. With ``fused``, norms and attention heads keep what they
    keep on a GPU."""
    from slime.trainer.megatron import parallel
    from slime.trainer.megatron.packed import PackingOptions, pack

    sizes = {}
    with kernels_of_a_gpu() if fused else nullcontext(), models(info, names, flags) as built:
        for name, chunks in built:
            torch.manual_seed(3)
            tokens = [torch.randint(0, 97, (length + 1,)) for length in lengths]
            options = PackingOptions(
                torch.device("cpu"), 4, dense=True, context=parallel.context_group()
            )
            packed = pack(range(len(lengths)), tokens, list(lengths), options)
            [chunk] = chunks
            chunk.train()
            outside = [
                *chunk.parameters(),
                *chunk.buffers(),
                packed.tokens,
                packed.rows,
                packed.targets,
            ]
            kept: dict[int, Tensor] = {}
            known = {tensor.untyped_storage()._cdata for tensor in outside}

            def note(
                tensor: Tensor, kept: dict[int, Tensor] = kept, known: set[int] = known
            ) -> Tensor:
                # an address would not do: recomputation empties storages
                storage = tensor.untyped_storage()._cdata
                if storage not in known:
                    # holding it, so that its number is not used again
                    kept.setdefault(storage, tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                chunk(packed, with_entropy=True)
            sizes[name] = float(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return sizes
