"""Vision models with random weights in bfloat16, in the form of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import byte_tokenizer

_MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def tokenizer_with_marks() -> tuple[Any, dict[str, Any]]:
    """A byte tokenizer with the tokens around images, and these tokens by their names in a
    config."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS.values())})
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _MARKS.items()}


def write_qwen3_5(decoder: dict[str, Any], path: Path) -> None:
    """Write a Qwen3.5 of these sizes, dense or with experts, and a small vision tower: SGLang
    serves no text models of Qwen3.5."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    tokenizer, tokens = tokenizer_with_marks()
    rope = dict(decoder["rope_parameters"])
    rotated = int(decoder["head_dim"] * rope["partial_rotary_factor"]) // 2
    third = rotated // 3
    rope |= {"mrope_section": [rotated - 2 * third, third, third], "mrope_interleaved": True}
    kind = Qwen3_5MoeConfig if "num_experts" in decoder else Qwen3_5Config
    config = kind(
        text_config=decoder
        | {"rope_parameters": rope, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
        vision_config={
            "depth": 2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": decoder["hidden_size"],
        },
        **tokens,
        tie_word_embeddings=decoder["tie_word_embeddings"],
    )
    write_weights(config, path)
    # SGLang finds the layers with attention by it, and transformers leaves it out
    written = json.loads((path / "config.json").read_text(encoding="utf-8"))
    written["text_config"]["full_attention_interval"] = decoder["full_attention_interval"]
    (path / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    write_processors(path)
    tokenizer.save_pretrained(path)


def write_processors(path: Path) -> None:
    """Write the settings of Qwen3-VL's processors of images and videos."""
    common = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processors = {
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        },
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
    }
    for name, settings in processors.items():
        (path / name).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def write_weights(config: Any, path: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(path)
