"""Alarms about the metrics of a run: failures that waste days if nobody notices them.

Each check is a pure function of the rows of one stage. The report runs all checks when it is
written; `AlarmWatch` runs them at every step. A window is a tenth of the run and at least five
steps; shorter runs raise only alarms that need no window. An alarm about a curve needs a change
beyond noise (`slime.observe.evidence`). Its advice depends on the run's flags.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.observe.evidence import LIKELY, STRICT, chance_of_at_least, change, outlier, surely_above
from slime.observe.first_step import large_gradient as first_large_gradient
from slime.observe.leak_detection import Growth, steady_growth, sudden_growth
from slime.user_code.loading import makers_of_samples

Rows = Sequence[dict[str, Any]]
Flags = Mapping[str, Any]
_MIN_WINDOW = 5
#: Minimum number of windows to tell a falling reward from noise.
_MIN_WINDOWS_OF_FALL = 4
#: Minimum number of steps without a learning signal for an alarm.
_FLAT_STEPS = 3
#: An event is not due to chance if its probability is below this: without earlier steps to compare
#: with, and with them.
_BY_CHANCE_AT_FIRST = 0.02
_BY_CHANCE = 1e-5
#: Samples per group if no flag gives the number.
_USUAL_GROUP = 8
#: Number of earlier steps that the newest ones are compared with.
_BEFORE = 50
#: Tolerated share of late rewards; a larger share less probable than the second raises an alarm.
_LATE_SHARE = 0.1
_LATE_BY_CHANCE = 1e-5
#: Minimum fall of the mean, as a share of the range of rewards: after a rise, and without one.
_MIN_FALL = 0.2
_MIN_FALL_AT_ONCE = 0.3
#: Share of truncated responses, and for how many steps: early answers may still become shorter.
_CUT_SHARE = 0.3
_CUT_STEPS = 15
#: Number of rows in which prompts that fill the context are counted, and the share of samples up to
#: which they raise no alarm.
_ROWS_OF_PROMPTS = 10
_FEW_TOO_LONG = 0.02
_NO_ROOM = "rollout/prompt_too_long"
_EMPTY = "rollout/dropped_empty"
#: Multiple of the median gradient norm that counts as a spike.
_SPIKE = 20.0
#: Multiple of the other engines' mean load that counts as uneven.
_UNEVEN = 2.0
#: Maximum number of rows that are kept while a run is in progress.
_MAX_ROWS = 4000
#: Tokens per verification up to which drafts gain nothing, and the share of the first gain that a
#: frozen draft keeps at least.
_USELESS_DRAFTS = 1.05
_KEPT_GAIN = 0.8
#: Prefixes of slime's own metrics.
_OURS = ("train/", "rollout/", "eval/", "perf/")
_ENGINE_KEY = re.compile(r"rollout/engine_load/(\d+)$")


@dataclass(frozen=True)
class Alarm:
    """A problem with its numbers (``detail``) and advice (``fix``). ``name`` is the name of its
    check; its metric is ``alarm/<name>``."""

    title: str
    detail: str
    fix: str = ""
    name: str = ""


def _values(rows: Rows, *keys: str) -> list[float]:
    """Return the finite values of the first of ``keys`` that the rows have."""
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            return values
    return []


def _windows(values: Sequence[float]) -> list[Sequence[float]]:
    """Split into consecutive windows of a tenth of the run; [] if fewer than two are full."""
    size = max(_MIN_WINDOW, len(values) // 10)
    count = len(values) // size
    if count < 2:
        return []
    end = len(values)
    return [values[end - (i + 1) * size : end - i * size] for i in reversed(range(count))]


def _rewards(rows: Rows) -> list[float]:
    return _values(rows, "rollout/raw_reward", "rollout/rewards")


def _has_risen(values: Sequence[float]) -> bool:
    """Tell whether the newest window is above the first one by more than noise."""
    windows = _windows(values)
    return len(windows) > 1 and change(windows, 0, -1) > LIKELY


def _now(flags: Flags, option: str, unit: str = "") -> str:
    """Name an option with the run's value: "--lr (it is 1e-06)"; only the option if unset or 0."""
    value = flags.get(option.removeprefix("--").replace("-", "_"))
    if not value:
        return option
    shown = f"{value:g}" if isinstance(value, float) else value
    return f"{option} (it is {shown}{unit})"


