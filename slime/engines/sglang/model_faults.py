"""Models that SGLang is known to compute otherwise than transformers and the trainer, or that it
holds in a form that pushes cannot reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.errors import UserError
from slime.models.quantised import is_mxfp4
from slime.models.spec import ModelSpec


def check_model(spec: ModelSpec, config: Mapping[str, Any]) -> None:
    """Refuse a model whose log-probs from SGLang would differ from the trainer's.

    Args:
        config: its config.json.
    Raises:
        UserError: a scaled rotary embedding in Gemma 3, which SGLang leaves out (0.5.16,
            ``models/gemma3_causal.py``: all layers get the type "default"). Experts in MXFP4, which
            SGLang lays out anew as it starts (0.5.16, ``layers/quantization/mxfp4.py``), so that no
            weights can be loaded into them afterwards.
    """
    if is_mxfp4(config):
        raise UserError(
            "SGLang takes no pushes of weights into experts in MXFP4",
            why="it changes their layout as it starts; what a push brings has no place there",
            fix="slime convert quantised-to-hf makes plain weights, which --hf-checkpoint then "
            "names; or pass --rollout-engine embedded, which holds plain weights",
        )
    if spec.family == "gemma3_text" and spec.rotary_scaling is not None:
        kind = spec.rotary_scaling["rope_type"]
        raise UserError(
            f"SGLang computes this Gemma 3 without the rotary scaling ({kind}) of its config.json",
            why="SGLang 0.5.16 gives layers that see everything an unscaled embedding, so that its "
            "log-probs drift from the trainer's as positions grow",
            fix="pass --rollout-engine embedded, or choose Gemma 3 270M or 1B, which scale nothing",
        )
