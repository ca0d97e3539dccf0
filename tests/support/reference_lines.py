"""Command lines of the reference system's scripts, examples and tests, and what stands for the
files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.hf_configs import PUBLISHED

LINES: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_suffix(".jsonl").read_text().splitlines()
]
#: What is not in this version; a line that asks for it is refused by this name.
MISSING = (
    "GLM-5",
    *(
        "training of multi-token-prediction layers",
        "ending trainer processes",
        "the rollout buffer service",
    ),
    "a lagged copy of the policy",
)
#: Lines by name → what they are refused for.
REFUSED = {
    "release_train_0": ("ending trainer processes",),
    "run-glm5-744B-A40B": ("GLM-5",),
    "run-glm5.2-744B-A40B": ("GLM-5",),
    "mimo_7B_mtp_only_grad_0": ("training of multi-token-prediction layers",),
    "run-mimo-7B-rl-eagle": ("training of multi-token-prediction layers",),
    "run-glm4.7-30B-A3B": ("training of multi-token-prediction layers",),
    "slime_plugins_rollout_buffer_rollout_buffer_example": (
        *("the rollout buffer service", "a lagged copy of the policy"),
    ),
}
#: What is wrong with a line beside: two of its pipeline stages and eight ranks of experts need 16
#: GPUs.
CONTRADICTIONS = {"run-glm4.7-30B-A3B": ["8 trainer GPUs cannot be divided by 16"]}
#: Lines with drafts and --rollout-top-p: SGLang reports no sampling masks when it verifies drafts.
WITH_MASKED_DRAFTS = {"glm4.7_30B_A3B_pd_mooncake_0"}
#: Beginning of a model's name → the published model whose config.json it has, and what differs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", {}),
    "Qwen3-235B-A22B": (
        "Qwen/Qwen3-30B-A3B",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
    ),
    "Qwen3-4B-Instruct-2507": (
        "Qwen/Qwen3-4B",
        {"rope_theta": 5000000, "max_position_embeddings": 262144},
    ),
    "qwen3-4b-sft": ("Qwen/Qwen3-4B", {"rope_theta": 5000000, "max_position_embeddings": 262144}),
    "Qwen3-4B": ("Qwen/Qwen3-4B", {}),
    "Qwen3-8B": (
        "Qwen/Qwen3-4B",
        {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    ),
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", {}),
    "Qwen2.5-0.5B": (
        "Qwen/Qwen2.5-7B",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "Qwen3.5-9B": ("Qwen/Qwen3.5-9B", {}),
    "Qwen3.5-0.8B": (
        "Qwen/Qwen3.5-9B",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "layer_types": None,
            "linear_num_value_heads": 16,
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), ("Qwen/Qwen3.5-35B-A3B", {})),
    "GLM-Z1-9B": ("zai-org/GLM-4-9B-0414", {}),
    "GLM-4.7-Flash": ("zai-org/GLM-4.7-Flash", {}),
    "DeepSeek-R1": ("deepseek-ai/DeepSeek-V3", {}),
    "Moonlight": ("moonshotai/Moonlight-16B-A3B", {}),
    "Kimi-K2": (
        "deepseek-ai/DeepSeek-V3",
        {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0,
            "vocab_size": 163840,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
#: Published models of these text models also see images: what their config.json has outside.
OUTER: dict[str, dict[str, Any]] = {
    text: {"model_type": outer, "architectures": [f"{name}ForConditionalGeneration"]}
    for text, outer, name in (
        ("qwen3_5_text", "qwen3_5", "Qwen3_5"),
        ("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5Moe"),
    )
}
#: Server groups of a policy on its own, for lines whose YAML is not here.
GROUPS = {"sglang": [{"name": "policy", "server_groups": [{"worker_type": "regular"}]}]}
#: Settings per role, for lines whose YAML is not here.
ROLES = {
    "megatron": [
        {"name": "default", "role": "actor", "overrides": {"lr": 1e-6}},
        {"name": "default", "role": "critic", "overrides": {"lr": 1e-5, "save": "critic"}},
    ]
}


def values_of(argv: list[str], flag: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == flag]


def with_files(line: dict[str, Any], folder: Path) -> list[str]:
    """The words of a line, with files in the place of those that it names and that are not here."""
    argv = list(line["argv"])
    if path := values_of(argv, "--custom-config-path"):
        custom = folder / "custom.yaml"
        custom.write_text("use_tis: true\n")
        argv[argv.index(path[0])] = str(custom)
    if path := values_of(argv, "--megatron-config-path"):
        roles = folder / "roles.yaml"
        roles.write_text(yaml.safe_dump(ROLES))
        argv[argv.index(path[0])] = str(roles)
    return argv


def published_config(argv: list[str]) -> dict[str, Any]:
    """The config.json of the line's model, of its text part alone where it also sees images."""
    name = Path(values_of(argv, "--hf-checkpoint")[-1]).name
    published, changes = next(found for start, found in MODELS.items() if name.startswith(start))
    return {**PUBLISHED[published]["config"], **changes}


def config_json(argv: list[str], folder: Path) -> Path:
    """A directory with the config.json of the line's model."""
    config = published_config(argv)
    if outer := OUTER.get(config["model_type"]):
        config = {
            **outer,
            "text_config": config,
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
