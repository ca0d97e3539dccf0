"""Models of 70 thousand parameters whose tokens are characters.

They learn to say one digit within a dozen steps, because one row of the output layer decides it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
DIGIT = "7"
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
#: family → (transformers' name of it, what its config has besides)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}),
    "qwen3_5_text": (
        "Qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "glm4": ("Glm4", {}),
    "glm4_moe": (
        "Glm4Moe",
        {**_EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 8,
            "tie_word_embeddings": False,
        },
    ),
}


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    """A Hugging Face directory of a random model of ``family`` with two layers, and a tokenizer of
    characters."""
    import torch
    import transformers

    name, own = FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY[EOS],
        "pad_token_id": VOCABULARY[PAD],
        **own,
    }
    if family in ("qwen2", "deepseek_v3"):
        del shape["head_dim"]
    described = f"{name}TextConfig" if family.endswith("_text") else f"{name}Config"
    config = getattr(transformers, described)(**shape)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # transformers makes the embedding of the padding token 0, where the gradient of a normalisation
    # is a thousandfold
    model.get_input_embeddings().weight.data[VOCABULARY[PAD]].normal_(0, 0.02)
    model.generation_config.eos_token_id = VOCABULARY[EOS]
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def character_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
