"""What a look at the curves should tell: patterns that cost people days when nobody noticed them.

Pure functions of one stage's rows: the report asks for all of them when it is written, `AlarmWatch` at every step.
Windows are a tenth of the run, at least five steps; shorter runs raise only the alarms that need no window.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.hook_loading import makers_of_samples
from slime.observe.first_step import large_gradient as first_large_gradient
from slime.observe.growth import Growth, steady_growth, sudden_growth
from slime.observe.room import cut_shares, no_room

Rows = Sequence[dict[str, Any]]
_MIN_WINDOW = 5
#: Windows without which a fall of the reward may be noise.
_MIN_WINDOWS_OF_FALL = 4
#: Steps in a row after which it is no chance that nothing was learnt.
_FLAT_STEPS = 3
#: Share of a rollout's rewards that may be late before it is said.
_LATE_SHARE = 0.1
#: Rows that are looked at while a run goes on.
_MOST_ROWS = 4000
_CONTRAST_FIX = (
    "raise --n-samples-per-prompt or --rollout-temperature, take prompts that the model sometimes gets right, or"
    " --dynamic-sampling-filter-path slime.rollout.filters.check_reward_nonzero_std"
)
#: What names of slime's own metrics begin with.
_OURS = ("train/", "rollout/", "eval/", "perf/")
_ENGINE_KEY = re.compile(r"rollout/engine_load/(\d+)$")


@dataclass(frozen=True)
class Alarm:
    """`title` says what, `detail` the numbers, `fix` what to try; `name` is that of its check and its metric."""

    title: str
    detail: str
    fix: str = ""
    name: str = ""


def _values(rows: Rows, *keys: str) -> list[float]:
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


# -- nothing is learnt ---------------------------------------------------------------------------------------------


def _trained(rows: Rows) -> list[dict[str, Any]]:
    """The rows of the newest steps that tell of groups and rewards."""
    return [row for row in rows if row.get("rollout/zero_std/ratio") is not None][-_FLAT_STEPS:]


def _is_flat(rows: Rows) -> bool:
    """No group had two different rewards, for some steps."""
    newest = _trained(rows)
    return len(newest) == _FLAT_STEPS and all(row["rollout/zero_std/ratio"] == 1 for row in newest)


def _constant_reward(rows: Rows) -> float | None:
    """The one reward that all samples had for some steps."""
    newest = _trained(rows)
    values = {row.get(f"rollout/reward/{end}") for row in newest for end in ("min", "max")}
    return values.pop() if len(newest) == _FLAT_STEPS and len(values) == 1 else None


_REWARD_FIX = (
    "read responses and labels in samples/, and try the reward on its own with slime reward; if it is right, take"
    " prompts that the model sometimes gets right, and sometimes not"
)


def constant_reward(rows: Rows) -> list[Alarm]:
    value = _constant_reward(rows)
    if value is None:
        return []
    if late_rewards(rows):
        return []  # which says why
    detail = f"every reward of the last {_FLAT_STEPS} steps is {value:g}: there is nothing to learn from"
    return [Alarm("The reward is constant", detail, _REWARD_FIX)]


def no_contrast(rows: Rows) -> list[Alarm]:
    if not _is_flat(rows) or _constant_reward(rows) is not None:
        return []
    detail = f"in the last {_FLAT_STEPS} steps no group had two different rewards: its advantages are 0"
    return [Alarm("No group has any contrast", detail, _CONTRAST_FIX)]


def never_any_contrast(rows: Rows) -> list[Alarm]:
    """Of a run that has ended and was too short for `no_contrast` and `constant_reward`: none of its steps had any."""
    steps = _trained(rows)
    if not 0 < len(steps) < _FLAT_STEPS or any(row["rollout/zero_std/ratio"] < 1 for row in steps):
        return []
    if late_rewards(rows):
        return []  # which says why
    when = "in the only step" if len(steps) == 1 else f"in all {len(steps)} steps"
    detail = f"{when} every group had the same reward for all of its samples: every advantage was 0"
    all_rewards = {row.get(f"rollout/reward/{end}") for row in steps for end in ("min", "max")}
    fix = _REWARD_FIX if len(all_rewards) == 1 else _CONTRAST_FIX
    return [Alarm("No step had any contrast", detail, fix, "never_any_contrast")]


def zero_gradient(rows: Rows) -> list[Alarm]:
    norms = [row for row in rows if row.get("train/grad_norm") is not None]
    if not norms or norms[-1]["train/grad_norm"] != 0 or _is_flat(rows):
        return []
    lowest, highest = (norms[-1].get(f"rollout/reward/{end}") for end in ("min", "max"))
    rewarded = norms[-1].get("rollout/zero_std/ratio", 1) < 1 and lowest != highest
    steps = 1 if rewarded else _FLAT_STEPS
    if len(norms) < steps or any(row["train/grad_norm"] != 0 for row in norms[-steps:]):
        return []
    detail = f"rewards go from {lowest:g} to {highest:g}, and yet " if rewarded else f"in the last {_FLAT_STEPS} steps "
    fix = (
        "look for one sample per prompt (--n-samples-per-prompt), loss masks of zeros (trained_tokens in samples/),"
        " frozen parameters, rewards that a hook evens out"
    )
    return [Alarm("The gradient is exactly 0", f"{detail}train/grad_norm is 0: no weight changes", fix)]


def late_rewards(rows: Rows) -> list[Alarm]:
    newest = next((row for row in reversed(rows) if row.get("rollout/num_samples")), None)
    if newest is None:
        return []
    samples = newest["rollout/num_samples"]
    late, died = (newest.get(f"rollout/reward_{kind}") or 0.0 for kind in ("timeout", "crash"))
    if late + died <= _LATE_SHARE * samples:
        return []
    is_all = late + died >= samples
    title = "No reward comes" if is_all else "Many rewards do not come"
    detail = (
        f"at step {newest['step']}, {late:.0f} calls ran into --rm-timeout and {died:.0f} ended their process, for"
        f" {samples:.0f} samples; these count as 0"
    )
    fix = "raise --rm-timeout, or make the reward faster (async, a server of its own); logs/rollout.log names it"
    return [Alarm(title, detail, fix)]


def failing_samples(rows: Rows) -> list[Alarm]:
    newest = [row for row in rows if row.get("rollout/num_failed_groups") is not None][-_FLAT_STEPS:]
    counts = [row["rollout/num_failed_groups"] for row in newest]
    if len(counts) < _FLAT_STEPS or not all(counts):
        return []
    detail = f"in each of the last {_FLAT_STEPS} steps some groups failed and were replaced ({sum(counts):.0f} in all)"
    return [Alarm("Samples keep failing", detail, "logs/rollout.log tells why, with the line of your own code")]


# -- learning goes wrong -------------------------------------------------------------------------------------------


def nonfinite(rows: Rows) -> list[Alarm]:
    bad = {key: row["step"] for row in reversed(rows) for key in row.get("nonfinite", [])}
    if not bad:
        return []
    names = ", ".join(
        f"{key} (first at step {step})" for key, step in sorted(bad.items(), key=lambda item: item[1])[:5]
    )
    fix = "lower --lr, set --clip-grad 1.0, prefer --bf16 to --fp16"
    if not any(key.startswith(_OURS) for key in bad):
        fix = "look at the function of yours that gives them"
    return [Alarm("NaN or infinity in the metrics", names, fix)]


def reward_collapse(rows: Rows) -> list[Alarm]:
    windows = _windows(_values(rows, "rollout/raw_reward", "rollout/rewards"))
    if len(windows) < _MIN_WINDOWS_OF_FALL:
        return []
    best, final, spread = max(windows), windows[-1], max(windows) - min(windows)
    if final > windows[0] + 0.1 * spread or best - final <= 0.5 * spread or spread < 0.02:
        return []
    return [
        Alarm(
            "The reward has collapsed",
            f"mean reward fell from {best:.3f} at its best to {final:.3f}, about where it began ({windows[0]:.3f})",
            "read the worst samples; lower --lr, or stay near the reference with --use-kl-loss --kl-loss-coef 0.01"
            " --kl-loss-type low_var_kl",
        )
    ]


def entropy_collapse(rows: Rows) -> list[Alarm]:
    windows = _windows(_values(rows, "train/entropy_loss", "rollout/entropy"))
    if not windows or windows[0] <= 0 or windows[-1] > 0.1 * windows[0]:
        return []
    detail = f"entropy fell from {windows[0]:.3f} to {windows[-1]:.4f}: responses hardly differ any more"
    return [Alarm("The entropy has collapsed", detail, "lower --lr, add --entropy-coef, raise --eps-clip-high")]


def train_rollout_mismatch(rows: Rows) -> list[Alarm]:
    name = "train/train_rollout_logprob_abs_diff"
    values = _values(rows, name)
    windows = _windows(values)
    if windows and windows[-1] > 0.02 and windows[-1] > 3 * windows[0]:
        detail = f"mean |log-prob difference| grew from {windows[0]:.4f} to {windows[-1]:.4f}"
        advice = "slime align with the run's flags ranks the causes; --use-tis corrects for what is left"
        return [Alarm("Trainer and engine drift apart", detail, advice)]
    # of samples that older weights made, part of it is what has been learnt since
    of_now = _values([row for row in rows if not row.get("rollout/staleness/max")], name)
    if of_now and of_now[-1] > 0.1:
        detail = (
            f"mean |log-prob difference| is {of_now[-1]:.3f}; below 0.01 is usual in float32, below 0.05 in bfloat16"
        )
        advice = "slime align with the run's flags says where and why"
        moved = _values(rows, "train/canary_quantisation_abs_diff")
        if moved and moved[-1] > of_now[-1] / 2:
            detail += f". The engines' weights are quantised, which moves log-probs by {moved[-1]:.3f}"
            advice = (
                "--fake-quantisation trains with the weights that engines have; --use-tis corrects; with either,"
                " slime align says what is left"
            )
        return [Alarm("Trainer and engine disagree", detail, advice)]
    return []


def tool_text_trained(rows: Rows) -> list[Alarm]:
    values = _values(rows[-_FLAT_STEPS:], "rollout/unsampled_trained_ratio")
    if not values or not all(values):
        return []
    detail = f"{values[-1]:.1%} of the tokens trained on were sampled by no engine: what a tool answered, say"
    fix = (
        "set their loss_mask to 0: slime.rollout.generate.append_message, or"
        " Sample.append_response_tokens(tokens=…, trainable=False), do so"
    )
    return [Alarm("Text that the model did not write is trained on", detail, fix)]


def stale_samples(rows: Rows) -> list[Alarm]:
    values = _values(rows[-_FLAT_STEPS:], "rollout/staleness/num_too_old")
    weighed = _values(rows[-1:], "train/tis")
    if weighed or not values or not all(values):
        return []
    detail = (
        f"{values[-1]:.0f} samples of the last step are older than --max-staleness allows for, or without it"
        " --async-buffer-size and --update-weights-interval: earlier rollouts have put them back"
    )
    fix = "pass --use-tis, which weighs their tokens, or --max-staleness, which has such groups generated anew"
    return [Alarm("Samples are too old", detail, fix)]


def prompts_too_long(rows: Rows) -> list[Alarm]:
    found = no_room(rows)
    return [Alarm("Prompts leave no room for an answer", *found)] if found else []


def truncation(rows: Rows) -> list[Alarm]:
    values = cut_shares(rows)[-10:]
    if not values or statistics.fmean(values) <= 0.3:
        return []
    detail = f"{statistics.fmean(values):.0%} of the recent responses were cut at the length limit"
    return [Alarm("Many responses are truncated", detail, "raise --rollout-max-response-len, or check the stop tokens")]


def large_gradient(rows: Rows) -> list[Alarm]:
    found = first_large_gradient(rows)
    return [Alarm("The gradient is large from the first step on", *found)] if found else []


def gradient_spike(rows: Rows) -> list[Alarm]:
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


def engine_imbalance(rows: Rows) -> list[Alarm]:
    loads = engine_loads(rows)
    mean = sum(loads.values()) / max(1, len(loads))
    if len(loads) < 2 or not mean:
        return []
    name, most = max(loads.items(), key=lambda item: item[1])
    if most <= 2 * mean:
        return []
    detail = f"engine {name} had {most / mean:.1f}× the mean load"
    return [Alarm("The engines are not loaded evenly", detail, "--sglang-router-strategy round_robin")]


def engine_loads(rows: Rows) -> dict[str, float]:
    """Mean of ``rollout/engine_load/<i>`` (requests in flight) over the rows, per engine."""
    loads: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            match = _ENGINE_KEY.match(key)
            if match and value is not None:
                loads.setdefault(match[1], []).append(value)
    return {name: statistics.fmean(values) for name, values in loads.items()}


def slow_data(rows: Rows) -> list[Alarm]:
    pairs = [
        (row["perf/data_wait_time"], row["perf/step_time"])
        for row in rows
        if row.get("perf/data_wait_time") is not None and row.get("perf/step_time")
    ]
    waited, total = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    if not total or waited <= max(0.1 * total, 1.0):  # a second is not worth a word
        return []
    detail = f"{waited / total:.0%} of the time is spent waiting for prompts"
    return [
        Alarm("Data loading is slow", detail, "--num-data-workers, --streaming-data, or tokenise the data beforehand")
    ]


# -- memory --------------------------------------------------------------------------------------------------------

_FREE = "perf/host_free_memory_gb"
#: Metric → whose memory it is, and where to look.
_HELD = {
    "perf/driver_memory_gb": ("the driver", "what --custom-rollout-log-function-path or W&B keep; else a slime bundle"),
    "perf/rollout_memory_gb": (
        "the rollout actor with its reward workers",
        "lists, caches and clients that generate, reward and data functions of your own keep between calls",
    ),
    "perf/engine_memory_gb": (
        "an engine",
        "logs/engine-<n>.log and its caches in host memory; with --use-fault-tolerance one that is killed comes back",
    ),
    "perf/trainer_memory_gb": ("a trainer rank", "tensors that losses and hooks of your own keep (detach() them)"),
    "perf/trainer_gpu_memory_gb": (
        "a trainer rank's tensors on the GPU",
        "tensors that losses and hooks of your own keep from one step to the next (detach() them, keep .item())",
    ),
}
#: Growth of less is none: GB, and the share of what there was.
_LEAST_GROWTH, _LEAST_SHARE = 1.0, 0.1
#: Times the steps so far within which growth would use up what the host has left: slower growth is told later, and a
#: cache that fills over hundreds of steps is full by then. And steps within which what has just begun to grow would.
_TIMES_AHEAD, _STEPS_AHEAD = 5.0, 36.0
#: Rows that are left out of a long run at a time, so that windows stay where they are; one to two of these are seen.
_BLOCK = 640


def memory_growth(rows: Rows) -> list[Alarm]:
    free = next((row[_FREE] for row in reversed(rows) if row.get(_FREE) is not None), math.inf)
    found: list[tuple[float, str, Growth]] = []
    newest = rows[max(0, len(rows) // _BLOCK - 1) * _BLOCK :]
    for name in _HELD:
        values = [row[name] for row in newest if row.get(name) is not None]
        steady = steady_growth(values, _LEAST_GROWTH, _LEAST_SHARE)
        left = 0.0 if free == math.inf or "gpu" in name else free  # where nobody tells, any growth is too much
        if steady is not None and left <= steady.per_step * _TIMES_AHEAD * len(rows):
            found.append((steady.per_step, name, steady))
        elif left and (sudden := sudden_growth(values, _LEAST_GROWTH, _LEAST_SHARE)) is not None:
            found += [(sudden.per_step, name, sudden)] if left <= sudden.per_step * _STEPS_AHEAD else []
    if not found:
        return []
    _, name, growth = max(found)
    who, where = _HELD[name]
    others = [_HELD[other][0] for _, other, _ in sorted(found, reverse=True)[1:]]
    detail = f"{who} went from {growth.before:.1f} to {growth.now:.1f} GB in {growth.steps} steps"
    if free < math.inf and "gpu" not in name:
        detail += f"; the {free:.1f} GB that the host has left last for about {free / growth.per_step:.0f} more"
    detail += f"; so did {', '.join(others)}" if others else ""
    fix = f"look at {where}; with --save, slime resume goes on with fresh memory"
    return [Alarm("Memory grows and grows", detail, fix)]


#: The gravest first. The name of a check is that of its metric, ``alarm/<name>``.
CHECKS: tuple[Callable[[Rows], list[Alarm]], ...] = (
    nonfinite,
    memory_growth,
    late_rewards,
    constant_reward,
    no_contrast,
    zero_gradient,
    failing_samples,
    reward_collapse,
    entropy_collapse,
    tool_text_trained,
    train_rollout_mismatch,
    stale_samples,
    large_gradient,
    prompts_too_long,
    truncation,
    gradient_spike,
    engine_imbalance,
    slow_data,
)


def find_alarms(rows: Rows, *, ended: bool = False, flags: Mapping[str, Any] | None = None) -> list[Alarm]:
    """All alarms of one stage, the gravest first.

    Args:
        ended: no row will come any more.
        flags: of the run, to name the user's functions that an alarm may come from.
    """
    checks = (*CHECKS[:1], never_any_contrast, *CHECKS[1:]) if ended else CHECKS
    found = [dataclasses.replace(alarm, name=check.__name__) for check in checks for alarm in check(rows)]
    makers = ", ".join(makers_of_samples(flags or {}))
    return [_naming(makers, alarm) if alarm.name == "train_rollout_mismatch" else alarm for alarm in found]


def _naming(makers: str, alarm: Alarm) -> Alarm:
    """The alarm with the user's functions that made the tokens and log-probs which it is about, where there are any."""
    if not makers:
        return alarm
    title = "Log-probs of the samples are not those of the trainer"
    detail = f"{makers} made these tokens and log-probs; {alarm.detail}"
    fix = f"check first that it returns the engine's own tokens and log-probs, each in its place; then {alarm.fix}"
    return dataclasses.replace(alarm, title=title, detail=detail, fix=fix)


