"""OLMo-3 (``Olmo3ForCausalLM``): OLMo-2 with a window in three of four layers, whose rotary
embedding is never scaled."""

from __future__ import annotations

from typing import Any

from slime.models.decoder import FULL, every_nth_full, layer_kinds, rotary_by_kind, windows
from slime.models.olmo2 import OLMO2, olmo_spec
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily

#: Defaults of transformers' Olmo3Config for fields that config.json lacks.
_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_BASE = 500000.0


def _spec(config: dict[str, Any]) -> ModelSpec:
    base = float(config.get("rope_theta") or _BASE)
    config, local = rotary_by_kind({**_DEFAULTS, **config}, _BASE, base)
    kinds = layer_kinds(config, every_nth_full(config, 4))
    return olmo_spec(
        config,
        layer_rotary=tuple("main" if kind == FULL else "local" for kind in kinds),
        local_rotary=local,
        **windows(config, kinds),
    )


OLMO3 = ModelFamily(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    rules=OLMO2.rules,
    make_spec=_spec,
    ignored=OLMO2.ignored,
)
