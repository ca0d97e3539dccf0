"""Tiny random models that transformers made, of every family: what the trainer's numbers are
compared with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.trainer_ranks import VOCAB

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DENSE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: name → (transformers' config class, what it differs in)
LLAMA_LIKE: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama3 rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "yarn rope": (transformers.LlamaConfig, {"rope_parameters": DENSE_YARN}),
    "linear rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "mistral": (transformers.MistralConfig, {"head_dim": 12, "sliding_window": None}),
    "mistral, window": (transformers.MistralConfig, {"head_dim": 12, "sliding_window": 5}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2, window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": None,
}
CHOSEN_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    **CHOSEN_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}

OTHER_FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama, biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen3, biases": (transformers.Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe, biases": (
        transformers.Qwen3MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "head_dim": 8,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "head_dim": 16,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe, every second layer, not normalised": (
        transformers.Qwen3MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "head_dim": 8,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm4": (
        transformers.Glm4Config,
        {"head_dim": 8, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    ),
    "glm4, tied, no bias": (
        transformers.Glm4Config,
        {
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe, as Air": (
        transformers.Glm4MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe, groups, not normalised": (
        transformers.Glm4MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        {
            **LATENT,
            "v_head_dim": 12,  # as long as a key
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", *["sparse"] * (SHAPE["num_hidden_layers"] - 1)],
        },
    ),
    "deepseek_v3, as Moonlight": (transformers.DeepseekV3Config, {**LATENT, "q_lora_rank": None}),
    "deepseek_v3, tied, mscale": (
        transformers.DeepseekV3Config,
        {
            **LATENT,
            "v_head_dim": 16,  # longer than a key
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
}


LAST_FULL = ["sliding_attention"] * 3 + ["full_attention"]
OTHER_FAMILIES |= {
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": LAST_FULL,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": (transformers.Olmo2Config, {"rope_parameters": DEFAULT}),
    "olmo3": (
        transformers.Olmo3Config,
        {
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": DEFAULT,
            },
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"rope_parameters": DEFAULT}),
    "phi3": (
        transformers.Phi3Config,
        {"sliding_window": 9, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": (
        transformers.Phi3Config,
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.3, 2.0],
                "long_factor": [1.0, 4.0, 9.0],
            },
        },
    ),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 12}),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "exaone4": (
        transformers.Exaone4Config,
        {"sliding_window": 6, "layer_types": LAST_FULL, "rope_parameters": DEFAULT},
    ),
    "exaone4, whole": (
        transformers.Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "sliding_window": 7, "rope_parameters": DEFAULT},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {
            **LATENT,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2, groups": (
        transformers.DeepseekV2Config,
        {
            **LATENT,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.6,
            "rope_parameters": DEFAULT,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gpt_oss, whole": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": DEFAULT,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 12,
            "rotary_dim": 6,
            "rope_parameters": DEFAULT,
        },
    ),
    "ernie4_5_moe": (
        transformers.Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_layer_end_index": 2,
            "rope_parameters": DEFAULT,
        },
    ),
    "hunyuan_v1_dense": (
        transformers.HunYuanDenseV1Config,
        {
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 1000.0,
            },
        },
    ),
    "glm": (
        transformers.GlmConfig,
        {"head_dim": 8, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    ),
}


#: Of gated delta nets: three value heads for each key head, of another width.
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25},
}
OTHER_FAMILIES |= {
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {
            **DELTA,
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, {**DELTA, "tie_word_embeddings": True}),
}


OTHER_FAMILIES["qwen3_5_moe_text"] = (
    transformers.Qwen3_5MoeTextConfig,
    {
        **DELTA,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
    },
)
#: Queries grow at every eighth position.
MINISTRAL3: dict[str, Any] = {
    "head_dim": 12,
    "rope_parameters": {
        **DENSE_YARN,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
OTHER_FAMILIES |= {
    "ministral3": (transformers.Ministral3Config, MINISTRAL3),
    "ministral3, window, tied": (
        transformers.Ministral3Config,
        {**MINISTRAL3, "sliding_window": 6, "tie_word_embeddings": True},
    ),
}
M_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
#: Models that see images: name → (transformers' class, config of the decoder, of the tower).
WITH_IMAGES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "mistral3": (
        transformers.Mistral3Config,
        {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
        PIXTRAL,
    ),
    "mistral3, Ministral 3, tied": (
        transformers.Mistral3Config,
        {"model_type": "ministral3", **MINISTRAL3, "tie_word_embeddings": True},
        PIXTRAL,
    ),
    "gemma3": (
        transformers.Gemma3Config,
        {**OTHER_FAMILIES["gemma3_text"][1], "model_type": "gemma3_text"},
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        {"rope_parameters": {**M_ROPE, "mrope_section": [1, 1, 2]}},
        {**QWEN_TOWER, "fullatt_block_indexes": [0]},
    ),
    "qwen2_5_vl, tied, window": (
        transformers.Qwen2_5_VLConfig,
        {
            "rope_parameters": {**M_ROPE, "mrope_section": [1, 1, 2]},
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
        {**QWEN_TOWER, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        {
            "head_dim": 12,
            "rope_parameters": {**M_ROPE, "mrope_section": [2, 2, 2], "mrope_interleaved": True},
        },
        {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        {
            **CHOSEN_EXPERTS,
            "num_experts": 4,
            "mlp_only_layers": [1],
            "rope_parameters": {**M_ROPE, "mrope_section": [1, 2, 1], "mrope_interleaved": True},
        },
        {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}
#: Families that have them.
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def save_tiny(kind: str, directory: Path, layers: int | None = None) -> torch.nn.Module:
    """A random transformers model whose every parameter and buffer matters, saved to
    ``directory``.

    Args:
        layers: default: as many as the kind has, 4. With fewer, every sort of layer is still there.
    """
    if kind in LLAMA_LIKE:
        config_class, extra = LLAMA_LIKE[kind]
        fields = _with_layers(config_class, {**SMALL, **extra}, layers)
        return save_random(config_class(**fields), directory, scale=5)
    if kind in WITH_IMAGES:
        config_class, text, tower = WITH_IMAGES[kind]
        tied = text.get("tie_word_embeddings", kind == "gemma3")  # of which no other exists
        inner = {**SHAPE, **text, "tie_word_embeddings": tied}
        if layers is not None:
            inner["num_hidden_layers"] = layers
        config = config_class(text_config=inner, vision_config=tower, tie_word_embeddings=tied)
        return save_random(config, directory, scale=8)
    config_class, extra = OTHER_FAMILIES[kind]
    fields = _with_layers(config_class, {**SHAPE, **extra}, layers)
    # the norm behind a gated delta net makes the most of rounding as it is
    return save_random(config_class(**fields), directory, scale=3 if kind in HYBRIDS else 8)


def _with_layers(config_class: type, fields: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The fields with ``layers`` layers, of which the first are one of each sort."""
    if layers is None:
        return fields
    config = config_class(**fields)
    shorter = {**fields, "num_hidden_layers": layers}
    for name in ("layer_types", "no_rope_layers", *({"mlp_layer_types"} & fields.keys())):
        if sorts := [*dict.fromkeys(getattr(config, name, None) or ())]:
            shorter[name] = (sorts * layers)[:layers]
    return shorter