# -- while the run goes on -----------------------------------------------------------------------------------------


class AlarmWatch:
    """The alarms of a run as it goes on: each is new once, and once more when it has gone and come back.

    Args:
        rows: of this stage, as an earlier process of the run logged them.
        flags: as in `find_alarms`.
    Attributes:
        on: those of the newest row, the gravest first.
    """

    def __init__(self, rows: Rows = (), flags: Mapping[str, Any] | None = None) -> None:
        self._rows, self._flags = list(rows), flags
        self.on = find_alarms(rows, flags=flags)

    def add(self, row: dict[str, Any]) -> None:
        """A row that is looked at with the next one."""
        self._rows.append(row)

    def look(self, row: dict[str, Any]) -> tuple[list[Alarm], dict[str, float]]:
        """The alarms that ``row`` sets off, and the metrics of its step: ``alarm/<name>`` is 1 while it is on, and 0 in
        the step in which it goes."""
        self.add(row)
        if len(self._rows) > _MOST_ROWS:  # the older half by every second row: what was said of it has been said
            self._rows = [*self._rows[: _MOST_ROWS // 2 : 2], *self._rows[_MOST_ROWS // 2 :]]
        before, self.on = {alarm.name for alarm in self.on}, find_alarms(self._rows, flags=self._flags)
        now = {alarm.name for alarm in self.on}
        metrics = {f"alarm/{name}": float(name in now) for name in before | now}
        return [alarm for alarm in self.on if alarm.name not in before], metrics

    def at_the_end(self) -> list[Alarm]:
        """What is wrong with a run of which no row will come any more, the gravest first."""
        return find_alarms(self._rows, ended=True, flags=self._flags)
