"""MiMo-7B (``MiMoForCausalLM``): Qwen2 with multi-token-prediction layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.models.qwen2 import QWEN2
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily


def _spec(config: dict[str, Any]) -> ModelSpec:
    return dataclasses.replace(QWEN2.make_spec(config), family="mimo")


MIMO = ModelFamily(
    name="mimo",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    rules=QWEN2.rules,
    make_spec=_spec,
    ignored=(*QWEN2.ignored, r"model\.mtp_layers\.\d+\..*"),
)
