"""Phi-3 and Phi-4 (``Phi3ForCausalLM``): Llama with queries, keys and values in one tensor, and
gate and up in another; Phi-4-mini rotates three quarters of each head."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import decoder_spec, windows_everywhere
from slime.models.mixers import STACKED_QKV_RULES
from slime.models.spec import ModelSpec
from slime.models.table import COMPUTED_BUFFERS, OUTER_RULES, STACKED_MLP_RULES, ModelFamily

#: Defaults of transformers' Phi3Config for fields that config.json lacks.
_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}


def _spec(config: dict[str, Any]) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    _refuse_scaling(config)
    return decoder_spec(config, "phi3", default_rotary_percent=1.0, **windows_everywhere(config))


def _refuse_scaling(config: dict[str, Any]) -> None:
    """Refuse every rotary scaling. transformers reads "yarn" and "su" as "longrope" here."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind != "default":
        raise UserError(
            f"rotary scaling of type {kind!r} is not supported for this family",
            why="its frequencies depend on the longest sequence of a batch, so that the log-prob "
            "of a token depends on the other samples of the batch",
            fix="use a model of the family without rotary scaling, such as Phi-4",
        )


PHI3 = ModelFamily(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    rules=OUTER_RULES + STACKED_QKV_RULES + STACKED_MLP_RULES,
    make_spec=_spec,
    ignored=COMPUTED_BUFFERS,
)
