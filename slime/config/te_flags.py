"""Flags that need Transformer Engine, and the error where it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from slime.config.flag import option_of
from slime.errors import UserError

_FP8 = "low-precision matrix products are Transformer Engine's"

#: dest → why it needs Transformer Engine. Any value but None and False does, unless `_ONLY` names
#: the one value.
NEEDS: dict[str, str] = {
    "transformer_impl": "the layers are Transformer Engine's",
    "attention_backend": "cuDNN's fused attention comes with Transformer Engine",
    "fp8_format": _FP8,
    "fp4_format": _FP8,
    "fp8_param_gather": _FP8,
    "use_precision_aware_optimizer": (
        "optimizer states in lower precision need Transformer Engine's FusedAdam"
    ),
    "delay_wgrad_compute": "its linear layers alone can delay weight gradients",
    "symmetric_ar_type": "the fused kernel is Transformer Engine's",
    "fine_grained_activation_offloading": "activations are moved by Transformer Engine's hooks",
}
#: Flags of which a single value needs Transformer Engine → that value.
_ONLY: dict[str, str] = {"transformer_impl": "transformer_engine", "attention_backend": "fused"}

#: Flags among them that act inside Transformer Engine's layers: without these layers they would do
#: nothing.
ACTS_IN_LAYERS = ("fp8_format", "fp4_format", "fp8_param_gather", "delay_wgrad_compute")

#: The releases that megatron-core 0.16 is made for.
INSTALL = (
    "pip install 'transformer-engine[pytorch]>=2.9,<2.12' on the trainer's hosts (GPU, CUDA "
    "toolkit)"
)


def is_installed() -> bool:
    """Return whether Transformer Engine is installed, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


def missing(values: Mapping[str, Any], *, installed: bool) -> UserError | None:
    """The error for the first flag that needs Transformer Engine or its layers and has not got
    them.

    Args:
        values: by dest; a dest that is not there is unset.

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
            continue  # which does it itself
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