def _lower_lr(flags: Flags) -> str:
    return f"lower {_now(flags, '--lr')}"


def _closer_to_reference(flags: Flags) -> str:
    if flags.get("use_kl_loss"):
        if flags.get("kl_loss_coef"):
            return f"raise {_now(flags, '--kl-loss-coef')}"
        return "stay near the reference with --kl-loss-coef 0.01 (it is 0)"
    if flags.get("kl_coef"):
        return f"raise {_now(flags, '--kl-coef')}"
    return "stay near the reference with --use-kl-loss --kl-loss-coef 0.01"


def _more_contrast(flags: Flags) -> str:
    temperature = flags.get("rollout_temperature")
    ways = [
        f"raise {_now(flags, '--n-samples-per-prompt')}",
        "--rollout-temperature" + (f" (it is {temperature:g})" if temperature is not None else ""),
        "take prompts that the model sometimes gets right",
    ]
    if not flags.get("dynamic_sampling_filter_path"):
        ways.append("--dynamic-sampling-filter-path slime.rollout.filters.check_reward_nonzero_std")
    return ", or ".join(ways)


# -- nothing is learnt -----------------------------------------------------------------------------


def _trained(rows: Rows) -> list[dict[str, Any]]:
    """Return the rows of steps with groups and rewards."""
    return [row for row in rows if row.get("rollout/zero_std/ratio") is not None]


