"""Tiny random models with a byte tokenizer, as Hugging Face directories: what the embedded engine's
tests run on."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from slime.embedded.adapters import AdapterTable
from slime.embedded.architecture import Architecture
from slime.embedded.kv_cache import KVCache
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence, TextStream
from slime.embedded.weights import WeightStore, make_store
from slime.engines.request_fields import parse_params
from tests.support.tiny_models import stack_experts

VOCAB = 384
EOS = 257
HYBRID: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama_scaled": {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": None,
    },
    "ministral3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "phi3_longrope": {
        "model_type": "phi3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "short_factor": [1.0, 1.2, 1.5, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 9.0],
        },
    },
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "glm4": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **HYBRID,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": HYBRID | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {
        **HYBRID,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
    },
    "minimax_m2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
    },
    "hunyuan_v1_dense": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gpt_oss": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "swiglu_limit": 0.5,
    },
    "glm4_moe": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 64,
        },
    },
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, without merges; 256 begins and 257 ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def tiny_model(shape: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model of two layers whose logits are far from flat; ``changes`` are fields of its
    config."""
    fields = {"eos_token_id": EOS, "pad_token_id": EOS} | SHAPES[shape] | changes
    config = AutoConfig.for_model(
        fields.pop("model_type", shape),
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=fields.pop("num_hidden_layers", 2),
        max_position_embeddings=512,
        bos_token_id=None,
        initializer_range=0.15,
        **fields,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "e_score_correction_bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")) or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


def save_tiny_model(directory: Path, shape: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """``directory``, holding the model and the byte tokenizer."""
    tiny_model(shape, seed, **changes).save_pretrained(directory)
    if shape == "qwen3_5_moe_text":
        stack_experts(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def make_scheduler(
    directory: Path,
    *,
    max_slots: int = 8,
    max_length: int = 256,
    prefill_tokens: int = 2048,
    kv_bytes: int = 1 << 30,
    deterministic: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    record_experts: bool = False,
    sees_images: bool = False,
) -> Scheduler:
    arch = Architecture.from_dir(directory, sees_images)
    store = make_store(directory, arch, dtype, torch.device(device), max_length, deterministic)
    cache = KVCache(arch, store.dtype, store.device, max_slots, kv_bytes, deterministic)
    return Scheduler(store, cache, prefill_tokens, deterministic, record_experts)


def no_adapters() -> AdapterTable:
    """Make the table of an engine that was started without adapters."""
    return AdapterTable(cast(WeightStore, None), enabled=False)


def bytes_per_token(cache: KVCache) -> int:
    """Count the bytes of a token in all layers that keep keys and values."""
    return (cache._num_whole + cache._num_windowed) * cache._layer_bytes


def make_sequence(
    prompt: list[int],
    rid: str = "r",
    logprob_start: int | None = None,
    tops: int = 0,
    images: Any = None,
    **params: Any,
) -> Sequence:
    """A sequence that runs to ``max_new_tokens`` unless ``ignore_eos=False`` is given."""
    parsed = parse_params(
        {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 1, **params}, VOCAB
    )
    stops = frozenset() if parsed.ignore_eos else frozenset({EOS}) | parsed.stop_token_ids
    tokenizer: Any = byte_tokenizer()
    text = TextStream(tokenizer, True, True) if parsed.stop else None
    assert parsed.max_new_tokens is not None and parsed.sampling_seed is not None
    return Sequence(
        rid,
        prompt,
        parsed,
        parsed.max_new_tokens,
        stops,
        parsed.sampling_seed,
        text=text,
        logprob_start=logprob_start,
        num_top_logprobs=tops,
        images=images,
    )


def run(scheduler: Scheduler, sequences: list[Sequence], limit: int = 2000) -> list[Sequence]:
    """Submit, step until all are finished, and return them in the order in which they ended."""
    scheduler.submit(sequences)
    ended: list[Sequence] = []
    for _ in range(limit):
        ended += scheduler.step().finished
        if not scheduler.has_work:
            return ended
    raise AssertionError(f"not finished after {limit} steps")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def router_choices(directory: Path, tokens: list[int]) -> np.ndarray:
    """The experts that transformers' routers choose, int64 [tokens, layers, k], sorted; zeros in
    dense layers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    seen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _, inputs, output, at=number: seen.update({at: output[-1]})
            )
    with torch.no_grad():
        model(torch.tensor([tokens]))
    dense = torch.zeros_like(next(iter(seen.values())))
    layers = [seen.get(number, dense) for number in range(len(model.model.layers))]
    return torch.stack(layers, dim=1).sort(dim=-1).values.numpy()


def experts_of(sequence: Sequence) -> np.ndarray:
    """What the engine would answer: int32 [tokens - 1, layers, k], sorted."""
    assert sequence.experts is not None
    payload = sequence.experts.encoded(0, sequence.length - 1)
    rows = np.frombuffer(base64.b64decode(payload), np.int32)
    experts = sequence.experts
    return np.sort(
        rows.reshape(sequence.length - 1, len(experts.in_layer), experts.chosen), axis=-1
    )
