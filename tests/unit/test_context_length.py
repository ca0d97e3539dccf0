"""The context length that engines take, by config.json and --sglang-context-length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.embedded.architecture import Architecture
from slime.models.context import context_length, engine_context

YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": LINEAR}, 32768),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, 32768),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 8192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": None}}, 4096),
        ({"rope_scaling": LINEAR | {"original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": YARN}, 4096),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1024}}, 4096),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 32.0}}, 4096),
        ({"rope_parameters": {"rope_type": "default", "factor": 3.0}}, 4096),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}}, 4096),
        ({"model_type": "gemma3_text", "rope_scaling": LINEAR}, 4096),
        ({"seq_length": 8192}, 8192),
        ({"model_max_length": 2048}, 2048),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_positions_count_with_the_factors_that_sglang_applies(
    fields: dict[str, Any], expected: int | None
) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 4096, **fields}
    assert context_length(config) == expected
    assert context_length({"model_type": "outer", "text_config": config}) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(1024, 1024), ("128k", 128_000), ("25.6k", 25_600), ("1Ki", 1024), ("many", None)],
)
def test_a_length_that_the_user_asks_for_comes_first(
    asked: Any, expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    flags = {"num_rollout": 1, "hf_checkpoint": str(tmp_path), "rollout_engine": "sglang"}
    assert engine_context(make_config(**flags)) == 64
    assert engine_context(make_config(**flags, sglang_context_length=asked)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 64),
        ({"rope_scaling": LINEAR}, 512),
        ({"rope_scaling": YARN}, 64),
        ({"seq_length": 128}, 128),
        ({"max_position_embeddings": None}, 2048),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 16}, 16),
    ],
)
def test_the_embedded_engine_takes_the_same_length(fields: dict[str, Any], expected: int) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 8}
    config |= {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "rms_norm_eps": 1e-6} | fields
    config = {key: value for key, value in config.items() if value is not None}
    assert Architecture.from_config(config).context_length == expected
