"""Public models, by what decides how they are computed: the published config.json of a relative,
and the fields in which they differ. Sizes may be the relative's."""

from __future__ import annotations

from typing import Any

from tests.support.hf_configs import PUBLISHED

_QWEN2, _QWEN3, _QWEN3_MOE = "Qwen/Qwen2.5-7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B"
_LLAMA, _MISTRAL = "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.1"
_NO_WINDOW = "mistralai/Mistral-7B-Instruct-v0.3"
_QWEN3_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": 4096,
    },
}
_MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}

#: Name → (relative, changes); None for a relative: the changes are the config.
PUBLIC: dict[str, tuple[str | None, dict[str, Any]]] = {
    "Qwen2.5-Math-7B": (_QWEN2, {"rope_theta": 10000, "max_position_embeddings": 4096}),
    "Qwen2.5-Math-1.5B": (_QWEN2, {"rope_theta": 10000, "tie_word_embeddings": True}),
    "Qwen2.5-7B-Instruct-1M": (
        _QWEN2,
        {
            "rope_theta": 10000000.0,
            "max_position_embeddings": 1010000,
            "dual_chunk_attention_config": {
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
        },
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (_QWEN2, {"rope_theta": 10000, "use_mrope": False}),
    "QwQ-32B": (_QWEN2, {"num_hidden_layers": 64, "max_window_layers": 64}),
    "Qwen2-7B, windows and YaRN": (
        _QWEN2,
        {
            "use_sliding_window": True,
            "sliding_window": 32768,
            "max_window_layers": 28,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
    ),
    "Qwen3-1.7B": (_QWEN3, {"hidden_size": 2048, "num_attention_heads": 16}),
    "Qwen3-4B-Instruct-2507": (_QWEN3, {"rope_theta": 5000000}),
    "DeepSeek-R1-0528-Qwen3-8B": (
        _QWEN3,
        {
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "attn_factor": 0.8782488562869419,
                "original_max_position_embeddings": 32768,
            },
        },
    ),
    "Qwen3-30B-A3B": (_QWEN3_MOE, {}),
    "Qwen3-Coder-30B-A3B": (_QWEN3_MOE, {"rope_theta": 10000000}),
    "Llama-3.2-1B": (_LLAMA, {"tie_word_embeddings": True, "head_dim": 64, "hidden_size": 2048}),
    "Llama-3.1-8B": (_LLAMA, {}),
    "DeepSeek-R1-Distill-Llama-8B": (_LLAMA, {}),
    "Llama-3.1-Nemotron-Nano-8B-v1": (_LLAMA, {}),
    "SmolLM2-1.7B": ("HuggingFaceTB/SmolLM2-135M", {"num_key_value_heads": 9}),
    "Yi-1.5-9B": (_LLAMA, {"rope_theta": 5000000.0, "rope_scaling": None, "pretraining_tp": 1}),
    "Llama-2-7B": (
        _LLAMA,
        {"num_key_value_heads": None, "rope_theta": None, "rope_scaling": None},
    ),
    "Llama-3.3-Nemotron-Super-49B": (
        None,
        {"model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"]},
    ),
    "Mistral-7B-v0.1": (_MISTRAL, {}),
    "Mistral-7B-Instruct-v0.3": (_NO_WINDOW, {}),
    "Mistral-Nemo-Instruct-2407": ("mistralai/Mistral-Nemo-Base-2407", {}),
    "Mistral-Small-24B-2501": (_NO_WINDOW, {"head_dim": 128, "rope_theta": 100000000.0}),
    "Ministral-8B-Instruct-2410": (
        _MISTRAL,
        {"sliding_window": 32768, "head_dim": 128, "rope_theta": 100000000.0},
    ),
    "Zephyr-7B-beta": (_MISTRAL, {}),
    "Mistral-Small-3.1": ("mistralai/Mistral-Small-3.1-24B-Base-2503", {}),
    "Ministral-3-8B-2512": ("mistralai/Ministral-3-8B-Base-2512", {}),
    "Mixtral-8x7B": ("mistralai/Mixtral-8x7B-v0.1", {}),
    "Phi-4": ("microsoft/phi-4", {}),
    "Phi-4-mini": ("microsoft/Phi-4-mini-instruct", {}),
    "Gemma-3-1b": ("google/gemma-3-1b-pt", {}),
    "Gemma-3-4b": ("google/gemma-3-4b-pt", {}),
    "OLMo-2-7B": ("allenai/OLMo-2-1124-7B", {}),
    "OLMo-3-7B": ("allenai/Olmo-3-1025-7B", {}),
    "GLM-4.5-Air": ("zai-org/GLM-4.5-Air", {}),
    "GLM-4.5": ("zai-org/GLM-4.5", {}),
    "GLM-4.6 and 4.7": ("zai-org/GLM-4.5", {"max_position_embeddings": 202752}),
    "GLM-4.7-Flash": ("zai-org/GLM-4.7-Flash", {}),
    "GLM-4-9B-0414": ("zai-org/GLM-4-9B-0414", {}),
    "GLM-Z1-9B-0414": ("zai-org/GLM-4-9B-0414", {}),
    "glm-4-9b-chat-hf": ("zai-org/glm-4-9b-chat-hf", {}),
    "GLM-5": (None, {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}),
    "DeepSeek-V3 and R1": ("deepseek-ai/DeepSeek-V3", {}),
    "DeepSeek-V3.1": ("deepseek-ai/DeepSeek-V3", {}),
    "DeepSeek-V3.2": (
        None,
        {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
    ),
    "DeepSeek-V2-Lite": ("deepseek-ai/DeepSeek-V2-Lite", {}),
    "Moonlight-16B-A3B": ("moonshotai/Moonlight-16B-A3B", {}),
    "Kimi-K2-Instruct": (
        "deepseek-ai/DeepSeek-V3",
        {
            "model_type": "kimi_k2",
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
    ),
    "Kimi-Linear-48B-A3B": (
        None,
        {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]},
    ),
    "Qwen3-Next-80B-A3B": ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}),
    "Qwen3.5": (
        None,
        {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": PUBLISHED["Qwen/Qwen3.5-9B"]["config"],
            "vision_config": {},
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", {}),
    "MiniMax-M2": ("MiniMaxAI/MiniMax-M2", {}),
    "Seed-OSS-36B": ("ByteDance-Seed/Seed-OSS-36B-Instruct", {}),
    "SmolLM3-3B": ("HuggingFaceTB/SmolLM3-3B", {}),
    "Granite-4.0-H": (
        None,
        {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"]},
    ),
    "Granite-3.3-8B": ("ibm-granite/granite-3.3-8b-instruct", {}),
    "Nemotron-H": (None, {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}),
    "Qwen1.5-MoE": ("Qwen/Qwen1.5-MoE-A2.7B", {}),
    "MiMo-7B": ("XiaomiMiMo/MiMo-7B-RL", {}),
    "ERNIE-4.5-21B": ("baidu/ERNIE-4.5-21B-A3B-PT", {}),
    "Hunyuan-7B": ("tencent/Hunyuan-7B-Instruct", {}),
    "EXAONE-4": ("LGAI-EXAONE/EXAONE-4.0-32B", {}),
    "Apertus-8B": (None, {"model_type": "apertus", "architectures": ["ApertusForCausalLM"]}),
    "LFM2": (None, {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}),
    "Qwen2.5-VL-7B": (
        _QWEN2,
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {},
        },
    ),
    "Qwen3-VL": (
        None,
        {
            **_QWEN3_VL,
            "text_config": {
                **PUBLISHED[_QWEN3]["config"],
                "model_type": "qwen3_vl_text",
                "rope_theta": 5000000,
                "rope_scaling": _MROPE,
            },
        },
    ),
    "Ling and Ring": (
        None,
        {"model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"]},
    ),
    "Llama-4-Scout": (
        None,
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
    ),
}


def public_config(name: str) -> dict[str, Any]:
    """Return the config of `PUBLIC`; fields that are None there are left out."""
    relative, changes = PUBLIC[name]
    config = {**(PUBLISHED[relative]["config"] if relative else {}), **changes}
    return {key: value for key, value in config.items() if value is not None}
