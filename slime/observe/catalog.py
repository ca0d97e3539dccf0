"""Which charts a run gets: one row per chart here, drawn by the page where the metrics exist; and what makes a curve
fit to be sent: points that are few, phases that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.observe.console import phase_seconds
from slime.observe.run_data import Point, Stage

#: Colour number of each phase of a step, the same on every page.
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
#: Points of a curve, and steps of which the phases are shown.
MOST_POINTS, _MOST_STEPS = 600, 300


@dataclass(frozen=True)
class ChartSpec:
    """A line chart of one or more metrics; `keys` are tried in order, the first that exists is drawn.

    Attributes:
        may_vanish: 0 by construction in many runs (one update per rollout, lock step), and left out of those.
        line: what the legend calls the metric, where there are others beside it.
        beside: further metrics in the same chart, and what the legend calls them.
        band: the metrics of the shade behind the line, lower and upper edge.
        rewarded: left out of supervised fine-tuning, whose samples have no rewards worth showing.
    """

    title: str
    keys: tuple[str, ...]
    note: str
    unit: str = ""
    may_vanish: bool = False
    line: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    band: tuple[str, ...] = ()
    rewarded: bool = False


LEARNING = (
    ChartSpec(
        "Reward",
        ("rollout/raw_reward", "rollout/rewards"),
        "mean over the samples of the step",
        rewarded=True,
    ),
    ChartSpec(
        "Response length",
        ("rollout/response_len/mean", "rollout/response_lengths"),
        "mean; shade: shortest to longest",
        "tokens",
        band=("rollout/response_len/min", "rollout/response_len/max"),
    ),
    ChartSpec("Truncated responses", ("rollout/truncated_ratio", "rollout/truncated"), "share cut at the length limit"),
    ChartSpec(
        "Loss",
        ("train/loss",),
        "what the optimizer minimises; for policy gradients its level says little",
        may_vanish=True,
    ),
)
POLICY = (
    ChartSpec(
        "Entropy",
        ("train/entropy_loss", "rollout/entropy"),
        "of the policy, nats per token; a fall to zero ends exploration",
    ),
    ChartSpec("KL to the reference", ("train/kl_loss", "rollout/kl"), "how far training has moved from the start"),
    ChartSpec("KL within the step", ("train/ppo_kl",), "old to new policy", may_vanish=True),
    ChartSpec(
        "Train–rollout difference",
        ("train/train_rollout_logprob_abs_diff",),
        "mean |log-prob of trainer − engine|; should stay small and flat",
    ),
    ChartSpec(
        "Worst token of the difference",
        ("train/train_rollout_logprob_abs_diff_max",),
        "largest |log-prob of trainer − engine|; the mean hides a few bad tokens",
    ),
    ChartSpec(
        "Staleness",
        ("rollout/staleness/max",),
        "rollouts trained on since the weights that sampled",
        may_vanish=True,
        line="oldest sample",
        beside=(("rollout/staleness/mean", "mean"),),
    ),
    ChartSpec("Clipped tokens", ("train/pg_clipfrac",), "share of tokens outside the trust region", may_vanish=True),
    ChartSpec("Gradient norm", ("train/grad_norm",), "before clipping"),
    ChartSpec(
        "Groups without contrast",
        ("rollout/zero_std/ratio",),
        "share of groups whose samples all got one reward; they teach nothing",
    ),
    ChartSpec("Learning rate", ("train/lr-pg_0", "train/lr"), ""),
)
SPEED = (
    ChartSpec("Tokens per second", ("perf/tokens_per_gpu_per_sec",), "generated, per GPU (or CPU slot)", "tokens/s"),
    ChartSpec("Training speed", ("perf/actor_train_tok_per_s",), "trained tokens per second", "tokens/s"),
    ChartSpec(
        "Waiting",
        ("perf/trainer_wait_ratio",),
        "share of the time: who waits for whom",
        line="trainer: for samples or evaluations",
        beside=(
            ("perf/engines_idle_ratio", "engines: no request"),
            ("rollout/engine_load/idle_ratio", "an engine alone"),
        ),
    ),
    ChartSpec("Weight push", ("perf/update_weights_time",), "pause to continue", "s"),
    ChartSpec("Evaluation time", ("perf/evaluate_time", "perf/eval_time"), "beside the steps", "s"),
)


def thin(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
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


def phases(stage: Stage) -> list[dict[str, Any]]:
    """Seconds per phase and step, which add up to the step; launch and evaluations are no part of any:
    ``{"name", "color", "points": [[step, seconds]]}``, the longest first, what no phase accounts for last."""
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
        layers.append({"name": name, "color": color, "points": points})
    rest = [
        (row["step"], max(0.0, row["perf/step_time"] - sum(split.get(name, 0.0) for name in shown)))
        for row, split in zip(rows, splits)
    ]
    if sum(seconds for _, seconds in rest) > 0.005 * sum(totals.values()):
        layers.append({"name": "other", "color": OTHER_COLOR, "points": rest})
    return layers
