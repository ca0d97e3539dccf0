"""Models that SGLang is known to compute otherwise than transformers and the trainer."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.spec import ModelSpec


def check_model(spec: ModelSpec) -> None:
    """Refuse a model whose log-probs from SGLang would differ from the trainer's.

    Raises:
        UserError: a scaled rotary embedding in Gemma 3, which SGLang leaves out (0.5.16,
            ``models/gemma3_causal.py``: all layers get the type "default").
    """
    if spec.family == "gemma3_text" and spec.rotary_scaling is not None:
        kind = spec.rotary_scaling["rope_type"]
        raise UserError(
            f"SGLang computes this Gemma 3 without the rotary scaling ({kind}) of its config.json",
            why="SGLang 0.5.16 gives layers that see everything an unscaled embedding, so that its "
            "log-probs drift from the trainer's as positions grow",
            fix="pass --rollout-engine embedded, or choose Gemma 3 270M or 1B, which scale nothing",
        )
