"""The group about engines that hold quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import SAMPLES, Part, flag, unless

_TRAINS = unless("debug_rollout_only", why="nothing is trained")
_OWN_VALUES = unless("lora_rank", why="the frozen base has the engines' quantised values already")


@dataclass(frozen=True, kw_only=True)
class QuantisedConfig:
    """How the trainer takes the quantised weights of engines into account.

    Engines hold such weights if --hf-checkpoint has a quantization_config."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("trainer",)

    fake_quantisation: Literal["experts", "linears"] | None = flag(
        None, needs=(_TRAINS, _OWN_VALUES)
    )
    """Compute with the quantised values of the weights, as the engines do, in all forward and
    backward passes; the gradients go to the plain weights as if nothing had been rounded (straight
    through). experts: the routed experts; linears: all layers that engines hold quantised. The
    format is that of --hf-checkpoint."""
    measure_quantisation: bool = flag(
        False, needs=(SAMPLES, _TRAINS, _OWN_VALUES), read_by="training"
    )
    """Score each rollout once more with the engines' quantised weights: how much of the difference
    between trainer and engine the format makes, and what is left without it
    (train/quantisation_logprob_abs_diff)."""
