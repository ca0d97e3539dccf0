"""The group about engines that hold quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import SAMPLES, Part, flag, unless

_TRAINS = unless("debug_rollout_only", why="nothing is trained")
_OWN_VALUES = unless("lora_rank", why="the frozen base has the engines' quantised values already")


@dataclass(frozen=True, kw_only=True)
class QuantisedConfig:
    """How the trainer accounts for the quantised weights of engines.

    Engines hold such weights if --hf-checkpoint has a quantization_config."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("trainer",)

    fake_quantisation: Literal["experts", "linears"] | None = flag(
        None, needs=(_TRAINS, _OWN_VALUES)
    )
    """Compute all forward and backward passes with the quantised values of the weights, as the
    engines do; gradients update the unquantised weights (straight-through estimator). experts: the
    routed experts; linears: all layers that engines hold quantised. The format is that of
    --hf-checkpoint."""
    measure_quantisation: bool = flag(
        False, needs=(SAMPLES, _TRAINS, _OWN_VALUES), read_by="training"
    )
    """Score each rollout once more with the engines' quantised weights, to measure how much of the
    difference between trainer and engine comes from quantisation
    (train/quantisation_logprob_abs_diff)."""
