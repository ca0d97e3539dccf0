"""Which way quantised weights go into SGLang, by version and format: one table, with the reason where there is none.

A way stands here when an experiment has shown it: engines that were pushed to hold, bit for bit, what engines hold that
were started with the same weights (`benchmarks/gpu/quantised.py`). Imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.engines.sglang.versions import version_of
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation


@dataclass(frozen=True)
class QuantisedRoute:
    """How a push goes.

    Attributes:
        opens: layers are made loadable before the transfer and processed after it (`slime.engines.sglang.loadable`);
            otherwise SGLang computes with what it loaded as it came.
    """

    opens: bool


_UNTRIED = (
    "SGLang packs quantised weights anew for its kernels after it has loaded them, and a push into what it packed was"
    " not tried on a GPU yet"
)
_OTHER_VERSION = "pushes of quantised weights were tried with other versions of SGLang alone"

#: Version → format, as `form_of` names it → route, or why there is none.
ROUTES: dict[str, dict[str, QuantisedRoute | str]] = {
    "0.5.16": {
        "INT4": _UNTRIED,
        "FP8 by block": _UNTRIED,
        "FP8 by tensor": _UNTRIED,
        "INT4, asymmetric": "SGLang's loader of experts turns packed weights over, and zero points not",
    },
}


def form_of(quantisation: Quantisation) -> str:
    """The format's name in `ROUTES`.

    Example:
        >>> form_of(Quantisation("fp8", Fp8((128, 128))))
        'FP8 by block'
    """
    scheme = quantisation.scheme
    if isinstance(scheme, Int4):
        return "INT4" if scheme.symmetric else "INT4, asymmetric"
    if quantisation.method != "fp8":
        return f"{scheme} of {quantisation.method}"
    return _name_of_fp8(scheme)


def _name_of_fp8(scheme: Fp8) -> str:
    return "FP8 by block" if all(scheme.block) else "FP8 by tensor" if not any(scheme.block) else str(scheme)


def quantised_route(hf_config: Mapping[str, Any], version: str) -> QuantisedRoute | None:
    """None for a model of plain weights.

    Args:
        hf_config: config.json.
        version: of the SGLang that serves it.
    Raises:
        UserError: the method is not known, or no push of it into this version is known to end right; by name.
    """
    quantisation = Quantisation.read(hf_config)
    if quantisation is None:
        return None
    number = ".".join(map(str, version_of(version)[:3]))
    known, form = ROUTES.get(number), form_of(quantisation)
    found = _OTHER_VERSION if known is None else known.get(form, _UNTRIED)
    if isinstance(found, QuantisedRoute):
        return found
    raise UserError(
        f"--hf-checkpoint asks for quantised weights ({form}, quant_method {quantisation.method}), which cannot be"
        f" pushed to SGLang {version}",
        why=found,
        fix="take the model with plain weights (slime convert quantised-to-hf makes one), or --rollout-engine embedded",
    )
