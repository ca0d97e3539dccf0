"""Charts of the report page, readable names and units of metrics, and downsampled curves."""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.observe.console import phase_seconds, phase_word
from slime.observe.run_data import Point, Stage

#: Color number of each phase of a step.
PHASE_COLORS = {
    "rollout": 1,
    "actor_train": 2,
    "train": 2,
    "log_probs": 3,
    "ref_log_probs": 4,
    "update_weights": 5,
    "data_preprocess": 6,
    "save_model": 8,
    "save": 8,
    "train_wait": 1,
}
OTHER_COLOR = 9
#: Maximum points of a curve, and maximum steps that are shown with their phases.
MAX_POINTS = 600
_MAX_STEPS = 300


@dataclass(frozen=True)
class ChartSpec:
    """A line chart; charts.toml describes the fields."""

    title: str
    keys: tuple[str, ...]
    note: str
    unit: str
    may_vanish: bool = False
    line: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    band: tuple[str, ...] = ()
    rewarded: bool = False


_DATA = tomllib.loads(
    importlib.resources.files("slime.observe").joinpath("charts.toml").read_text(encoding="utf-8")
)


def _chart(fields: dict[str, Any]) -> ChartSpec:
    fields = {name: value for name, value in fields.items() if name != "section"}
    lists = {name: tuple(map(_frozen, v)) for name, v in fields.items() if isinstance(v, list)}
    return ChartSpec(**(fields | lists))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


#: Section of the page → its charts.
SECTIONS: dict[str, tuple[ChartSpec, ...]] = {
    section: tuple(_chart(fields) for fields in _DATA["chart"] if fields["section"] == section)
    for section in ("Learning", "Policy", "Speed")
}
#: Pattern of a metric's name → unit; the first match counts.
_UNITS = (
    (re.compile(r"_tok_per_s$|_tokens_per_sec$|tokens_per_gpu_per_sec$"), "tokens/s"),
    (re.compile(r"_?(?:ratio|frac|rate)$|^passrate/|-pass@\d+$|error_cat/"), "share"),
    (re.compile(r"(?:_time|_seconds)$|non_generation_time/"), "s"),
    (re.compile(r"_gb$"), "GB"),
    (re.compile(r"_bytes$"), "bytes"),
    (re.compile(r"(?:response_len|trained_len)/|_lengths?$|_tokens$"), "tokens"),
    (re.compile(r"abs_diff|log_probs$|[/_]kl(?:_loss)?$|entropy"), "nats"),
    (re.compile(r"/(?:reward|reward_part)/|/rewards?$"), "reward"),
    (re.compile(r"/num_|/count_|/drop|retries$|requests$|restarts$"), "count"),
    (re.compile(r"^alarm/"), "on or off"),
)
_PREFIXES = ("train", "rollout", "perf", "alarm", "multi_turn", "passrate")
#: Pattern of a part of a name → readable words; all are applied in this order.
_WORDS = (
    (re.compile(r"^num_|_gb$|_abs(?=_)|^count_(?=\d)"), ""),
    (re.compile(r"^lr-pg_(\d+)$"), r"learning rate of parameter group \1"),
    (re.compile(r"train_rollout_logprob"), "trainer–engine log-prob"),
    (re.compile(r"actor_train_tok_per_s$"), "trained tokens per second"),
    (re.compile(r"_clipfrac$"), "_clipped share"),
    (re.compile(r"_(?:frac|ratio)$"), "_share"),
    (re.compile(r"log_?probs?"), "log-probs"),
    (re.compile(r"\bzero_std\b"), "groups with equal reward"),
    (re.compile(r"^error_cat$"), "samples by category"),
    (re.compile(r"^grad_"), "gradient "),
    (re.compile(r"(?:^|_)pg_"), "policy-gradient "),
    (re.compile(r"^evaluate_|^eval_"), "evaluation "),
    (re.compile(r"update_weights"), "weight push"),
    (
        re.compile(r"(?<![a-z])(ppo_kl|kl|tis|ois|gpu)(?![a-z])"),
        lambda match: match[1].replace("_", " ").upper(),
    ),
    (re.compile(r"(?<=[a-z])_?diff(?=_|$)"), " difference"),
    (re.compile(r"_len(?:gths?)?(?=$|_)"), " length"),
    (re.compile(r"_per_sec(?=_|$)"), " per second"),
    (re.compile(r"avg_"), "average "),
)


@functools.cache
def plain_name(metric: str) -> tuple[str, str]:
    """Return a readable title and the unit of a metric; the unit is "" if it is unknown.

    Example:
        >>> plain_name("perf/save_model_time"), plain_name("rollout/response_len/max")
        (('Save model time', 's'), ('Response length, max', 'tokens'))
    """
    if metric in _DATA["names"]:
        title, unit = _DATA["names"][metric]
        return title, unit
    unit = next((unit for pattern, unit in _UNITS if pattern.search(metric)), "")
    parts = metric.split("/")
    if parts[0] == "eval" and parts[1:]:
        name, dash, statistic = parts[1].rpartition("-")
        if not re.fullmatch(r"pass@\d+|truncated_ratio", statistic) or not dash:
            name = parts[1]
            statistic = ""
        rest = [statistic] if statistic else parts[2:]
        return ", ".join([f"Evaluation: {name}", *map(_worded, rest)]), unit if rest else "reward"
    if parts[0] not in _PREFIXES or len(parts) < 2:
        return metric, unit  # a metric of the user's own
    title = ", ".join(map(_worded, parts[1:]))
    return title[:1].upper() + title[1:] if title.strip() else metric, unit


def _worded(part: str) -> str:
    for pattern, words in _WORDS:
        part = pattern.sub(words, part)
    return part.replace("_", " ").strip()


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce a curve to about ``limit`` points. Keeps the minimum and maximum of each stretch, so
    that spikes stay visible."""
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
        low = min(finite, key=lambda p: p[1] or 0.0)
        high = max(finite, key=lambda p: p[1] or 0.0)
        kept += [low] if low is high else sorted((low, high), key=lambda p: p[0])
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def phases(stage: Stage) -> list[dict[str, Any]]:
    """Return seconds per phase and step, longest phase first: ``{"name", "color", "points": [[step,
    seconds]]}``.

    The phases of a step add up to its time, without launch and evaluations. "other" comes last.
    """
    rows = [row for row in stage.rows if row.get("perf/step_time") is not None]
    rows = rows[:: max(1, len(rows) // _MAX_STEPS)]
    splits = [phase_seconds({k: v for k, v in row.items() if v is not None}) for row in rows]
    totals: dict[str, float] = {}
    for split in splits:
        for name, seconds in split.items():
            totals[name] = totals.get(name, 0.0) + seconds
    if not totals:
        return []
    shown = sorted(totals, key=lambda name: -totals[name])[:7]
    layers: list[dict[str, Any]] = []
    free = [c for c in range(1, 9) if c not in {PHASE_COLORS.get(name) for name in shown}]
    for name in shown:
        color = PHASE_COLORS.get(name) or (free.pop(0) if free else OTHER_COLOR)
        points = [(row["step"], split.get(name, 0.0)) for row, split in zip(rows, splits)]
        layers.append({"name": phase_word(name), "color": color, "points": points})
    rest = [
        (row["step"], max(0.0, row["perf/step_time"] - sum(split.get(name, 0.0) for name in shown)))
        for row, split in zip(rows, splits)
    ]
    if sum(seconds for _, seconds in rest) > 0.005 * sum(totals.values()):
        layers.append({"name": "other", "color": OTHER_COLOR, "points": rest})
    return layers