def _flat_rows(rows: Rows) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split into the newest steps in which no group had two different rewards, and the rest."""
    steps = _trained(rows)
    count = next(
        (i for i, row in enumerate(reversed(steps)) if row["rollout/zero_std/ratio"] != 1),
        len(steps),
    )
    return steps[len(steps) - count :], steps[: len(steps) - count]


def _samples(rows: Rows) -> float:
    return sum(row.get("rollout/num_samples") or 1.0 for row in rows)


def _is_flat(rows: Rows, flags: Flags) -> bool:
    """Tell whether chance does not explain the newest groups without contrast. Their expected share
    is that of earlier steps, or a half without earlier steps."""
    newest, earlier = _flat_rows(rows)
    if len(newest) < _FLAT_STEPS:
        return False
    usual = 0.5
    if earlier:
        usual = statistics.fmean(row["rollout/zero_std/ratio"] for row in earlier[-_BEFORE:])
    groups = _samples(newest) / (flags.get("n_samples_per_prompt") or _USUAL_GROUP)
    return min(max(usual, 0.5), 0.99) ** groups <= (_BY_CHANCE if earlier else _BY_CHANCE_AT_FIRST)


def _constant_reward(rows: Rows) -> float | None:
    """Return the single reward of all samples in the newest steps, unless chance explains it. The
    expected share of other rewards is that of earlier steps, or 0.1 without earlier steps."""
    newest, earlier = _flat_rows(rows)
    values = {row.get(f"rollout/reward/{end}") for row in newest for end in ("min", "max")}
    value = values.pop() if len(values) == 1 else None
    if len(newest) < _FLAT_STEPS or value is None:
        return None
    others = [share for row in earlier[-_BEFORE:] if (share := _minority(row)) is not None]
    usual = max(0.001, min(0.5, statistics.fmean(others))) if others else 0.1
    is_chance = (1 - usual) ** _samples(newest) > (_BY_CHANCE if others else _BY_CHANCE_AT_FIRST)
    return None if is_chance else value


def _is_mastered(rows: Rows, value: float) -> bool:
    """Tell whether the run has learnt to get the best reward on every prompt."""
    _, earlier = _flat_rows(rows)
    best = max((row.get("rollout/reward/max") or 0.0 for row in earlier), default=math.inf)
    return value >= best and _has_risen(_rewards(rows))


def _minority(row: Mapping[str, Any]) -> float | None:
    """Estimate the share of a step's rewards that differ from the most frequent one; None if
    unknown."""
    low, high, mean = (row.get(f"rollout/reward/{end}") for end in ("min", "max", "mean"))
    mean = row.get("rollout/raw_reward") if mean is None else mean
    if low is None or high is None or mean is None:
        return None
    share = (mean - low) / (high - low) if high > low else 0.0
    return min(share, 1 - share)


_REWARD_FIX = (
    "read responses and labels in samples/, and try the reward on its own with slime reward; if it "
    "is right, take prompts that the model sometimes gets right, and sometimes not"
)


def constant_reward(rows: Rows, flags: Flags) -> Alarm | None:
    value = _constant_reward(rows)
    if value is None or _is_mastered(rows, value) or flags.get("use_opd"):  # has a teacher
        return None
    if late_rewards(rows, flags):
        return None  # that alarm names the cause
    newest, earlier = _flat_rows(rows)
    detail = f"every reward of the last {len(newest)} steps is {value:g}"
    if not earlier:
        return Alarm(
            "The reward is constant", f"{detail}: there is nothing to learn from", _REWARD_FIX
        )
    detail += f", and at step {earlier[-1]['step']} they still differed"
    fix = (
        f"read the responses of both in samples/; {_lower_lr(flags)} if they broke, and go on from "
        "a checkpoint before that step"
    )
    return Alarm("The reward is constant", detail, fix)


def no_contrast(rows: Rows, flags: Flags) -> Alarm | None:
    if not _is_flat(rows, flags) or _constant_reward(rows) is not None or flags.get("use_opd"):
        return None
    steps = len(_flat_rows(rows)[0])
    detail = f"in the last {steps} steps no group had two different rewards: its advantages are 0"
    return Alarm("No group has any contrast", detail, _more_contrast(flags))


def never_any_contrast(rows: Rows, flags: Flags) -> Alarm | None:
    """Check a run that ended too early for `no_contrast` and `constant_reward`."""
    steps = _trained(rows)
    if not 0 < len(steps) < _FLAT_STEPS or any(row["rollout/zero_std/ratio"] < 1 for row in steps):
        return None
    if flags.get("use_opd") or late_rewards(rows, flags):  # the second names the cause
        return None
    when = "in the only step" if len(steps) == 1 else f"in all {len(steps)} steps"
    detail = f"{when} every group had the same reward for all of its samples: every advantage was 0"
    all_rewards = {row.get(f"rollout/reward/{end}") for row in steps for end in ("min", "max")}
    fix = _REWARD_FIX if len(all_rewards) == 1 else _more_contrast(flags)
    return Alarm("No step had any contrast", detail, fix, "never_any_contrast")


def zero_gradient(rows: Rows, flags: Flags) -> Alarm | None:
    norms = [row for row in rows if row.get("train/grad_norm") is not None]
    if not norms or norms[-1]["train/grad_norm"] != 0 or len(_flat_rows(rows)[0]) >= _FLAT_STEPS:
        return None
    lowest, highest = (norms[-1].get(f"rollout/reward/{end}") for end in ("min", "max"))
    rewarded = norms[-1].get("rollout/zero_std/ratio", 1) < 1 and lowest != highest
    steps = 1 if rewarded else _FLAT_STEPS
    if len(norms) < steps or any(row["train/grad_norm"] != 0 for row in norms[-steps:]):
        return None
    if rewarded:
        detail = f"rewards go from {lowest:g} to {highest:g}, and yet "
    else:
        detail = f"in the last {_FLAT_STEPS} steps "
    fix = (
        "look for one sample per prompt (--n-samples-per-prompt), loss masks of zeros "
        "(trained_tokens in samples/), frozen parameters, rewards that a hook evens out"
    )
    return Alarm(
        "The gradient is exactly 0", f"{detail}train/grad_norm is 0: no weight changes", fix
    )


def late_rewards(rows: Rows, flags: Flags) -> Alarm | None:
    newest = [row for row in rows if row.get("rollout/num_samples")][-_FLAT_STEPS:]
    if not newest:
        return None
    samples = _samples(newest)
    late, died = (
        sum(row.get(f"rollout/reward_{kind}") or 0.0 for row in newest)
        for kind in ("timeout", "crash")
    )
    if chance_of_at_least(min(late + died, samples), samples, _LATE_SHARE) > _LATE_BY_CHANCE:
        return None
    is_all = late + died >= samples
    title = "No reward comes" if is_all else "Many rewards do not come"
    when = (
        f"at step {newest[0]['step']}" if len(newest) == 1 else f"in the last {len(newest)} steps"
    )
    detail = (
        f"{when}, {late:.0f} calls ran into --rm-timeout and {died:.0f} ended their process, for "
        f"{samples:.0f} samples; these count as 0"
    )
    fix = (
        f"raise {_now(flags, '--rm-timeout', ' s')}, or make the reward faster (async, a server of "
        "its own); logs/rollout.log names it"
    )
    return Alarm(title, detail, fix)


def failing_samples(rows: Rows, flags: Flags) -> Alarm | None:
    newest = [row for row in rows if row.get("rollout/num_failed_groups") is not None][
        -_FLAT_STEPS:
    ]
    counts = [row["rollout/num_failed_groups"] for row in newest]
    if len(counts) < _FLAT_STEPS or not all(counts):
        return None
    detail = (
        f"in each of the last {_FLAT_STEPS} steps some groups failed and were replaced "
        f"({sum(counts):.0f} in all)"
    )
    return Alarm(
        "Samples keep failing", detail, "logs/rollout.log tells why, with the line of your own code"
    )


# -- learning goes wrong ---------------------------------------------------------------------------


def nonfinite(rows: Rows, flags: Flags) -> Alarm | None:
    bad = {key: row["step"] for row in reversed(rows) for key in row.get("nonfinite", [])}
    if not bad:
        return None
    names = ", ".join(
        f"{key} (first at step {step})"
        for key, step in sorted(bad.items(), key=lambda item: item[1])[:5]
    )
    ways = [_lower_lr(flags)]
    if flags.get("clip_grad", 1.0) > 1.0 or flags.get("clip_grad") == 0:
        ways.append("set --clip-grad 1.0")
    if flags.get("fp16"):
        ways.append("prefer --bf16 to --fp16")
    fix = ", or ".join([*ways, "look at the samples of that step"])
    if not any(key.startswith(_OURS) for key in bad):
        fix = "look at the function of yours that gives them"
    return Alarm("NaN or infinity in the metrics", names, fix)


def reward_collapse(rows: Rows, flags: Flags) -> Alarm | None:
    windows = _windows(_rewards(rows))
    if len(windows) < _MIN_WINDOWS_OF_FALL:
        return None
    means = [statistics.fmean(window) for window in windows]
    best = max(range(len(means)), key=lambda index: means[index])
    fall = means[best] - means[-1]
    spread = max(means) - min(means)
    ends = [
        row[f"rollout/reward/{end}"]
        for row in rows
        for end in ("min", "max")
        if row.get(f"rollout/reward/{end}") is not None
    ]
    scale = max(ends) - min(ends) if ends else max(map(abs, means))
    is_back = means[-1] <= means[0] + 0.1 * spread and fall > 0.5 * spread
    has_risen = best > 0 and change(windows, 0, best) > STRICT
    least = _MIN_FALL if has_risen else _MIN_FALL_AT_ONCE
    if not is_back or fall < least * scale or change(windows, -1, best) < STRICT:
        return None
    detail = (
        f"mean reward fell from {means[best]:.3f} at its best to {means[-1]:.3f}, about where it "
        f"began ({means[0]:.3f})"
    )
    fix = f"read the worst samples; {_lower_lr(flags)}, or {_closer_to_reference(flags)}"
    return Alarm("The reward has collapsed", detail, fix)


def entropy_collapse(rows: Rows, flags: Flags) -> Alarm | None:
    windows = _windows(_values(rows, "train/entropy_loss", "rollout/entropy"))
    if not windows:
        return None
    first, last = (statistics.fmean(window) for window in (windows[0], windows[-1]))
    if first <= 0 or last > 0.1 * first or change(windows, -1, 0) < STRICT:
        return None
    if _has_risen(_rewards(rows)):
        return None  # the model has learnt the answers
    detail = (
        f"entropy fell from {first:.3f} to {last:.4f}, and the reward has not risen: responses "
        "hardly differ any more"
    )
    bonus = flags.get("entropy_coef") or 0.0
    high = flags.get("eps_clip_high")
    ways = [
        _lower_lr(flags),
        f"raise --entropy-coef (it is {bonus:g})" if bonus else "add --entropy-coef 0.001",
    ]
    ways.append("raise --eps-clip-high" + (f" (it is {high:g})" if high is not None else ""))
    return Alarm("The entropy has collapsed", detail, ", or ".join(ways))


def train_rollout_mismatch(rows: Rows, flags: Flags) -> Alarm | None:
    name = "train/train_rollout_logprob_abs_diff"
    values = _values(rows, name)
    windows = _windows(values)
    first, last = (statistics.fmean(windows[i]) for i in (0, -1)) if windows else (0.0, 0.0)
    correct = "" if flags.get("use_tis") else "; --use-tis corrects for what is left"
    if last > 0.02 and last > 3 * first and change(windows, 0, -1) > STRICT:
        detail = f"mean |log-prob difference| grew from {first:.4f} to {last:.4f}"
        advice = f"slime align with the run's flags ranks the causes{correct}"
        return Alarm("Trainer and engine drift apart", detail, advice)
    # skip stale samples: part of their difference is what the trainer has learnt since
    of_now = _values([row for row in rows if not row.get("rollout/staleness/max")], name)
    usual = statistics.median(of_now[-_FLAT_STEPS:]) if of_now else 0.0
    if usual > 0.1:
        detail = (
            f"mean |log-prob difference| is {usual:.3f}; below 0.01 is usual in float32, below "
            "0.05 in bfloat16"
        )
        advice = "slime align with the run's flags says where and why"
        moved = _values(rows, "train/canary_quantisation_abs_diff")
        if moved and moved[-1] > usual / 2:
            detail += (
                f". The engines' weights are quantised, which moves log-probs by {moved[-1]:.3f}"
            )
            if flags.get("fake_quantisation"):
                ways = []
            else:
                ways = ["--fake-quantisation trains with the engines' weights"]
            ways += [] if flags.get("use_tis") else ["--use-tis corrects"]
            advice = "; ".join([*ways, "slime align says what is left"])
        return Alarm("Trainer and engine disagree", detail, advice)
    return None


def tool_text_trained(rows: Rows, flags: Flags) -> Alarm | None:
    values = _values(rows[-_FLAT_STEPS:], "rollout/unsampled_trained_ratio")
    if not values or not all(values):
        return None
    detail = (
        f"{values[-1]:.1%} of the tokens trained on were sampled by no engine: what a tool "
        "answered, say"
    )
    fix = (
        "set their loss_mask to 0: slime.rollout.generate.append_message, or "
        "Sample.append_response_tokens(tokens=…, trainable=False), do so"
    )
    return Alarm("Text that the model did not write is trained on", detail, fix)


def stale_samples(rows: Rows, flags: Flags) -> Alarm | None:
    values = _values(rows[-_FLAT_STEPS:], "rollout/staleness/num_too_old")
    weighed = _values(rows[-1:], "train/tis")
    if weighed or not values or not all(values):
        return None
    detail = (
        f"{values[-1]:.0f} samples of the last step are older than --max-staleness allows for, or "
        "without it --async-buffer-size and --update-weights-interval: earlier rollouts have put "
        "them back"
    )
    weighing = "" if flags.get("use_tis") else "pass --use-tis, which weighs their tokens; "
    fix = f"{weighing}--max-staleness has such groups generated anew"
    return Alarm("Samples are too old", detail, fix)


def prompts_too_long(rows: Rows, flags: Flags) -> Alarm | None:
    newest = [row for row in rows if row.get(_NO_ROOM) is not None][-_ROWS_OF_PROMPTS:]
    count = sum(row[_NO_ROOM] for row in newest)
    samples = sum(row.get("rollout/num_samples") or 0.0 for row in newest)
    if count <= _FEW_TOO_LONG * (samples + count):
        return None
    empty = sum(row.get(_EMPTY) or 0.0 for row in newest)
    last = next(row["step"] for row in reversed(newest) if row[_NO_ROOM])
    if len(newest) > 1:
        when = f"in the last {len(newest)} steps (last: step {last})"
    else:
        when = f"at step {last}"
    detail = (
        f"{when} a prompt, or a conversation of several turns, filled the context {count:.0f} "
        f"times; {empty:.0f} samples without an answer left training"
    )
    fix = (
        "--rollout-max-prompt-len leaves such prompts out when the data is read; the context is "
        "--rollout-max-context-len, or without it the engine's (--sglang-context-length, by "
        "default what the model was made for)"
    )
    return Alarm("Prompts leave no room for an answer", detail, fix)


def _cut_shares(rows: Rows) -> list[float]:
    """Return each step's share of truncated responses, without prompts that filled the context:
    a larger response limit does not help those."""
    shares = []
    for row in rows:
        share = row.get("rollout/truncated_ratio")
        if share is None:
            continue
        dropped = sum(
            value or 0.0 for name, value in row.items() if name.startswith("rollout/dropped_")
        )
        samples = (row.get("rollout/num_samples") or 0.0) + dropped
        shares.append(max(0.0, share - (row.get(_NO_ROOM) or 0.0) / samples) if samples else share)
    return shares


def truncation(rows: Rows, flags: Flags) -> Alarm | None:
    shares = _cut_shares(rows)[-_CUT_STEPS:]
    if (
        len(shares) < _CUT_STEPS
        or not surely_above(shares, _CUT_SHARE)
        or _has_risen(_rewards(rows))
    ):
        return None
    detail = (
        f"{statistics.fmean(shares):.0%} of the responses of the last {len(shares)} steps were cut "
        "at the length limit"
    )
    return Alarm(
        "Many responses are truncated",
        detail,
        f"raise {_now(flags, '--rollout-max-response-len')}, or check the stop tokens",
    )


def large_gradient(rows: Rows, flags: Flags) -> Alarm | None:
    found = first_large_gradient(rows, flags)
    return Alarm("The gradient is large from the first step on", *found) if found else None


def gradient_spike(rows: Rows, flags: Flags) -> Alarm | None:
    points = [(row["step"], row["train/grad_norm"]) for row in rows if row.get("train/grad_norm")]
    step = 0
    peak = 0.0
    usual = 0.0
    for index in range(2 * _MIN_WINDOW, len(points)):
        before = [norm for _, norm in points[max(0, index - _BEFORE) : index]]
        median = statistics.median(before)
        norm = points[index][1]
        if (
            norm >= max(1.0, _SPIKE * median)
            and outlier(norm, before) > STRICT
            and norm / median > peak / (usual or 1)
        ):
            (step, peak) = points[index]
            usual = median
    if not peak:
        return None
    detail = f"grad norm {peak:.2f} at step {step}; the median of the steps before is {usual:.3f}"
    clip = flags.get("clip_grad")
    if clip is None or 0 < clip <= 1.0:
        clipped = f"it was scaled down to --clip-grad {clip:g}; " if clip else ""
        fix = (
            f"{clipped}read the samples of that step; {_lower_lr(flags)} if the reward falls after "
            "it"
        )
    else:
        fix = f"set --clip-grad 1.0 (it is {clip:g}), and read the samples of that step"
    return Alarm("A gradient spike", detail, fix)


def engine_imbalance(rows: Rows, flags: Flags) -> Alarm | None:
    newest = rows[-_BEFORE:]
    loads = engine_loads(newest)
    mean = sum(loads.values()) / max(1, len(loads))
    if len(loads) < 2 or not mean:
        return None
    name, most = max(loads.items(), key=lambda item: item[1])
    shares = [share for row in newest if (share := _load_share(row, name)) is not None]
    if len(shares) < _MIN_WINDOW or not surely_above(shares, _UNEVEN / (len(loads) - 1 + _UNEVEN)):
        return None
    detail = f"engine {name} had {most / mean:.1f}× the mean load"
    policy = flags.get("router_policy")
    fix = "leave --router-policy out"
    if policy != "round_robin":
        fix = "set --router-policy round_robin"
    return Alarm("The engines are not loaded evenly", detail, fix)


def _load_share(row: Mapping[str, Any], name: str) -> float | None:
    """Return one engine's share of a step's load."""
    loads = {
        match[1]: value
        for key, value in row.items()
        if value is not None and (match := _ENGINE_KEY.match(key))
    }
    total = sum(loads.values())
    return loads.get(name, 0.0) / total if total else None


def engine_loads(rows: Rows) -> dict[str, float]:
    """Return the mean of ``rollout/engine_load/<i>`` (requests in flight) over the rows, per
    engine."""
    loads: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            match = _ENGINE_KEY.match(key)
            if match and value is not None:
                loads.setdefault(match[1], []).append(value)
    return {name: statistics.fmean(values) for name, values in loads.items()}


def rejected_drafts(rows: Rows, flags: Flags) -> Alarm | None:
    lengths = _values(rows, "rollout/spec_accept_length")
    newest = lengths[-_MIN_WINDOW:]
    if len(newest) < _MIN_WINDOW:
        return None
    fix = (
        "take a draft that was trained for this policy (--sglang-speculative-draft-model-path): "
        "pushes leave it as it is; or leave --sglang-speculative-algorithm out"
    )
    mean = statistics.fmean(newest)
    if surely_above([-length for length in newest], -_USELESS_DRAFTS):
        detail = f"the last {len(newest)} steps made {mean:.2f} tokens per verification"
        return Alarm("Drafts are rejected", f"{detail}: they only cost time", fix)
    windows = _windows(lengths)
    if not windows or change(windows, 0, -1) >= -LIKELY:
        return None
    first, last = (statistics.fmean(windows[place]) for place in (0, -1))
    if last - 1 > _KEPT_GAIN * (first - 1):
        return None
    detail = f"tokens per verification fell from {first:.2f} to {last:.2f} as the policy changed"
    return Alarm("Fewer and fewer drafts are accepted", detail, fix)


def slow_data(rows: Rows, flags: Flags) -> Alarm | None:
    pairs = [
        (row["perf/data_wait_time"], row["perf/step_time"])
        for row in rows
        if row.get("perf/data_wait_time") is not None and row.get("perf/step_time")
    ]
    waited = sum(p[0] for p in pairs)
    total = sum(p[1] for p in pairs)
    shares = [wait / seconds for wait, seconds in pairs]
    # waits of up to a second are not worth a warning
    if len(pairs) < _MIN_WINDOW or waited <= 1.0 or not surely_above(shares, 0.1):
        return None
    detail = f"{waited / total:.0%} of the time is spent waiting for prompts"
    workers = flags.get("num_data_workers")
    ways = ["raise --num-data-workers" + (f" (it is {workers})" if workers is not None else "")]
    ways += [] if flags.get("streaming_data") else ["--streaming-data"]
    return Alarm(
        "Data loading is slow", detail, ", or ".join([*ways, "tokenise the data beforehand"])
    )


# -- memory ----------------------------------------------------------------------------------------

_FREE = "perf/host_free_memory_gb"
#: Memory metric → the process that it measures, and where to look.
_HELD = {
    "perf/driver_memory_gb": (
        "the driver",
        "what --custom-rollout-log-function-path or W&B keep; else a slime bundle",
    ),
    "perf/rollout_memory_gb": (
        "the rollout actor with its reward workers",
        "lists, caches and clients that generate, reward and data functions of your own keep "
        "between calls",
    ),
    "perf/engine_memory_gb": (
        "an engine",
        "logs/engine-<n>.log and its caches in host memory; with --use-fault-tolerance one that is "
        "killed comes back",
    ),
    "perf/trainer_memory_gb": (
        "a trainer rank",
        "tensors that losses and hooks of your own keep (detach() them)",
    ),
    "perf/trainer_gpu_memory_gb": (
        "a trainer rank's tensors on the GPU",
        "tensors that losses and hooks of your own keep from one step to the next (detach() them, "
        "keep .item())",
    ),
}
#: Smaller growth is ignored: in GB, and as a share of the first value.
_MIN_GROWTH = 1.0
_MIN_SHARE = 0.1
#: Growth is reported if it would use up the host's memory within this multiple of the steps so far.
#: Slower growth is reported later; by then, a cache that fills over hundreds of steps is full. The
#: second limit is in steps, for memory that has just begun to grow.
_TIMES_AHEAD = 5.0
_STEPS_AHEAD = 36.0
#: Rows of a long run are dropped in blocks of this size, so that windows keep their places.
_BLOCK = 640


def memory_growth(rows: Rows, flags: Flags) -> Alarm | None:
    free = next((row[_FREE] for row in reversed(rows) if row.get(_FREE) is not None), math.inf)
    found: list[tuple[float, str, Growth]] = []
    newest = rows[max(0, len(rows) // _BLOCK - 1) * _BLOCK :]
    for name in _HELD:
        values = [row[name] for row in newest if row.get(name) is not None]
        steady = steady_growth(values, _MIN_GROWTH, _MIN_SHARE)
        # if the free memory is unknown, every growth is reported
        left = 0.0 if free == math.inf or "gpu" in name else free
        if steady is not None and left <= steady.per_step * _TIMES_AHEAD * len(rows):
            found.append((steady.per_step, name, steady))
            continue
        sudden = sudden_growth(values, _MIN_GROWTH, _MIN_SHARE) if left else None
        if sudden is not None and left <= sudden.per_step * _STEPS_AHEAD:
            found.append((sudden.per_step, name, sudden))
    if not found:
        return None
    _, name, growth = max(found)
    who, where = _HELD[name]
    others = [_HELD[other][0] for _, other, _ in sorted(found, reverse=True)[1:]]
    detail = f"{who} went from {growth.before:.1f} to {growth.now:.1f} GB in {growth.steps} steps"
    if free < math.inf and "gpu" not in name:
        detail += (
            f"; the {free:.1f} GB that the host has left last for about "
            f"{free / growth.per_step:.0f} more"
        )
    detail += f"; so did {', '.join(others)}" if others else ""
    fix = f"look at {where}; with --save, slime resume goes on with fresh memory"
    return Alarm("Memory grows and grows", detail, fix)


#: All checks, most serious first. A check's name is the name in its metric ``alarm/<name>``.
CHECKS: tuple[Callable[[Rows, Flags], Alarm | None], ...] = (
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
    rejected_drafts,
    slow_data,
)


def find_alarms(
    rows: Rows, *, ended: bool = False, flags: Mapping[str, Any] | None = None
) -> list[Alarm]:
    """Return the alarms of one stage, most serious first.

    Args:
        ended: no more rows will come.
        flags: the run's flags. The advice depends on them, and they name users' functions that may
            have caused an alarm.
    """
    checks = (*CHECKS[:1], never_any_contrast, *CHECKS[1:]) if ended else CHECKS
    found = [
        dataclasses.replace(alarm, name=check.__name__)
        for check in checks
        if (alarm := check(rows, flags or {})) is not None
    ]
    makers = ", ".join(makers_of_samples(flags or {}))
    return [
        _naming(makers, alarm) if alarm.name == "train_rollout_mismatch" else alarm
        for alarm in found
    ]


def _naming(makers: str, alarm: Alarm) -> Alarm:
    """Add to an alarm the user's functions that made the tokens and log-probs, if any."""
    if not makers:
        return alarm
    title = "Log-probs of the samples are not those of the trainer"
    detail = f"{makers} made these tokens and log-probs; {alarm.detail}"
    fix = (
        "check first that it returns the engine's own tokens and log-probs, each in its place; "
        f"then {alarm.fix}"
    )
    return dataclasses.replace(alarm, title=title, detail=detail, fix=fix)


