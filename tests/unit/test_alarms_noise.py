"""Alarms against noise: stationary runs raise next to none, planted faults are found, and remedies
change something."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.observe.alarms import find_alarms

Row = dict[str, Any]
MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
#: Steps of a simulated run, and every how many of them it is looked at.
STEPS, LOOKS = 200, 8


def correlated(rng: random.Random, correlation: float, spread: float) -> Callable[[], float]:
    """A stationary series with mean 0 (an AR(1) process)."""
    state = [rng.gauss(0, spread)]

    def step() -> float:
        state[0] = correlation * state[0] + rng.gauss(0, spread * (1 - correlation**2) ** 0.5)
        return state[0]

    return step


def stationary_run(seed: int) -> list[Row]:
    """A run in which nothing changes: binary rewards whose probability wanders, heavy-tailed norms,
    and so on."""
    rng = random.Random(seed)
    groups, samples = rng.choice([4, 8, 32]), 8
    hardness = rng.uniform(0.15, 0.85)
    correlation = rng.choice([0.0, 0.5, 0.9])
    drift, norm_drift = correlated(rng, correlation, 0.05), correlated(rng, correlation, 0.3)
    heavy, engines = rng.choice([0.2, 0.6, 1.0]), rng.choice([1, 2, 4])
    entropy, mismatch = rng.uniform(0.05, 2.0), rng.uniform(1e-4, 0.015)
    cut, late = rng.uniform(0, 0.25), rng.uniform(0, 0.02)
    rows = []
    for number in range(1, STEPS + 1):
        probability = min(0.95, max(0.05, hardness + drift()))
        rewards = [
            [float(rng.random() < probability) for _ in range(samples)] for _ in range(groups)
        ]
        flat = [reward for group in rewards for reward in group]
        total = len(flat)
        row = {
            "step": number,
            "rollout/raw_reward": sum(flat) / total,
            "rollout/reward/min": min(flat),
            "rollout/reward/max": max(flat),
            "rollout/zero_std/ratio": sum(len(set(group)) == 1 for group in rewards) / groups,
            "rollout/num_samples": float(total),
            "rollout/truncated_ratio": sum(rng.random() < cut for _ in range(total)) / total,
            "rollout/reward_timeout": float(sum(rng.random() < late for _ in range(total))),
            "rollout/response_len/mean": rng.gauss(200, 20),
            "rollout/log_probs": -0.4,
            "train/grad_norm": 0.4 * rng.lognormvariate(norm_drift(), heavy),
            "train/entropy_loss": entropy * rng.lognormvariate(norm_drift() / 2, 0.2),
            "train/kl_loss": 0.01 * rng.lognormvariate(0, 0.5),
            "train/train_rollout_logprob_abs_diff": mismatch
            * rng.lognormvariate(norm_drift() / 2, 0.3),
            "perf/step_time": 10.0,
            "perf/data_wait_time": rng.expovariate(2.0),
        }
        row |= {f"rollout/engine_load/{i}": rng.gammavariate(8, 4) for i in range(engines)}
        rows.append(row)
    return rows


def alarms_while_it_goes_on(rows: list[Row], looks: int = LOOKS) -> set[str]:
    return {
        alarm.name for end in range(1, len(rows) + 1, looks) for alarm in find_alarms(rows[:end])
    }


@pytest.mark.parametrize("seed", range(16))
def test_a_stationary_run_raises_no_alarm(seed: int) -> None:
    assert alarms_while_it_goes_on(stationary_run(seed)) == set()


def measured_runs() -> list[Any]:
    """The curves of real runs that learnt, by file and run."""
    found = []
    for file in sorted(MEASUREMENTS.glob("*.jsonl")):
        runs: dict[str, list[Row]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "step" in row and "benchmark" not in row:
                runs.setdefault(str(row.get("run", "")), []).append(row)
        found += [pytest.param(rows, id=f"{file.stem}-{name}") for name, rows in runs.items()]
    assert len(found) > 5
    return found


@pytest.mark.parametrize("rows", measured_runs())
def test_measured_runs_raise_no_alarm(rows: list[Row]) -> None:
    """Except for engines with weights of 4 and 8 bits, whose log-probs are as far away as that
    alarm is for."""
    differences = [row.get("train/train_rollout_logprob_abs_diff", 0.0) for row in rows]
    expected = {"train_rollout_mismatch"} if max(differences) > 0.15 else set()
    assert alarms_while_it_goes_on(rows, looks=1) == expected


# -- faults ----------------------------------------------------------------------------------------


def from_step(first: int, **values: Callable[[Row, int], float]) -> Callable[[list[Row]], None]:
    def plant(rows: list[Row]) -> None:
        for row in rows[first:]:
            row.update(
                {
                    name.replace("__", "/"): value(row, row["step"] - first)
                    for name, value in values.items()
                }
            )

    return plant


def spike(rows: list[Row]) -> None:
    rows[150]["train/grad_norm"] = 2000.0


def rise_and_fall(rows: list[Row]) -> None:
    for row in rows:
        height = min(row["step"], max(0, 160 - row["step"])) / 80
        row["rollout/raw_reward"] = 0.2 * row["rollout/raw_reward"] + 0.7 * height


FAULTS: dict[str, Callable[[list[Row]], None]] = {
    "constant_reward": from_step(
        100,
        rollout__raw_reward=lambda *_: 0.0,
        rollout__reward__min=lambda *_: 0.0,
        rollout__reward__max=lambda *_: 0.0,
        rollout__zero_std__ratio=lambda *_: 1.0,
        train__grad_norm=lambda *_: 0.0,
    ),
    "no_contrast": from_step(
        100, rollout__zero_std__ratio=lambda *_: 1.0, train__grad_norm=lambda *_: 0.0
    ),
    "zero_gradient": from_step(190, train__grad_norm=lambda *_: 0.0),
    "late_rewards": from_step(
        190, rollout__reward_timeout=lambda row, _: row["rollout/num_samples"] * 0.7
    ),
    "failing_samples": from_step(190, rollout__num_failed_groups=lambda *_: 2.0),
    "reward_collapse": rise_and_fall,
    "entropy_collapse": from_step(
        60, train__entropy_loss=lambda row, age: row["train/entropy_loss"] * 0.95**age
    ),
    "train_rollout_mismatch": from_step(
        60, train__train_rollout_logprob_abs_diff=lambda row, age: 0.02 + 0.002 * age
    ),
    "tool_text_trained": from_step(190, rollout__unsampled_trained_ratio=lambda *_: 0.2),
    "stale_samples": from_step(190, rollout__staleness__num_too_old=lambda *_: 3.0),
    "prompts_too_long": from_step(
        190, rollout__prompt_too_long=lambda row, _: row["rollout/num_samples"] * 0.2
    ),
    "truncation": from_step(
        150, rollout__truncated_ratio=lambda row, _: 0.6 + 0.2 * row["rollout/truncated_ratio"]
    ),
    "gradient_spike": spike,
    "engine_imbalance": from_step(
        150,
        rollout__engine_load__0=lambda *_: 200.0,
        rollout__engine_load__1=lambda *_: 20.0,
        rollout__engine_load__2=lambda *_: 20.0,
    ),
    "slow_data": from_step(0, perf__data_wait_time=lambda row, _: 3.0 + row["perf/data_wait_time"]),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, seed: int) -> None:
    rows = stationary_run(100 + seed)
    FAULTS[name](rows)
    assert name in {alarm.name for alarm in find_alarms(rows)}


# -- what is advised -------------------------------------------------------------------------------

SETTINGS = {
    "clip_grad": st.sampled_from([0.0, 0.5, 1.0, 10.0]),
    "use_kl_loss": st.booleans(),
    "kl_loss_coef": st.sampled_from([0.0, 0.01]),
    "use_tis": st.booleans(),
    "fp16": st.booleans(),
    "normalize_advantages": st.booleans(),
    "streaming_data": st.booleans(),
    "attention_backend": st.sampled_from(["auto", "flash"]),
    "router_policy": st.sampled_from(["cache_aware", "round_robin"]),
    "dynamic_sampling_filter_path": st.sampled_from(
        [None, "slime.rollout.filters.check_reward_nonzero_std"]
    ),
}
_ADVISED = re.compile(r"--([a-z][a-z-]+)(?: ([\w.]+)(?![\w.]))?(?! \(it is)")


@given(
    flags=st.fixed_dictionaries(SETTINGS),
    name=st.sampled_from([*FAULTS, "nonfinite", "large_gradient"]),
)
@settings(max_examples=60, deadline=None)
def test_a_remedy_differs_from_what_is_set(flags: dict[str, Any], name: str) -> None:
    flags = vars(make_config().flat()) | flags
    rows = stationary_run(100)
    if name == "nonfinite":
        rows = [rows[0] | {"nonfinite": ["train/loss"]}]
    elif name == "large_gradient":
        rows = [rows[0] | {"train/grad_norm": 900.0, "rollout/reward/max": 250.0}]
    else:
        FAULTS[name](rows)
    for alarm in find_alarms(rows, flags=flags):
        advised = alarm.fix.partition("it was scaled down to")[2].partition("; ")[2] or alarm.fix
        for option, value in _ADVISED.findall(advised):
            dest = option.replace("-", "_")
            if dest == "kl_loss_coef" and not flags["use_kl_loss"]:
                continue  # which has no effect as it is
            if dest in SETTINGS and isinstance(flags[dest], bool):
                assert flags[dest] is False, alarm
            elif dest in SETTINGS and value and value[0].isalnum():
                assert str(flags[dest]) != value.rstrip("."), alarm
