"""The context length of a model, in tokens of prompt and response."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.models.nested import decoder_config
from slime.models.spec import read_hf_config


def model_context(config: Config) -> int | None:
    """Return the default context length of the run's engines, in tokens of prompt and response;
    None if unknown, because engines are external or user functions make the requests.

    SGLang uses ``--sglang-context-length``, else the model's positions times the factor of its
    rotary scaling (unless the positions already include it).
    """
    rollout = config.rollout
    own = (
        rollout.rollout_function_path
        or rollout.custom_generate_function_path
        or rollout.rollout_sample_hook_path
    )
    model_path = config.checkpoint.hf_checkpoint
    if own or config.engine.rollout_external_engine_addrs or model_path is None:
        return None
    asked = config.values().get("sglang_context_length")
    if asked:
        return int(asked)
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return None
    return context_length(read_hf_config(file))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of prompt and response that config.json names: the positions times
    the factor of the rotary scaling, unless they already include it. None if it names none."""
    model = decoder_config(config)
    positions = model.get("max_position_embeddings")
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    is_scaled = "original_max_position_embeddings" in scaling or "factor" not in scaling
    return None if not positions else int(positions if is_scaled else positions * scaling["factor"])
