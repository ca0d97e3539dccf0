"""Text models of Ministral 3 (``Ministral3ForCausalLM``): Mistral with YaRN, and queries that grow
with the position: 1 + β · ln(1 + ⌊p / L⌋). SGLang uses L = 16,384 whatever config.json says, so
models with another L (Devstral-Small-2) are refused with it."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.decoder import decoder_spec, windows_everywhere
from slime.models.spec import ModelSpec, QueryScaling
from slime.models.table import DENSE_RULES, ModelFamily

#: Defaults of transformers' Ministral3Config for fields that config.json lacks.
_DEFAULTS = {
    "vocab_size": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_DEFAULT_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_BETA = "llama_4_scaling_beta"


def ministral3_spec(config: dict[str, Any]) -> ModelSpec:
    """Read the decoder of a Ministral 3.

    Raises:
        UserError: as `decoder_spec`, or the length that scales queries is missing.
    """
    config = {**_DEFAULTS, **config}
    settings = config.get("rope_parameters") or config.get("rope_scaling") or _DEFAULT_ROTARY
    rest = {key: value for key, value in config.items() if key != "rope_scaling"}
    # the second field repeats the model's own and does not affect the rotary embedding
    unused = (_BETA, "max_position_embeddings")
    rotary = {key: value for key, value in settings.items() if key not in unused}
    return decoder_spec(
        {**rest, "rope_parameters": rotary},
        query_scaling=_query_scaling(settings, config),
        **windows_everywhere(config),
    )


def _query_scaling(settings: dict[str, Any], config: dict[str, Any]) -> QueryScaling | None:
    beta = settings.get(_BETA)
    if not beta:
        return None
    key = "original_max_position_embeddings"
    length = settings.get(key) or config.get(key)
    if not length:
        raise UserError(
            f"the model's config.json sets {_BETA} to {beta} and no {key}",
            why="queries are scaled up at each multiple of that length",
            fix="use the config.json that belongs to the weights",
        )
    return QueryScaling(float(beta), int(length))


MINISTRAL3 = ModelFamily(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    rules=DENSE_RULES,
    make_spec=ministral3_spec,
)
