"""OLMo-2 (``Olmo2ForCausalLM``): norms after attention and MLP instead of before them; norms over
all heads of queries or keys together, so tensor parallelism must divide the heads of keys."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import decoder_spec
from slime.models.spec import ModelSpec
from slime.models.table import POST_NORM_RULES, ModelFamily

#: Defaults of transformers' Olmo2Config for fields that config.json lacks.
_DEFAULTS = {"rms_norm_eps": 1e-5}


def _spec(config: dict[str, Any]) -> ModelSpec:
    return olmo_spec({**_DEFAULTS, **config})


def olmo_spec(config: dict[str, Any], **extra: Any) -> ModelSpec:
    """Make the spec of a family with this placement of norms; ``config`` includes its defaults."""
    bias = bool(config.get("attention_bias"))
    return decoder_spec(
        config,
        add_qkv_bias=bias,
        output_bias=bias,
        pre_norms=False,
        post_norms=True,
        wide_qk_norms=True,
        **extra,
    )


OLMO2 = ModelFamily(
    name="olmo2", architectures=("Olmo2ForCausalLM",), rules=POST_NORM_RULES, make_spec=_spec
)
