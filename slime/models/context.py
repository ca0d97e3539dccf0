"""The context length of a model, in tokens of prompt and response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.models.nested import decoder_config
from slime.models.spec import read_hf_config

#: Where config.json may say it; the first that is set counts.
_NAMES = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}


def model_context(config: Config) -> int | None:
    """Return the context length of the run's engines, in tokens of prompt and response; None if
    unknown, also because engines are external or user functions make the requests."""
    rollout = config.rollout
    own = (
        rollout.rollout_function_path
        or rollout.custom_generate_function_path
        or rollout.rollout_sample_hook_path
    )
    if own or config.engine.rollout_external_engine_addrs:
        return None
    return engine_context(config)


def engine_context(config: Config) -> int | None:
    """Return the context length of engines that the run starts; None if unknown:
    ``--sglang-context-length``, or what `context_length` finds in config.json."""
    path = config.checkpoint.hf_checkpoint
    if path is None:
        return None
    if asked := config.values().get("sglang_context_length"):
        return _read_number(str(asked))
    file = Path(path) / "config.json"
    return context_length(read_hf_config(file)) if file.is_file() else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of prompt and response that engines take by config.json; None if it
    does not say it.

    It is SGLang's rule for what transformers reads: positions, times the factor of a rotary scaling
    that is linear or dynamic. Other kinds have the scaled length, or another one, as their
    positions; so does a scaling with ``original_max_position_embeddings``, and one of some layers
    only, as all of Gemma 3's are.
    """
    model = decoder_config(config)
    positions = next((model[name] for name in _NAMES if model.get(name)), None)
    if positions is None:
        return None
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    of_some_layers = str(model.get("model_type")).startswith("gemma3")
    is_scaled = kind in ("linear", "dynamic") and "original_max_position_embeddings" not in scaling
    factor = (scaling.get("factor") or 1) if is_scaled and not of_some_layers else 1
    return int(positions * factor)


def _read_number(text: str) -> int | None:
    """Read a number as SGLang does: 131072, 128k (128,000) or 128Ki (131,072). None if SGLang
    refuses it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|M|Ki|Mi|)", text.strip())
    return int(float(match[1]) * _UNITS[match[2]]) if match is not None else None
