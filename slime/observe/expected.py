"""Judge a run by the ranges that its recipe expects (``expected.toml``)."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.errors import UserError
from slime.observe.run_data import Point, Stage

NAME = "expected.toml"
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
#: Where a range comes from; `ExpectedRange` explains the values.
BASES = ("measured", "predicted", "bound")
_KEYS = {"metric", "steps", "statistic", "least", "most", "basis", "source"}

Verdict = Literal["within", "outside", "not reached", "not logged"]


@dataclass(frozen=True)
class ExpectedRange:
    """One range of an ``expected.toml``.

    Attributes:
        metric: name of the metric in metrics.jsonl.
        first, last: first and last step that count, inclusive.
        statistic: "mean", "median", "min" or "max" of the values in these steps.
        least, most: bounds of the range, inclusive; infinite if open.
        basis: "measured" on a run of the recipe, "predicted" from measured rates, or a "bound"
            beyond which something is wrong.
        source: the run, computation or reason that the range comes from.
    """

    metric: str
    first: int
    last: int
    statistic: str
    least: float
    most: float
    basis: str
    source: str

    def judge(self, series: Sequence[Point]) -> tuple[float | None, Verdict]:
        """Return the statistic over the counted steps, and whether it is in the range. Values that
        are not finite are outside."""
        if not series:
            return None, "not logged"
        counted = [value for step, value in series if self.first <= step <= self.last]
        if not counted or max(step for step, _ in series) < self.last:
            return None, "not reached"
        if any(value is None for value in counted):
            return math.nan, "outside"
        value = _STATISTICS[self.statistic]([value for value in counted if value is not None])
        return value, "within" if self.least <= value <= self.most else "outside"


def read_expected(path: Path) -> list[ExpectedRange]:
    """Read the ranges of a recipe's folder, or of a file.

    Raises:
        UserError: the file is missing, it has no ranges, or a range is malformed.
    """
    file = path / NAME if path.is_dir() else path
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8")).get("range")
        if not isinstance(entries, list) or not entries:
            raise ValueError("it has no [[range]]")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} holds no ranges",
            why=str(error),
            fix=f"name a recipe that has an {NAME}, or such a file",
        ) from None
    return [_parse_range(entry, file) for entry in entries]


def _parse_range(entry: dict[str, Any], file: Path) -> ExpectedRange:
    try:
        first, last = entry["steps"]
        found = ExpectedRange(
            metric=entry["metric"],
            first=int(first),
            last=int(last),
            statistic=entry.get("statistic", "mean"),
            least=float(entry.get("least", -math.inf)),
            most=float(entry.get("most", math.inf)),
            basis=entry["basis"],
            source=entry["source"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: a range is not complete", why=f"{entry}: {error!r}") from None
    if found.statistic not in _STATISTICS or found.basis not in BASES:
        raise UserError(
            f"{file}: {found.metric} has an unknown statistic or basis",
            why=f"statistics are {', '.join(_STATISTICS)}; bases are {', '.join(BASES)}",
        )
    unknown = sorted(entry.keys() - _KEYS)
    if unknown or not entry.keys() & {"least", "most"}:
        raise UserError(
            f"{file}: the range of {found.metric} "
            + (f"has an unknown {unknown[0]}" if unknown else "has neither least nor most"),
            why=f"the keys of a range are {', '.join(sorted(_KEYS))}",
        )
    if found.first > found.last or not found.least <= found.most:
        raise UserError(
            f"{file}: the range of {found.metric} is empty",
            why=f"steps {found.first} to {found.last}, {_shown(found)}",
        )
    return found


def comparison(stage: Stage, ranges: Sequence[ExpectedRange]) -> tuple[list[str], bool]:
    """Return the lines of a table of all ranges, and whether no value is outside its range. Ranges
    that the run did not reach or does not log do not count."""
    rows = [("metric", "steps", "", "value", "expected", "", "basis")]
    none_outside = True
    for one in ranges:
        value, verdict = one.judge(stage.series(one.metric))
        none_outside &= verdict != "outside"
        steps = f"{one.first} to {one.last}"
        shown = "" if value is None else f"{value:.4g}"
        rows.append((one.metric, steps, one.statistic, shown, _shown(one), verdict, one.basis))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ], none_outside


def _shown(one: ExpectedRange) -> str:
    if math.isinf(one.least):
        return f"≤ {one.most:g}"
    if math.isinf(one.most):
        return f"≥ {one.least:g}"
    return f"{one.least:g} to {one.most:g}"
