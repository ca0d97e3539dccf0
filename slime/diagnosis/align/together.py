"""Several causes at once: predictions add up, as long as each is small beside the log-probs
themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slime.diagnosis.align.case import Cause, Side, Tried
from slime.diagnosis.align.evidence import explained, size

#: Causes that are put together at most, and what each must add to the share.
_MOST = 3
_ADDS = 0.1


@dataclass(frozen=True)
class Together:
    """Causes that explain more with each other than the best alone.

    Attributes:
        share: of the difference that is gone with all of them.
    """

    parts: tuple[tuple[Cause, Tried, Side], ...]
    share: float

    def lines(self) -> list[str]:
        said = [
            f"   {cause.trouble.name}, the {side}: {tried.what}"
            for cause, tried, side in self.parts
        ]
        return [f"together they explain {self.share:.0%}:", *said]

    def as_json(self) -> dict[str, object]:
        parts = [
            {"name": cause.trouble.name, "what": tried.what, "side": side}
            for cause, tried, side in self.parts
        ]
        return {"share": self.share, "causes": parts}


def together(differences: Tensor, tries: Sequence[tuple[Cause, Tried]]) -> Together | None:
    """One cause after the other, each the one that explains most of what is left; None where one
    alone does as well.

    Args:
        differences: trainer minus engine, [N].
        tries: of all causes, in all their forms.
    """
    chosen: list[tuple[Cause, Tried, Side]] = []
    left = differences
    shares = [0.0]
    while len(chosen) < _MOST:
        used = {cause.trouble.name for cause, _, _ in chosen}
        offers = [
            (cause, tried, side, predicted)
            for cause, tried in tries
            if cause.trouble.name not in used
            for side, predicted in tried.predicted.items()
        ]
        if not offers:
            break
        cause, tried, side, predicted = min(offers, key=lambda offer: size(left - offer[3]))
        share = explained(differences, differences - left + predicted)
        if share < shares[-1] + _ADDS:
            break
        chosen.append((cause, tried, side))
        left = left - predicted
        shares = [*shares, share]
    return Together(tuple(chosen), shares[-1]) if len(chosen) > 1 else None
