"""MiMo-7B (``MiMoForCausalLM``): Qwen2; the layers for multi-token prediction are not used."""

from __future__ import annotations

from slime.models.qwen2 import QWEN2
from slime.models.table import ModelFamily

MIMO = ModelFamily(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    rules=QWEN2.rules,
    make_spec=QWEN2.make_spec,
    ignored=(*QWEN2.ignored, r"model\.mtp_layers\.\d+\..*"),
)
