"""Flags and YAML in, one frozen `Config` out. Imports no torch, ray, transformers, megatron or
sglang.

Names are imported on first use: code that needs only the record (`slime.config.config`) does not
import the parser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.config.config import Config, FlatArgs
    from slime.config.make import make_config, parse_args

__all__ = ["Config", "FlatArgs", "make_config", "parse_args"]

_MODULES = {"Config": "config", "FlatArgs": "config", "make_config": "make", "parse_args": "make"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
