"""Charts as inline SVG: line charts and stacked areas, drawn here so that they need no script to be seen.

The page's script adds a crosshair with values; it reads the points from `Chart.points_json`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float | None]

WIDTH, HEIGHT = 440, 190
RIGHT, TOP, BOTTOM = 10, 10, 22
#: Of a digit in a tick's label (10.5 px of the widest common font, DejaVu Sans), and between label and plot.
DIGIT, GAP = 6.7, 6
MAX_POINTS = 600


@dataclass
class Series:
    """One line (or one layer of a stack). `color` is the number of a colour of the page's palette."""

    name: str
    points: list[Point]
    color: int = 1


@dataclass
class Chart:
    """A chart with its title.

    Attributes:
        note: one line on what is shown and what is good.
        unit: appended to values ("s", "tokens").
        stacked: series are layers over each other.
        band: (low, high) points drawn as a shade behind the lines.
        exact: never draw a moving average (few, costly points such as evaluations).
    """

    title: str
    series: list[Series]
    note: str = ""
    unit: str = ""
    stacked: bool = False
    band: tuple[list[Point], list[Point]] | None = None
    key: str = ""
    exact: bool = False
    finite: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.finite = [y for series in self.series for _, y in series.points if y is not None]


def number(value: float) -> str:
    """Short text of a number: 1,240 · 12.3 · 0.0123 · 1.2e-06."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}" if size >= 0.1 else f"{value:.2g}"
    return f"{value:.1e}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover [low, high] in about `count` intervals.

    Example:
        >>> ticks(0.0, 0.93)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    size = max(abs(low), abs(high))
    if size < 1e-12:
        low, high = 0.0, 1.0
    elif high - low < 1e-6 * size:  # a flat line runs through the middle
        low, high = low - 0.1 * size, high + 0.1 * size
    raw = (high - low) / count
    base = 10 ** math.floor(math.log10(raw))
    step = next((m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999), 10 * base)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 3 - math.floor(math.log10(step))
    return [round(i * step, digits) for i in range(first, last + 1)]


def labels(marks: Sequence[float]) -> list[str]:
    """Text of each tick, with as many digits as tell them apart.

    Example:
        >>> labels([2.998, 3.0, 3.002])
        ['2.998', '3', '3.002']
    """
    texts = [number(mark) for mark in marks]
    precision = 3
    while len(set(texts)) < len(marks) and precision < 15:
        precision += 1
        texts = [f"{mark:.{precision}g}" for mark in marks]
    return texts


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points; of each stretch the least and the greatest stay, so that spikes survive."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [p for p in part if p[1] is not None]
        if not finite:
            kept.append(part[0])
            continue
        low, high = min(finite, key=lambda p: p[1] or 0.0), max(finite, key=lambda p: p[1] or 0.0)
        kept += [low] if low is high else sorted((low, high), key=lambda p: p[0])
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over a tenth of the points (5 to 51), for lines that jump from step to step."""
    half = min(25, max(2, len(points) // 20))
    result: list[Point] = []
    for i, (x, _y) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1] if y is not None]
        result.append((x, sum(near) / len(near) if near else None))
    return result


