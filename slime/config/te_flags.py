"""Flags that need Transformer Engine, and the error if it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from slime.config.flag import option_of
from slime.errors import UserError

_FP8 = "low-precision matrix products are Transformer Engine's"

#: dest → why it needs Transformer Engine. Every value but None and False needs it, unless `_ONLY`
#: names a single value.
NEEDS: dict[str, str] = {
    "transformer_impl": "the layers are Transformer Engine's",
    "attention_backend": "cuDNN's fused attention comes with Transformer Engine",
    "fp8_format": _FP8,
    "fp4_format": _FP8,
    "fp8_param_gather": _FP8,
    "use_precision_aware_optimizer": (
        "optimizer states in lower precision need Transformer Engine's FusedAdam"
    ),
    "delay_wgrad_compute": "only its linear layers can delay weight gradients",
    "symmetric_ar_type": "the fused kernel is Transformer Engine's",
    "fine_grained_activation_offloading": "activations are moved by Transformer Engine's hooks",
}
#: dest → the only value that needs Transformer Engine.
_ONLY: dict[str, str] = {"transformer_impl": "transformer_engine", "attention_backend": "fused"}

#: Flags of `NEEDS` that have an effect only inside Transformer Engine's layers.
ACTS_IN_LAYERS = ("fp8_format", "fp4_format", "fp8_param_gather", "delay_wgrad_compute")

#: How to install the releases that megatron-core 0.16 supports.
INSTALL = (
    "pip install 'transformer-engine[pytorch]>=2.9,<2.12' on the trainer's hosts (GPU, CUDA "
    "toolkit)"
)


def is_installed() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def missing(values: Mapping[str, Any], *, installed: bool) -> UserError | None:
    """Return an error for the first flag that lacks Transformer Engine or its layers, or None.

    Args:
        values: by dest; a missing dest is unset.

    Example:
        >>> print(missing({"attention_backend": "fused"}, installed=False).what)
        --attention-backend fused needs Transformer Engine
        >>> missing({"attention_backend": "fused"}, installed=True) is None
        True
    """
    for dest, why in NEEDS.items():
        value = values.get(dest)
        wanted = _ONLY.get(dest)
        if value is None or value is False or (wanted is not None and value != wanted):
            continue
        if dest == "use_precision_aware_optimizer" and values.get("optimizer_cpu_offload"):
            continue  # --optimizer-cpu-offload has its own implementation
        option = option_of(dest)
        asked = option if value is True else f"{option} {value}"
        if not installed:
            return UserError(
                f"{asked} needs Transformer Engine",
                why=f"{why}, and it is not installed here",
                fix=f"{INSTALL}, or leave {option} out",
            )
        if dest in ACTS_IN_LAYERS and values.get("transformer_impl") != "transformer_engine":
            return UserError(
                f"{asked} has no effect without --transformer-impl transformer_engine",
                why="it acts inside Transformer Engine's layers",
                fix="pass that too",
            )
    return None
