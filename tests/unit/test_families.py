"""Every model family computes in the trainer what transformers computes, and goes to Hugging Face form and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from trainer_ranks import VOCAB, free_port, make_batch, trainer_config

from slime.train.megatron.backend import MegatronBackend
from slime.train.megatron.parallel import RankInfo

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT: dict[str, Any] = {
    **EXPERTS,
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

#: name → (transformers' config class, what it differs in)
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**EXPERTS, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "qwen3_moe, every second layer, not normalised": (
        transformers.Qwen3MoeConfig,
        {**EXPERTS, "num_experts": 4, "head_dim": 8, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "glm4": (transformers.Glm4Config, {"head_dim": 8, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "glm4, tied, no bias": (
        transformers.Glm4Config,
        {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            **EXPERTS,
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
        {**EXPERTS, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 3, "first_k_dense_replace": 2},
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


def save_tiny(kind: str, directory: Path) -> torch.nn.Module:
    """A random transformers model whose every parameter and buffer matters, saved to ``directory``."""
    config_class, extra = MODELS[kind]
    torch.manual_seed(1)
    config = config_class(**{**SHAPE, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(20 if name.endswith("gate.weight") else 8)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    return model


def trainer(directory: Path, **flags: Any) -> MegatronBackend:
    config = trainer_config(hf_checkpoint=str(directory), **flags)
    backend = MegatronBackend(config, RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    try:
        backend.setup()
    except BaseException:
        backend.close()
        raise
    return backend


@pytest.mark.parametrize("kind", MODELS)
def test_log_probs_equal_transformers_and_weights_come_back(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path / "hf")
    backend = trainer(tmp_path / "hf", save_hf=str(tmp_path / "back"))
    try:
        batch = make_batch()
        scores = backend.log_probs(batch)
        backend.save(0)
    finally:
        backend.close()
    assert scores is not None
    for tokens, response, ours in zip(batch.tokens, batch.response_lengths, scores):
        with torch.no_grad():
            logp = (model(tokens[None]).logits[0] / 0.8).log_softmax(-1)
        theirs = logp[:-1].gather(1, tokens[1:, None])[-response:, 0]
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    saved, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind.split(",")[0]
