"""Compare the hidden states of trainer and engine part by part, and name the first that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: Outputs count as alike up to this relative difference, or this multiple of that by rounding.
_ALIKE = 1e-3
_TIMES_ROUNDING = 5.0
#: Part → its name in the report, if that differs.
_WORDS = {"norm": "last norm", "images": "features of images"}


@dataclass(frozen=True)
class PartByPart:
    """Relative differences of the outputs of parts, in the order of computation.

    Attributes:
        apart: part → norm of trainer minus engine, divided by the norm of the engine's output.
        trainer, engine: part → the same for this side and the reference.
        rounding: part → the same for the reference with and without the run's rounding.
    """

    apart: dict[str, float]
    trainer: dict[str, float]
    engine: dict[str, float]
    rounding: dict[str, float]

    @property
    def first(self) -> str | None:
        """The first part that differs by more than rounding, if any."""
        return next(
            (part for part, value in self.apart.items() if not value <= self._limit(part)), None
        )

    def _limit(self, part: str) -> float:
        return max(_ALIKE, _TIMES_ROUNDING * self.rounding.get(part, 0.0))

    @property
    def side(self) -> str:
        """The side that is farther from the reference at the first part that differs, or ""."""
        part = self.first
        if part is None or part not in self.trainer:
            return ""
        return "engine" if self.engine[part] > self.trainer[part] else "trainer"

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "side": self.side or None,
            "apart": self.apart,
            "trainer_from_reference": self.trainer,
            "engine_from_reference": self.engine,
            "rounding": self.rounding,
        }

    def lines(self) -> list[str]:
        if not self.apart:
            return ["part by part: the sides have no part in common, so none is compared"]
        part = self.first
        if part is None:
            largest = max(self.apart, key=lambda name: self.apart[name])
            return [
                f"part by part: {len(self.apart)} parts are alike, here with the same weights; "
                f"{named(largest)} differs most, by {self.apart[largest]:.1e}"
            ]
        line = f"part by part: {named(part)} is the first that differs, by {self.apart[part]:.1%}"
        if self.side:
            who = "trainer" if self.side == "engine" else "engine"
            of = {"engine": self.engine, "trainer": self.trainer}
            line += (
                f"; the {self.side} is {of[self.side][part]:.1e} from the reference, the {who} "
                f"{of[who][part]:.1e}"
            )
        return [line]


def compare(
    trainer: Mapping[str, Tensor],
    engine: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    rounded: Mapping[str, Tensor] | None = None,
) -> PartByPart:
    """Compare the outputs of parts, part → [tokens, hidden], with the part names of
    `slime.embedded.model.Observer`."""
    parts = [part for part in reference if part in trainer and part in engine]
    return PartByPart(
        {part: _difference(trainer[part], engine[part]) for part in parts},
        {part: _difference(trainer[part], reference[part]) for part in parts},
        {part: _difference(engine[part], reference[part]) for part in parts},
        {part: _difference(rounded[part], reference[part]) for part in parts} if rounded else {},
    )


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def named(part: str) -> str:
    """Return a part's name in words.

    Example:
        >>> named("3.mlp"), named("embedding"), named("2")
        ('the mlp of layer 3', 'the embedding', 'the output of layer 2')
    """
    layer, _, rest = part.partition(".")
    if not layer.isdecimal():
        return f"the {_WORDS.get(part, part)}"
    return f"the {rest} of layer {layer}" if rest else f"the output of layer {layer}"
