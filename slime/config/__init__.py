"""Flags and YAML in, one frozen `Config` out. Imports no torch, ray, transformers, megatron or sglang."""

from __future__ import annotations

from slime.config.config import Config
from slime.config.flat import FlatArgs
from slime.config.make import make_config, parse_args

__all__ = ["Config", "FlatArgs", "make_config", "parse_args"]