# -- while the run goes on -------------------------------------------------------------------------


class AlarmWatch:
    """The alarms of a run in progress. An alarm is reported when it starts, and again if it stops
    and starts anew.

    Args:
        rows: rows that an earlier process of the run logged for this stage.
        flags: as in `find_alarms`.
    Attributes:
        on: alarms of the newest row, most serious first.
    """

    def __init__(self, rows: Rows = (), flags: Mapping[str, Any] | None = None) -> None:
        self._rows = list(rows)
        self._flags = flags
        self.on = find_alarms(rows, flags=flags)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row without checking it."""
        self._rows.append(row)

    def look(self, row: dict[str, Any]) -> tuple[list[Alarm], dict[str, float]]:
        """Return the alarms that start with ``row``, and the metrics of its step: ``alarm/<name>``
        is 1 while the alarm is on, and 0 in the step in which it stops."""
        self.add(row)
        # thin out the older half: its alarms have been reported
        if len(self._rows) > _MAX_ROWS:
            self._rows = [*self._rows[: _MAX_ROWS // 2 : 2], *self._rows[_MAX_ROWS // 2 :]]
        before = {alarm.name for alarm in self.on}
        self.on = find_alarms(self._rows, flags=self._flags)
        now = {alarm.name for alarm in self.on}
        metrics = {f"alarm/{name}": float(name in now) for name in before | now}
        return [alarm for alarm in self.on if alarm.name not in before], metrics

    def at_the_end(self) -> list[Alarm]:
        """Return the alarms of a run that has ended, most serious first."""
        return find_alarms(self._rows, ended=True, flags=self._flags)
