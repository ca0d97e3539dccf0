"""One metric of several runs as a picture (SVG), for documents and for looking at runs side by
side.

    python tools/plot_runs.py eval/sums curves.svg "colocated=outputs/a/metrics.jsonl" \\
        "async=outputs/b/metrics.jsonl"
    python tools/plot_runs.py rollout/raw_reward reward.svg "with KL=outputs/a/metrics.jsonl" \\
        "without=…" --title Reward
    python tools/plot_runs.py eval/sums both.svg "held out=a/metrics.jsonl" \\
        "reward=a/metrics.jsonl#rollout/raw_reward"

A run is its name and its metrics.jsonl, behind # a metric of its own; rows without the metric are
left out, and the steps are those of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

Points = list[tuple[float, float]]

WIDTH = 760
HEIGHT = 340
_LEFT = 56
_RIGHT = 20
_TOP = 58
_BOTTOM = 44
_COLOURS = (
    "#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#57606a", "#bf8700", "#0b7285",
    "#d63384", "#000000",
)  # fmt: skip


def read_points(path: Path, metric: str) -> Points:
    """(step, value) of every row that has the metric.

    Raises:
        ValueError: no row has it; names some that are there.
    """
    rows = [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    points = [
        (float(row["step"]), float(row[metric])) for row in rows if row.get(metric) is not None
    ]
    if not points:
        known = sorted({key for row in rows for key in row if "/" in key})
        raise ValueError(f"{path} has no {metric}; it has {', '.join(known[:12]) or 'no metrics'}")
    return points


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``.

    Example:
        >>> ticks(0.1, 0.93)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-9)  # of a flat line, too
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(
        factor * power for factor in (1, 2, 2.5, 5, 10, 20) if span / (factor * power) <= most - 1
    )
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each name stands: from the left, and below the first row."""
    places: list[tuple[float, int]] = []
    left = float(_LEFT)
    down = 0
    for name in names:
        width = 32 + 6.6 * len(name)
        if left + width > WIDTH and places:
            left = float(_LEFT)
            down += 18
        places.append((round(left, 1), down))
        left += width
    return places


def picture(runs: Sequence[tuple[str, Points]], metric: str, title: str) -> str:
    """All runs in one SVG, with a legend."""
    xs = [x for _, points in runs for x, _ in points]
    ys = [y for _, points in runs for _, y in points]
    across = ticks(min(xs), max(xs), 9)
    up = ticks(min(0.0, *ys), max(ys))
    legend = legend_places([name for name, _ in runs])
    top = _TOP + legend[-1][1]

    def place(x: float, y: float) -> tuple[float, float]:
        inner = WIDTH - _LEFT - _RIGHT, HEIGHT - top - _BOTTOM
        right = (x - across[0]) / (across[-1] - across[0])
        above = (y - up[0]) / (up[-1] - up[0])
        return round(_LEFT + inner[0] * right, 1), round(HEIGHT - _BOTTOM - inner[1] * above, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<title>{escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" rx="8" '
        'fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-weight="600" fill="#1f2328">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#57606a">step</text>',
    ]
    for value in up:
        x, y = place(across[0], value)
        parts.append(f'<path d="M{x} {y}H{WIDTH - _RIGHT}" stroke="#e3e6ea"/>')
        parts.append(
            f'<text x="{x - 8}" y="{y + 4}" text-anchor="end" fill="#57606a">{value:g}</text>'
        )
    for value in across:
        x, y = place(value, up[0])
        parts.append(
            f'<text x="{x}" y="{y + 18}" text-anchor="middle" fill="#57606a">{value:g}</text>'
        )
    for (name, points), colour, (left, down) in zip(runs, _COLOURS, legend, strict=False):
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 30:
            dots = (place(*point) for point in points)
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(f'<rect x="{left}" y="{36 + down}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{42 + down}" fill="#1f2328">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metric", help="for example eval/sums, rollout/raw_reward, train/grad_norm")
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE[#METRIC]")
    parser.add_argument("--title", help="default: the metric")
    args = parser.parse_args(argv)
    if len(args.runs) > len(_COLOURS):
        parser.error(f"at most {len(_COLOURS)} runs can be told apart")
    runs = []
    for word in args.runs:
        name, found, file = word.partition("=")
        if not found:
            parser.error(f"{word}: write NAME=FILE or NAME=FILE#METRIC")
        try:
            path, _, own = file.partition("#")
            runs.append((name, read_points(Path(path), own or args.metric)))
        except (OSError, ValueError) as error:
            parser.error(str(error))
    args.out.write_text(picture(runs, args.metric, args.title or args.metric), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