class _Scale:
    """Maps data to the plot area."""

    def __init__(self, xs: Sequence[float], low: float, high: float, from_zero: bool = False) -> None:
        self.x_low, self.x_high = min(xs), max(xs)
        if low >= 0 and (from_zero or low < 0.5 * high):
            low = 0.0
        self.y_ticks = ticks(low, high)
        self.y_labels = labels(self.y_ticks)
        self.left = round(GAP + 2 + DIGIT * max(4, *map(len, self.y_labels)), 1)
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        share = (value - self.x_low) / span if span else 0.5
        return round(self.left + share * (WIDTH - self.left - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for tick, text in zip(scale.y_ticks, scale.y_labels, strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{scale.left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{scale.left - GAP:.1f}" y="{y + 3.5}" text-anchor="end">{text}</text>')
    whole = [t for t in ticks(scale.x_low, scale.x_high, 5) if scale.x_low <= t <= scale.x_high and t == round(t)]
    for tick in whole or [scale.x_low]:
        x = scale.x(tick)
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}">{round(tick):,}</text>')
    return parts


def _line_path(points: Sequence[Point], scale: _Scale) -> str:
    """SVG path; values that were no finite number leave a gap."""
    commands, pen_down = [], False
    for x, y in points:
        if y is None:
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{scale.x(x)} {scale.y(y)}")
        pen_down = True
    return "".join(commands)


def _area_path(low: Sequence[Point], high: Sequence[Point], scale: _Scale) -> str:
    pairs = [(x, a, b) for (x, a), (_, b) in zip(low, high) if a is not None and b is not None]
    forward = [f"{scale.x(x)} {scale.y(b)}" for x, _, b in pairs]
    back = [f"{scale.x(x)} {scale.y(a)}" for x, a, _ in reversed(pairs)]
    return "M" + "L".join([*forward, *back]) + "Z" if pairs else ""


def _line_marks(chart: Chart, scale: _Scale) -> list[str]:
    parts = []
    if chart.band is not None:
        stride = math.ceil(len(chart.band[0]) / MAX_POINTS)
        path = _area_path(chart.band[0][::stride], chart.band[1][::stride], scale)
        parts.append(f'<path class="band f{chart.series[0].color}" d="{path}"/>')
    for series in chart.series:
        points = thin(series.points)
        noisy = len(series.points) > 30 and len(chart.series) == 1 and not chart.exact
        if noisy:
            parts.append(f'<path class="line raw s{series.color}" d="{_line_path(points, scale)}"/>')
            points = thin(smooth(series.points))
        parts.append(f'<path class="line s{series.color}" d="{_line_path(points, scale)}"/>')
        finite = [(x, y) for x, y in points if y is not None]
        for x, y in finite if len(finite) <= 12 else finite[-1:]:
            parts.append(f'<circle class="dot f{series.color}" cx="{scale.x(x)}" cy="{scale.y(y)}" r="2.6"/>')
        for x, value in series.points:
            if value is None:  # NaN: a mark at the foot of the plot
                parts.append(f'<path class="bad" d="M{scale.x(x) - 3} {HEIGHT - BOTTOM - 6}l6 6m0 -6l-6 6"/>')
    return parts


def stack(series: Sequence[Series]) -> list[list[float]]:
    """Upper edge of each layer, per point; a missing value counts as 0. All series share their x."""
    edges: list[list[float]] = []
    below = [0.0] * len(series[0].points)
    for layer in series:
        below = [base + (y or 0.0) for base, (_, y) in zip(below, layer.points)]
        edges.append(below)
    return edges


def _stack_marks(chart: Chart, scale: _Scale) -> list[str]:
    xs = [x for x, _ in chart.series[0].points]
    parts = []
    below = [0.0] * len(xs)
    for series, edge in zip(chart.series, stack(chart.series)):
        if len(xs) == 1:  # a single step is a column
            low, high = [(xs[0] - 1, below[0]), (xs[0] + 1, below[0])], [(xs[0] - 1, edge[0]), (xs[0] + 1, edge[0])]
            path = _area_path(low, high, scale)
        else:
            path = _area_path(list(zip(xs, below)), list(zip(xs, edge)), scale)
        parts.append(f'<path class="layer f{series.color}" d="{path}"/>')
        below = edge
    return parts


def svg(chart: Chart) -> str:
    """The chart's SVG element; text in it is escaped."""
    xs = [x for series in chart.series for x, _ in series.points]
    if chart.stacked:
        low, high = 0.0, max(stack(chart.series)[-1])
        if len(set(xs)) == 1:
            xs = [xs[0] - 1, xs[0] + 1]
    else:
        ys = chart.finite or [0.0]
        if chart.band is not None:
            ys = ys + [y for edge in chart.band for _, y in edge if y is not None]
        low, high = min(ys), max(ys)
    scale = _Scale(xs, low, high, from_zero=chart.stacked)
    marks = _stack_marks(chart, scale) if chart.stacked else _line_marks(chart, scale)
    label = html.escape(chart.title, quote=True)
    frame = f'data-x0="{scale.x_low}" data-x1="{scale.x_high}" data-left="{scale.left}"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" {frame}>'
        + "".join([*_axes(scale), *marks])
        + '<line class="cross" y1="10" y2="168" x1="-9" x2="-9"/></svg>'
    )


def points_json(chart: Chart) -> dict[str, object]:
    """What the script needs for the crosshair."""
    if chart.stacked:
        lines = [Series(s.name, list(s.points), s.color) for s in chart.series]
    else:
        lines = [Series(s.name, thin(s.points), s.color) for s in chart.series]
    return {"unit": chart.unit, "series": [{"name": s.name, "color": s.color, "points": s.points} for s in lines]}


def sparkline(points: Sequence[Point]) -> str:
    """A word-sized line."""
    finite = [(x, y) for x, y in thin(points, 120) if y is not None]
    if len(finite) < 2:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    width, height = 96, 20
    x_span, y_span = max(xs) - min(xs) or 1, max(ys) - min(ys) or 1
    path = "L".join(
        f"{1 + (x - min(xs)) / x_span * (width - 2):.1f} {height - 2 - (y - min(ys)) / y_span * (height - 4):.1f}"
        for x, y in finite
    )
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true"><path d="M{path}"/></svg>'
