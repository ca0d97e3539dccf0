"""Which charts a stage gets: one row per chart here, shown only where the metrics exist."""

from __future__ import annotations

from dataclasses import dataclass

from slime.observe.console import eval_scores, phase_seconds
from slime.observe.report.charts import Chart, Point, Series
from slime.observe.report.data import Stage, is_supervised

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
#: What rounding leaves of a sum that is 0.
_VANISHING = 1e-6


@dataclass(frozen=True)
class ChartSpec:
    """A line chart of one or more metrics; `keys` are tried in order, the first that exists is drawn.

    Attributes:
        may_vanish: 0 by construction in many runs (one update per rollout, lock step), and left out of those.
        line: what the legend calls the metric, where there are others beside it.
        beside: further metrics in the same chart, and what the legend calls them.
    """

    title: str
    keys: tuple[str, ...]
    note: str
    unit: str = ""
    may_vanish: bool = False
    line: str = ""
    beside: tuple[tuple[str, str], ...] = ()


LEARNING = (
    ChartSpec("Reward", ("rollout/raw_reward", "rollout/rewards"), "mean over the samples of the step"),
    ChartSpec(
        "Response length",
        ("rollout/response_len/mean", "rollout/response_lengths"),
        "mean; shade: shortest to longest",
        "tokens",
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


def _line_chart(stage: Stage, spec: ChartSpec, color: int) -> Chart | None:
    key = next((key for key in spec.keys if stage.series(key)), None)
    if key is None:
        return None
    if spec.may_vanish and all(abs(y or 0.0) <= _VANISHING for _, y in stage.series(key)):
        return None
    others = [(name, stage.series(other)) for other, name in spec.beside if stage.series(other)]
    lines = [Series(spec.line if others else spec.title, stage.series(key), color)]
    lines += [Series(name, points, (color + i) % 8 + 1) for i, (name, points) in enumerate(others)]
    chart = Chart(spec.title, lines, spec.note, spec.unit, key=key)
    if key == "rollout/response_len/mean":
        low, high = stage.series("rollout/response_len/min"), stage.series("rollout/response_len/max")
        if len(low) == len(high) == len(chart.series[0].points):
            chart.band = (low, high)
    return chart


def evaluation_chart(stage: Stage) -> Chart | None:
    """Mean reward of every evaluation data set."""
    names = list(dict.fromkeys(name for row in stage.rows for name in eval_scores(row)))
    series = [Series(name, stage.series(f"eval/{name}"), i % 8 + 1) for i, name in enumerate(names)]
    if not series:
        return None
    return Chart("Evaluation", series, "mean reward on held-out prompts", key="eval/" + names[0], exact=True)


def step_time_chart(stage: Stage) -> Chart | None:
    """Seconds per phase, stacked to the whole step; launch and evaluations are no part of any."""
    rows = [row for row in stage.rows if row.get("perf/step_time") is not None]
    rows = rows[:: max(1, len(rows) // 300)]
    splits = [phase_seconds({k: v for k, v in row.items() if v is not None}) for row in rows]
    totals: dict[str, float] = {}
    for split in splits:
        for name, seconds in split.items():
            totals[name] = totals.get(name, 0.0) + seconds
    if not totals:
        return None
    shown = sorted(totals, key=lambda name: -totals[name])[:7]
    series = []
    free = [c for c in range(1, 9) if c not in {PHASE_COLORS.get(name) for name in shown}]
    for name in shown:
        color = PHASE_COLORS.get(name) or (free.pop(0) if free else OTHER_COLOR)
        points: list[Point] = [(row["step"], split.get(name, 0.0)) for row, split in zip(rows, splits)]
        series.append(Series(name, points, color))
    rest: list[Point] = [
        (row["step"], max(0.0, row["perf/step_time"] - sum(split.get(name, 0.0) for name in shown)))
        for row, split in zip(rows, splits)
    ]
    if sum(y or 0.0 for _, y in rest) > 0.005 * sum(totals.values()):
        series.append(Series("other", rest, OTHER_COLOR))
    return Chart("Time per step", series, "seconds per phase", "s", stacked=True, key="perf/step_time")


def charts_of(stage: Stage) -> dict[str, list[Chart]]:
    """Section title → its charts."""
    shown = LEARNING[1:] if is_supervised(stage) else LEARNING
    learning = [_line_chart(stage, spec, 1) for spec in shown]
    learning.insert(1, evaluation_chart(stage))
    policy = [_line_chart(stage, spec, 2) for spec in POLICY]
    speed = [step_time_chart(stage), *(_line_chart(stage, spec, 5) for spec in SPEED)]
    sections = {"Learning": learning, "Policy": policy, "Speed": speed}
    present = {name: [c for c in charts if c is not None and c.finite] for name, charts in sections.items()}
    return {name: charts for name, charts in present.items() if charts}
