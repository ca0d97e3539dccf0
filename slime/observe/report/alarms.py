"""What a look at the curves should tell: patterns that cost people days when nobody noticed them.

Pure functions of one stage's rows. Windows are a tenth of the run, at least five steps; shorter runs raise only the
alarms that need no window.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MIN_WINDOW = 5
_ENGINE_KEY = re.compile(r"rollout/engine_load/(\d+)$")


@dataclass(frozen=True)
class Alarm:
    """`title` says what, `detail` the numbers, `fix` what to try."""

    title: str
    detail: str
    fix: str = ""


def _values(rows: Sequence[dict[str, Any]], *keys: str) -> list[float]:
    """Finite values of the first of `keys` that is there."""
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            return values
    return []


def _windows(values: Sequence[float]) -> list[float]:
    """Means over consecutive windows; empty when there are not two full ones."""
    size = max(_MIN_WINDOW, len(values) // 10)
    count = len(values) // size
    if count < 2:
        return []
    end = len(values)
    return [statistics.fmean(values[end - (i + 1) * size : end - i * size]) for i in reversed(range(count))]


def nonfinite(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    bad = {key: row["step"] for row in reversed(rows) for key in row.get("nonfinite", [])}
    if not bad:
        return []
    names = ", ".join(
        f"{key} (first at step {step})" for key, step in sorted(bad.items(), key=lambda item: item[1])[:5]
    )
    return [Alarm("NaN or infinity in the metrics", names, "lower --lr, set --clip-grad 1.0, prefer --bf16 to --fp16")]


def reward_collapse(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    windows = _windows(_values(rows, "rollout/raw_reward", "rollout/rewards"))
    if not windows:
        return []
    best, final, spread = max(windows), windows[-1], max(windows) - min(windows)
    if final > windows[0] + 0.1 * spread or best - final <= 0.5 * spread or spread < 0.02:
        return []
    return [
        Alarm(
            "The reward has collapsed",
            f"mean reward fell from {best:.3f} at its best to {final:.3f}, about where it began ({windows[0]:.3f})",
            "raise --kl-loss-coef with --use-kl-loss, lower --lr or --n-samples-per-prompt; look at the worst samples",
        )
    ]


def entropy_collapse(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    windows = _windows(_values(rows, "train/entropy_loss", "rollout/entropy"))
    if not windows or windows[0] <= 0 or windows[-1] > 0.1 * windows[0]:
        return []
    detail = f"entropy fell from {windows[0]:.3f} to {windows[-1]:.4f}: responses hardly differ any more"
    return [Alarm("The entropy has collapsed", detail, "lower --lr, add --entropy-coef, raise --eps-clip-high")]


def train_rollout_mismatch(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    values = _values(rows, "train/train_rollout_logprob_abs_diff")
    windows = _windows(values)
    if windows and windows[-1] > 0.02 and windows[-1] > 3 * windows[0]:
        detail = f"mean |log-prob difference| grew from {windows[0]:.4f} to {windows[-1]:.4f}"
        advice = "use --use-tis; --check-weight-update-equal compares every weight after the first push"
        return [Alarm("Trainer and engine drift apart", detail, advice)]
    if values and values[-1] > 0.1:
        detail = (
            f"mean |log-prob difference| is {values[-1]:.3f}; below 0.01 is usual in float32, below 0.05 in bfloat16"
        )
        return [Alarm("Trainer and engine disagree", detail, "check with --check-weight-update-equal")]
    return []


def truncation(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    values = _values(rows, "rollout/truncated_ratio")[-10:]
    if not values or statistics.fmean(values) <= 0.3:
        return []
    detail = f"{statistics.fmean(values):.0%} of the recent responses were cut at the length limit"
    return [Alarm("Many responses are truncated", detail, "raise --rollout-max-response-len, or check the stop tokens")]


def gradient_spike(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    points = [(row["step"], row["train/grad_norm"]) for row in rows if row.get("train/grad_norm") is not None]
    if len(points) < 2 * _MIN_WINDOW:
        return []
    median = statistics.median(value for _, value in points)
    step, peak = max(points, key=lambda point: point[1])
    if median <= 0 or peak < 20 * median:
        return []
    return [
        Alarm("A gradient spike", f"grad norm {peak:.2f} at step {step}; the median is {median:.3f}", "--clip-grad 1.0")
    ]


def engine_imbalance(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    loads = engine_loads(rows)
    mean = sum(loads.values()) / max(1, len(loads))
    if len(loads) < 2 or not mean:
        return []
    name, most = max(loads.items(), key=lambda item: item[1])
    if most <= 2 * mean:
        return []
    detail = f"engine {name} had {most / mean:.1f}× the mean load"
    return [Alarm("The engines are not loaded evenly", detail, "--sglang-router-strategy round_robin")]


def engine_loads(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean of ``rollout/engine_load/<i>`` (requests in flight) over the rows, per engine."""
    loads: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            match = _ENGINE_KEY.match(key)
            if match and value is not None:
                loads.setdefault(match[1], []).append(value)
    return {name: statistics.fmean(values) for name, values in loads.items()}


def slow_data(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    pairs = [
        (row["perf/data_wait_time"], row["perf/step_time"])
        for row in rows
        if row.get("perf/data_wait_time") is not None and row.get("perf/step_time")
    ]
    waited, total = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    if not total or waited <= 0.1 * total:
        return []
    detail = f"{waited / total:.0%} of the time is spent waiting for prompts"
    return [
        Alarm("Data loading is slow", detail, "--num-data-workers, --streaming-data, or tokenise the data beforehand")
    ]


CHECKS = (
    nonfinite,
    reward_collapse,
    entropy_collapse,
    train_rollout_mismatch,
    truncation,
    gradient_spike,
    engine_imbalance,
    slow_data,
)


def find_alarms(rows: Sequence[dict[str, Any]]) -> list[Alarm]:
    """All alarms of one stage, the gravest first."""
    return [alarm for check in CHECKS for alarm in check(rows)]
