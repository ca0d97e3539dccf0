"""Measure all causes, and rank them by the share of the difference that each explains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slime.diagnosis.align import held, inside, outside, vision
from slime.diagnosis.align.case import ALIKE, Cause, Discrepancy, Side, Tried, Untested
from slime.diagnosis.align.evidence import explained, size
from slime.diagnosis.align.layers import PartByPart
from slime.diagnosis.troubles import TROUBLES, Finding

#: Minimum share that a reported cause explains.
_REPORTED = 0.1
#: Causes with shares that differ by less than this rank in the order of `CAUSES`.
_EQUAL = 0.02
#: A cause that predicts this share token by token is no rounding, however small the difference.
_SYSTEMATIC = 0.5
#: Causes are combined if the best one explains a smaller share.
_NEARLY_ALL = 0.9
#: Number of forms of a cause that are kept, best first.
_FORMS = 2
#: Maximum number of combined causes, and the minimum that each adds to the share.
_MAX_TOGETHER = 3
_ADDS = 0.1

#: All causes, specific ones before general ones; causes with equal shares rank in this order.
CAUSES: tuple[Cause, ...] = tuple(
    Cause(TROUBLES[name], measure)
    for name, measure in {
        "align-tokens": outside.other_tokens,
        "align-shift": outside.shift,
        "align-temperature": outside.temperature,
        "align-filters": outside.filters,
        "align-template": outside.template,
        "align-images": vision.images,
        "align-routing": inside.routing,
        "align-position": inside.position,
        "align-quantisation": inside.quantisation,
        "align-precision": inside.precision,
        "align-weights": held.weights,
        "align-batch": held.batch,
    }.items()
)


@dataclass(frozen=True)
class Together:
    """Several causes that together explain more than the best single cause.

    Attributes:
        share: share of the difference that they explain together.
    """

    parts: tuple[tuple[Cause, Tried, Side], ...]
    share: float

    def lines(self) -> list[str]:
        parts = [
            f"   {cause.trouble.name}, the {side}: {tried.what}"
            for cause, tried, side in self.parts
        ]
        return [f"together they explain {self.share:.0%}:", *parts]

    def as_json(self) -> dict[str, object]:
        parts = [
            {"name": cause.trouble.name, "what": tried.what, "side": side}
            for cause, tried, side in self.parts
        ]
        return {"share": self.share, "causes": parts}


def together(differences: Tensor, tries: Sequence[tuple[Cause, Tried]]) -> Together | None:
    """Combine causes greedily: add the cause that explains most of the remaining difference. None
    if a single cause explains as much.

    Args:
        differences: trainer minus engine, [N].
        tries: all forms of all causes.
    """
    chosen: list[tuple[Cause, Tried, Side]] = []
    left = differences
    shares = [0.0]
    while len(chosen) < _MAX_TOGETHER:
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


@dataclass(frozen=True)
class Ranked:
    """A cause with its forms that explain most, best first."""

    cause: Cause
    tries: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        return self.tries[0]

    @property
    def finding(self) -> Finding:
        return self.cause.finding(self.best)


@dataclass
class Result:
    """The result of an examination.

    Attributes:
        ranked: all causes that were tested, best first.
        untested: cause → why it was not tested.
        together: several causes that explain more than the best single one; None if there are none.
        parts: hidden states compared part by part; None if that was not possible.
        without_parts: why ``parts`` is None.
        notes: other remarks for the report.
    """

    case: Discrepancy
    ranked: list[Ranked]
    untested: dict[str, str]
    together: Together | None = None
    parts: PartByPart | None = None
    without_parts: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def sides_differ(self) -> bool:
        return self.case.sides_differ or self.is_systematic

    @property
    def is_systematic(self) -> bool:
        """Whether a cause predicts the differences token by token, even if rounding is as large."""
        is_seen = self.case.differences.mean > ALIKE
        return is_seen and any(
            one.best.side and one.best.share >= _SYSTEMATIC for one in self.ranked
        )

    @property
    def reported(self) -> list[Ranked]:
        """The causes that explain enough of the difference to be reported."""
        return (
            [one for one in self.ranked if one.best.share >= _REPORTED] if self.sides_differ else []
        )

    @property
    def findings(self) -> list[Finding]:
        return [one.finding for one in self.reported]


def examine(case: Discrepancy, causes: Iterable[Cause] = CAUSES, *, always: bool = False) -> Result:
    """Measure and rank the causes that can be tested. Differences as small as rounding are
    examined too: a cause that predicts them shows that they are systematic.

    Args:
        always: measure the causes even if the sides are alike.
    """
    result = Result(case, [], {})
    everything = list[tuple[Cause, Tried]]()
    if case.sides_differ or case.differences.mean > ALIKE or always:
        order = {}
        for place, cause in enumerate(causes):
            order[cause.trouble.name] = place
            tries: list[Tried] = []
            try:
                tries.extend(cause.measure(case))
            except Untested as reason:
                if not tries:
                    result.untested[cause.trouble.name] = str(reason)
            if not tries:
                result.untested.setdefault(cause.trouble.name, "nothing of it can differ here")
            else:
                best = sorted(tries, key=lambda tried: -tried.share)[:_FORMS]
                result.ranked.append(Ranked(cause, tuple(best)))
                everything += [(cause, tried) for tried in tries]
        result.ranked.sort(
            key=lambda one: (-round(one.best.share / _EQUAL), order[one.cause.trouble.name])
        )
    if result.sides_differ and result.ranked and result.ranked[0].best.share < _NEARLY_ALL:
        result.together = together(case.differences.values, everything)
    result.notes = list(_notes(result))
    return result


def _notes(result: Result) -> Iterable[str]:
    case = result.case
    if result.is_systematic and not case.sides_differ:
        yield (
            "the difference is no larger than rounding makes it, but a cause predicts it token by "
            "token"
        )
    if not case.is_recorded:
        yield (
            "the trainer's log-probs were not kept: what the reference computes stands in for them"
        )
    elif (
        case.from_reference
        and result.sides_differ
        and min(case.from_reference.values()) > case.tolerance
    ):
        who = ", ".join(f"the {side} by {value:.3g}" for side, value in case.from_reference.items())
        yield (
            f"both sides are far from the reference ({who}): its weights, of "
            f"{case.model().directory}, are perhaps not those of this rollout, and what is "
            "recomputed explains less than it could"
        )


def as_json(result: Result) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    case = result.case
    differences = case.differences
    return {
        "ok": not result.sides_differ,
        "tokens": int(differences.values.numel()),
        "samples": len(case.samples),
        "mean_difference": differences.mean,
        "largest_difference": differences.largest,
        "tolerance": case.tolerance,
        "rounding": case.rounding,
        "from_reference": case.from_reference,
        "growth_with_position": differences.growth(),
        "where": differences.where(),
        "worst": differences.worst(),
        "causes": [_cause_json(one, result) for one in result.ranked],
        "together": result.together.as_json() if result.together else None,
        "untested": result.untested,
        "parts": result.parts.as_json() if result.parts else {"untested": result.without_parts},
        "notes": result.notes,
    }


def _cause_json(ranked: Ranked, result: Result) -> dict[str, Any]:
    return {
        **ranked.finding.as_json(),
        "fatal": ranked in result.reported,
        "test": ranked.cause.trouble.test,
        "tries": [
            {
                "what": t.what,
                "side": t.side or None,
                "share": t.share,
                "left": t.left,
                "details": list(t.details),
            }
            for t in ranked.tries
        ],
    }


def text(result: Result) -> str:
    """Format the difference, the ranked causes and the untested causes for the terminal."""
    case = result.case
    differences = case.differences
    count = f"{differences.values.numel()} tokens of {len(case.samples)} samples"
    lines = [
        f"{count}: trainer and engine differ by {differences.mean:.3g} on average, "
        f"{differences.largest:.3g} at most"
    ]
    rounding = "for both compute in float32"
    if case.rounding:
        rounding = f"rounding to 16 bits makes {case.rounding:.3g}"
    lines.append(f"up to {case.tolerance:.3g} on average they are alike ({rounding})")
    if case.from_reference:
        lines.append(
            "from the reference: "
            + ", ".join(f"{side} {value:.3g}" for side, value in case.from_reference.items())
        )
    if not result.sides_differ:
        lines += ["", "nothing parts them"]
    else:
        lines += _where(result)
        for number, ranked in enumerate(result.reported, 1):
            lines += ["", *_cause_lines(number, ranked)]
        if not result.reported:
            lines += ["", "no cause that was tested explains it"]
        lines += ["", *result.together.lines()] if result.together else []
        small = [
            f"{one.cause.trouble.name} {one.best.share:.0%}"
            for one in result.ranked
            if one not in result.reported
        ]
        if small:
            lines += ["", "tested, explains little: " + ", ".join(small)]
    if result.untested:
        lines += ["", *(f"not tested: {name}: {why}" for name, why in result.untested.items())]
    lines += [
        "",
        *(result.parts.lines() if result.parts else [f"part by part: {result.without_parts}"]),
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def _where(result: Result) -> list[str]:
    differences = result.case.differences
    places = ", ".join(f"{place} {value:.3g}" for place, value in differences.where().items())
    growth = differences.growth()
    lines = [
        f"where: {places}"
        + (f"; last positions / first: {growth:.1f}" if growth is not None else "")
    ]
    worst = differences.worst(3)
    shown = (
        f"{w['sample']} position {w['position']} token {w['token']} {w['difference']:+.4f}"
        for w in worst
    )
    return [*lines, "most: " + "; ".join(shown)]


def _cause_lines(number: int, ranked: Ranked) -> list[str]:
    finding = ranked.finding
    lines = [
        f"{number}. {finding.trouble.name}",
        *(f"   {line}" for line in finding.detail.splitlines()),
    ]
    lines += [
        f"   or: {other.what} ({other.share:.0%})"
        for other in ranked.tries[1:]
        if other.share >= _REPORTED
    ]
    lines.append(f"   why: {finding.trouble.cause}")
    return [*lines, *(f"   try: {remedy}" for remedy in finding.advice if remedy)]
