"""PEFT's ``adapter_config.json``: the fields that slime writes, and adapters that change their
base."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"

#: Initialisations that change the base weights, so the adapter does not fit the stored base.
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_FROZEN_COPY = re.compile(r".*\.(embed_tokens|lm_head)\.base_layer\.weight")


def is_adapter_dir(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def scale_of(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    """Return the factor of B·A·x: ``alpha / rank``, or for rsLoRA ``alpha / √rank``."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def plain_config(
    rank: int,
    alpha: float,
    targets: Iterable[str],
    base: str,
    *,
    dropout: float = 0.0,
    left_out: str = "",
) -> dict[str, Any]:
    """Return the fields of an adapter with one rank and one scaling, alpha / rank.

    Args:
        targets: last parts of the names of the adapted modules.
        base: directory or hub name of the base model.
        left_out: regular expression of modules that are not adapted, whatever their last part.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(set(targets)),
        **({"exclude_modules": left_out} if left_out else {}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    }


def moves_base(config: Mapping[str, Any]) -> bool:
    """Tell whether the adapter was initialised in a way that changed the base's weights."""
    initial = config.get("init_lora_weights")
    return isinstance(initial, str) and initial.lower().startswith(_MOVES_BASE)


def is_frozen_copy(name: str) -> bool:
    """Tell whether a tensor is a copy of a base weight, which PEFT saves with adapters of embedding
    and output layer."""
    return _FROZEN_COPY.fullmatch(name) is not None
