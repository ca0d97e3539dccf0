"""Supported pushes of quantised weights into SGLang, by version and format, or why there is none.

A route is listed if an experiment has shown it: pushed engines hold bit for bit the same as engines
that were started with the same weights (`benchmarks/gpu/quantised.py`,
`benchmarks/gpu/weight_sync.py --served`; rows in docs/measurements). Changing the requirements of a
route takes such an experiment. Imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError
from slime.models.decoder import EXPERT_COUNTS
from slime.models.quantised import Int4, Quantisation
from slime.processes.host import version_of


@dataclass(frozen=True)
class QuantisedRoute:
    """How quantised weights are pushed.

    Attributes:
        opens: layers are made loadable before the transfer and processed after it
            (`slime.engines.sglang.loadable`); otherwise SGLang computes with loaded weights as they
            are.
        needs: tested transport of `slime.weights.route.choose_route` → SGLang's arguments, by the
            names of `_ARGUMENTS`, with the tested values; the first is recommended.
        experts: "" if models with experts were tested too; else why they are refused.
    """

    opens: bool
    needs: Mapping[str, Mapping[str, tuple[Any, ...]]]
    experts: str = ""


@dataclass(frozen=True)
class _Argument:
    """One of SGLang's arguments on which the format of quantised weights depends.

    Attributes:
        keys: its names, as a flag and in ``/server_info``.
        default: the value if neither is given.
        fix: how a run sets the value.
    """

    keys: tuple[str, ...]
    default: Any
    fix: str


_ARGUMENTS = {
    "tp_size": _Argument(("tp_size",), 1, "pass --rollout-num-gpus-per-engine {}"),
    "fp8_gemm_backend": _Argument(
        ("fp8_gemm_backend", "fp8_gemm_runner_backend"), "auto", "pass --sglang-fp8-gemm-backend {}"
    ),
}
_KINDS = {
    "ipc": "handles (--colocate)",
    "broadcast": "broadcast (engines on separate GPUs)",
    "disk": "--update-weight-transport disk",
}
_ONE_GPU = {"tp_size": (1,)}
_TRITON = {"fp8_gemm_backend": ("triton",)}
_TWICE_ROUNDED = (
    "SGLang computes gate and up of an expert with the larger of their two scales, for which it "
    "rounds one of them a second time: engines would hold other weights than a push brought, and "
    "than --fake-quantisation computes with"
)

_UNTRIED = (
    "not tried: SGLang packs quantised weights anew for its kernels after it has loaded them, and "
    "no experiment shows that pushes in this format end right"
)
_OTHER_VERSION = (
    "not tried: pushes of quantised weights were only tried with other versions of SGLang"
)

#: Version → format (`form_of`) → route, or why there is none. Missing formats were not tested.
ROUTES: dict[str, dict[str, QuantisedRoute | str]] = {
    "0.5.16": {
        "INT4 in groups of 128, symmetric": QuantisedRoute(
            opens=True, needs={"ipc": _ONE_GPU, "broadcast": _ONE_GPU}
        ),
        "FP8 in blocks of 128×128": QuantisedRoute(
            opens=True,
            needs={"ipc": {"tp_size": (1, 2), **_TRITON}, "broadcast": {**_ONE_GPU, **_TRITON}},
        ),
        "FP8 by tensor": QuantisedRoute(
            opens=True, needs={"ipc": {**_ONE_GPU, **_TRITON}}, experts=_TWICE_ROUNDED
        ),
    },
}


def form_of(quantisation: Quantisation) -> str:
    """Return the format's name in `ROUTES`, with the method's name if it is not the usual one.

    Example:
        >>> form_of(Quantisation("fp8", Fp8((128, 128))))
        'FP8 in blocks of 128×128'
    """
    scheme = quantisation.scheme
    usual = "compressed-tensors" if isinstance(scheme, Int4) else "fp8"
    return str(scheme) if quantisation.method == usual else f"{scheme} of {quantisation.method}"


def quantised_route(
    hf_config: Mapping[str, Any], engine: Mapping[str, Any], kind: str
) -> QuantisedRoute | None:
    """Return the route for a model's quantised weights; None for plain weights.

    Args:
        hf_config: config.json.
        engine: SGLang's ``version`` and arguments, from an engine's ``/server_info`` or from flags.
        kind: the transport, from `slime.weights.route.choose_route`.
    Raises:
        UserError: the method is unknown, or no push of it into this engine by this transport is
            known to work; names the reason.
    """
    quantisation = Quantisation.read(hf_config)
    if quantisation is None:
        return None
    version = str(engine.get("version"))
    form = form_of(quantisation)
    known = ROUTES.get(".".join(map(str, version_of(version)[:3])))
    found = _OTHER_VERSION if known is None else known.get(form, _UNTRIED)
    what = f"--hf-checkpoint has quantised weights ({form}, quant_method {quantisation.method})"
    if not isinstance(found, QuantisedRoute):
        tried = ""
        if known:
            tried = f"quantise it as {', '.join(known)} (slime convert hf-to-int4, hf-to-fp8), or "
        raise UserError(
            f"{what}, which cannot be pushed to SGLang {version}", why=found, fix=tried + _OTHERWISE
        )
    if hf_config.get("kv_lora_rank"):
        raise UserError(
            f"{what} and latent attention, which cannot be pushed to SGLang {version}",
            why="not tried: SGLang computes further matrices from kv_b_proj as it loads it",
            fix=_OTHERWISE,
        )
    if kind not in found.needs:
        tried = " and ".join(_KINDS[one] for one in found.needs)
        raise UserError(
            f"{what}, which cannot be pushed to SGLang by {_KINDS[kind]}",
            why=f"not tried: pushes in this format went by {tried} alone",
            fix=f"share GPUs with --colocate, without --update-weight-transport; or {_OTHERWISE}",
        )
    if found.experts and any(hf_config.get(name) for name in EXPERT_COUNTS):
        raise UserError(
            f"{what} and experts, which cannot be pushed to SGLang {version}",
            why=found.experts,
            fix="quantise it in blocks (slime convert hf-to-fp8 --block_size 128 128); or "
            f"{_OTHERWISE}",
        )
    for name, values in found.needs[kind].items():
        argument = _ARGUMENTS[name]
        value = next(
            (engine[key] for key in argument.keys if engine.get(key) is not None), argument.default
        )
        if value not in values:
            raise UserError(
                f"{what}, which cannot be pushed to SGLang with {name} {value}",
                why=f"not tried: pushes in this format went to engines with {name} "
                f"{_either(values)} alone",
                fix=f"{argument.fix.format(_either(values))}; or {_OTHERWISE}",
            )
    return found


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(str, values))


_OTHERWISE = (
    "use the model with plain weights (slime convert quantised-to-hf makes one), or "
    "--rollout-engine embedded"
)