#: Of `save_moe`: experts of a layer, and how many of them a token passes.
EXPERTS, TOPK = 8, 2


def save_moe(directory: Path, **changes: Any) -> Path:
    """A random Qwen3-MoE with one dense and three expert layers, whose router is not
    indifferent."""
    config = transformers.Qwen3MoeConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOPK,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "pad_token_id": None,
            "eos_token_id": 1,
            "bos_token_id": None,
            **changes,
        }
    )
    save_random(config, directory, scale=5)
    return directory


def save_random(config: Any, directory: Path, *, scale: float) -> torch.nn.Module:
    """Matrices are ``scale`` times as large as at the start of training, routers' 20 times; biases
    of experts, which start at 0, are as random as others: nothing is indifferent."""
    torch.manual_seed(1)
    auto = transformers.AutoModelForCausalLM
    if "text_config" in config.to_dict():
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("_bias"):
                parameter.mul_(20 if name.endswith(("gate.weight", "router.weight")) else scale)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    if config.model_type.startswith("qwen3_5_moe"):
        stack_experts(directory)
    if config.model_type == "qwen3_vl_moe":
        transpose_experts(directory)
    return model


def transpose_experts(directory: Path) -> None:
    """Write experts as published checkpoints of Qwen3-VL have them, [experts, in, out];
    transformers writes them as [experts, out, in] and reads both."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, stack in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = stack.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def stack_experts(directory: Path) -> None:
    """Write experts as published checkpoints of Qwen3.5 have them, [experts, out, in] with gate
    above up; transformers writes them one by one."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    single = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
    layers: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(tensors):
        if found := single.fullmatch(name):
            experts = layers.setdefault(found[1], {})
            experts.setdefault(int(found[2]), {})[found[3]] = tensors.pop(name)
    for name, experts in layers.items():
        order = [experts[number] for number in range(len(experts))]
        tensors[f"{name}.gate_up_proj"] = torch.stack(
            [torch.cat([one["gate_proj"], one["up_proj"]]) for one in order]
        )
        tensors[f"{name}.down_proj"] = torch.stack([one["down_proj"] for one in order])
    save_file(tensors, file, metadata={"format": "pt"})


def moved(model: Any, directory: Path) -> Any:
    """Change every weight of a model, and save it to ``directory``."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model
