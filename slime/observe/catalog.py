"""The charts of the page: one row per chart, plain names and units of metrics, and curves short
enough to send."""

from __future__ import annotations

import functools
import math
import re
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
#: Points of a curve, and steps shown with their phases.
MOST_POINTS = 600
_MOST_STEPS = 300


@dataclass(frozen=True)
class ChartSpec:
    """A line chart. Of `keys`, the first metric that the run has is drawn.

    Attributes:
        note: one line below the title.
        unit: of the vertical axis.
        may_vanish: the metric is 0 by construction in many runs (one update per rollout, lock
            step); such a chart is left out.
        line: legend of the metric where the chart has others beside it.
        beside: further metrics of the chart with their legends.
        band: metrics of the lower and upper edge of the shaded band.
        rewarded: left out of supervised fine-tuning, which has no rewards.
    """

    title: str
    keys: tuple[str, ...]
    note: str
    unit: str
    may_vanish: bool = False
    line: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    band: tuple[str, ...] = ()
    rewarded: bool = False


LEARNING = (
    ChartSpec(
        "Reward",
        ("rollout/raw_reward", "rollout/rewards"),
        "mean over all samples",
        "reward",
        rewarded=True,
    ),
    ChartSpec(
        "Response length",
        ("rollout/response_len/mean", "rollout/response_lengths"),
        "mean; the band spans shortest to longest",
        "tokens",
        band=("rollout/response_len/min", "rollout/response_len/max"),
    ),
    ChartSpec(
        "Truncated responses",
        ("rollout/truncated_ratio", "rollout/truncated"),
        "cut at the length limit",
        "share of responses",
    ),
    ChartSpec(
        "Loss",
        ("train/loss",),
        "the optimized objective; its level means little for policy gradients",
        "loss",
        may_vanish=True,
    ),
)
POLICY = (
    ChartSpec(
        "Entropy",
        ("train/entropy_loss", "rollout/entropy"),
        "of the policy; exploration ends as it approaches 0",
        "nats per token",
    ),
    ChartSpec(
        "KL to the reference",
        ("train/kl_loss", "rollout/kl"),
        "distance from the reference model",
        "nats per token",
    ),
    ChartSpec(
        "KL within the step",
        ("train/ppo_kl",),
        "from the policy that sampled to the updated one",
        "nats per token",
        may_vanish=True,
    ),
    ChartSpec(
        "Trainer–engine difference",
        ("train/train_rollout_logprob_abs_diff",),
        "mean |log-prob difference| per token; should stay small and flat",
        "nats",
    ),
    ChartSpec(
        "Largest trainer–engine difference",
        ("train/train_rollout_logprob_abs_diff_max",),
        "largest |log-prob difference| of any token; the mean hides a few bad tokens",
        "nats",
    ),
    ChartSpec(
        "Staleness",
        ("rollout/staleness/max",),
        "age of the weights that sampled, in trained steps",
        "steps",
        may_vanish=True,
        line="oldest sample",
        beside=(("rollout/staleness/mean", "mean"),),
    ),
    ChartSpec(
        "Clipped tokens",
        ("train/pg_clipfrac",),
        "ratio outside the clip range",
        "share of tokens",
        may_vanish=True,
    ),
    ChartSpec("Gradient norm", ("train/grad_norm",), "before clipping", "norm"),
    ChartSpec(
        "Groups with equal rewards",
        ("rollout/zero_std/ratio",),
        "no difference in reward, so no gradient",
        "share of groups",
    ),
    ChartSpec(
        "Learning rate",
        ("train/lr-pg_0", "train/lr"),
        "of the last optimizer step",
        "learning rate",
    ),
)
SPEED = (
    ChartSpec(
        "Generation speed", ("perf/tokens_per_gpu_per_sec",), "per GPU or CPU slot", "tokens/s"
    ),
    ChartSpec("Training speed", ("perf/actor_train_tok_per_s",), "all ranks together", "tokens/s"),
    ChartSpec(
        "Idle time",
        ("perf/trainer_wait_ratio",),
        "of the trainer and the engines",
        "share of the step",
        line="trainer waits",
        beside=(
            ("perf/engines_idle_ratio", "all engines idle"),
            ("rollout/engine_load/idle_ratio", "single engines idle"),
        ),
    ),
    ChartSpec("Weight push", ("perf/update_weights_time",), "from pause to continue", "s"),
    ChartSpec(
        "Evaluation time",
        ("perf/evaluate_time", "perf/eval_time"),
        "not part of the step time",
        "s",
    ),
)

#: Names of metrics that do not speak for themselves → title and unit.
_NAMED = {
    "perf/engines_idle_ratio": ("Engine idle time", "share of the step"),
    "rollout/engine_load/idle_ratio": ("Idle engines while others work", "share of engines"),
    "rollout/engine_load/max_over_mean": ("Load of the busiest engine over the mean", "ratio"),
    "rollout/prefix_cache_hit_rate": ("Prefix cache hit rate", "share of prompt tokens"),
    "rollout/avg_cached_tokens_per_sample": ("Cached prompt tokens per sample", "tokens"),
    "rollout/spec_accept_rate": ("Accepted draft tokens", "share of drafts"),
    "rollout/spec_accept_length": ("Tokens per verification", "tokens"),
    "rollout/response_lengths": ("Response length", "tokens"),
    "rollout/total_lengths": ("Prompt and response length", "tokens"),
    "rollout/zero_std/ratio": ("Groups with equal rewards", "share of groups"),
    "rollout/raw_reward": ("Reward", "reward"),
    "rollout/rewards": ("Reward after normalization", "reward"),
    "train/ois": ("Importance ratio, new over old policy", "ratio"),
    "train/tis": ("Importance ratio, trainer over engine", "ratio"),
}
#: Endings of a metric's name → unit; an empty group is dropped from the title.
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
#: Parts of names → words, in this order.
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
    """Title and unit of a metric for people; the unit is "" where the name does not tell it.

    Example:
        >>> plain_name("perf/save_model_time"), plain_name("rollout/response_len/max")
        (('Save model time', 's'), ('Response length, max', 'tokens'))
    """
    if metric in _NAMED:
        return _NAMED[metric]
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
        return metric, unit  # a user's own
    title = ", ".join(map(_worded, parts[1:]))
    return title[:1].upper() + title[1:] if title.strip() else metric, unit


def _worded(part: str) -> str:
    for pattern, words in _WORDS:
        part = pattern.sub(words, part)
    return part.replace("_", " ").strip()


def thin(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
    """Reduce a curve to about `limit` points; the extremes of each stretch stay, so spikes
    survive."""
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
    """Seconds per phase and step, longest phase first: ``{"name", "color", "points": [[step,
    seconds]]}``.

    The phases add up to the step; launch and evaluations belong to no step. "other" comes last.
    """
    rows = [row for row in stage.rows if row.get("perf/step_time") is not None]
    rows = rows[:: max(1, len(rows) // _MOST_STEPS)]
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
