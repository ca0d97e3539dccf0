"""Weights reach the engines by every way of transfer, and what they generate is the same, bit for
bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run, RunResult

ROLLOUTS = 3


@pytest.fixture(scope="module")
def by_memory(unbroken: RunResult) -> RunResult:
    return unbroken


@pytest.fixture(scope="module")
def by_broadcast(run: Run, deterministic: Any) -> RunResult:
    """Engines with slots of their own, that pass for those of another host; two of them behind the
    router."""
    flags = [
        "--rollout-num-gpus",
        2,
        "--custom-megatron-init-path",
        "tests.support.toy.engines_look_remote",
    ]
    return run("by-broadcast", *deterministic("by-broadcast"), *flags, "--num-rollout", ROLLOUTS)


@pytest.fixture(scope="module")
def by_disk(run: Run, deterministic: Any, outputs: Path) -> RunResult:
    flags = [
        "--colocate",
        "--update-weight-transport",
        "disk",
        "--update-weight-disk-dir",
        outputs / "weights",
    ]
    flags += ["--check-weight-update-equal"]
    return run("by-disk", *deterministic("by-disk"), *flags, "--num-rollout", ROLLOUTS)


@pytest.fixture(scope="module")
def data_parallel(run: Run, deterministic: Any) -> RunResult:
    """Two trainer ranks, which share their slots with two engines."""
    flags = ["--colocate", "--actor-num-gpus-per-node", 2, "--num-rollout", ROLLOUTS]
    return run("data-parallel", *deterministic("data-parallel"), *flags)


@pytest.fixture(scope="module")
def every_second(run: Run, deterministic: Any) -> RunResult:
    flags = ["--colocate", "--update-weights-interval", 2, "--num-rollout", 4]
    return run("every-second", *deterministic("every-second"), *flags)


def log(result: RunResult, process: str) -> str:
    return (result.path / "logs" / f"{process}.log").read_text()


def transport(result: RunResult) -> str:
    found = re.search(r"weights go to \d+ engine\(s\) by (.*)", log(result, "trainer-0"))
    assert found is not None
    return found.group(1)


def test_each_run_took_its_way(
    by_memory: RunResult, by_broadcast: RunResult, by_disk: RunResult
) -> None:
    assert [transport(r) for r in (by_memory, by_broadcast, by_disk)] == [
        "shared memory",
        "gloo broadcast",
        "disk",
    ]


@pytest.mark.parametrize("rollout_id", range(ROLLOUTS))
def test_same_generation_by_every_way(
    by_memory: RunResult, by_broadcast: RunResult, by_disk: RunResult, rollout_id: int
) -> None:
    expected = by_memory.tokens(rollout_id)
    assert by_broadcast.tokens(rollout_id) == expected
    assert by_disk.tokens(rollout_id) == expected


def test_same_metrics_by_every_way(
    by_memory: RunResult, by_broadcast: RunResult, by_disk: RunResult
) -> None:
    for step in range(1, ROLLOUTS + 1):
        assert by_broadcast.steps()[step] == by_disk.steps()[step] == by_memory.steps()[step]


# two ranks train as one at every layout in tests/unit/test_parity.py
DATA_PARALLEL = pytest.param("data_parallel", marks=pytest.mark.full)


@pytest.mark.parametrize("which", ["by_broadcast", DATA_PARALLEL])
def test_the_router_uses_both_engines(which: str, request: pytest.FixtureRequest) -> None:
    result: RunResult = request.getfixturevalue(which)
    for engine in ("engine-0", "engine-1"):
        found = re.search(r"stopping, (\d+) tokens decoded", log(result, engine))
        assert found is not None and int(found.group(1)) > 0, engine


@pytest.mark.full
def test_two_ranks_train_as_one(data_parallel: RunResult, by_memory: RunResult) -> None:
    for step in range(1, ROLLOUTS + 1):
        two, one = data_parallel.steps()[step], by_memory.steps()[step]
        assert two.keys() == one.keys()
        assert two == pytest.approx(one, rel=1e-5, abs=1e-5)


def test_a_full_check_covers_every_tensor(by_disk: RunResult) -> None:
    from safetensors import safe_open

    [newest] = (by_disk.path.parent / "weights").iterdir()
    with safe_open(next(newest.glob("*.safetensors")), "pt") as weights:
        num_tensors = len(weights.keys())
    # one before the first rollout, one after each
    assert newest.name == f"weight_v{ROLLOUTS + 1:06d}"
    assert by_disk.series("perf/update_weights/checked_tensors") == [num_tensors] * ROLLOUTS


@pytest.mark.parametrize("which", ["by_memory", "by_broadcast", "by_disk", DATA_PARALLEL])
def test_engines_agree_with_the_trainer_after_every_push(
    which: str, request: pytest.FixtureRequest
) -> None:
    result: RunResult = request.getfixturevalue(which)
    for name in ("train/canary_logprob_abs_diff", "train/canary_logprob_abs_diff_max"):
        values = result.series(name)
        assert len(values) == len(result.steps()) and all(0 <= value <= 1e-4 for value in values)
    seconds = result.series("perf/canary_time")
    assert len(seconds) == len(result.steps()) and min(seconds) > 0


def test_every_sample_says_which_weights_made_it(
    by_memory: RunResult, by_broadcast: RunResult
) -> None:
    for result in (by_memory, by_broadcast):
        for rollout_id in range(ROLLOUTS):
            for sample in result.samples(rollout_id):
                assert sample.weight_versions == [str(rollout_id + 1)]
                [span] = sample.token_spans
                assert (span.start, span.end, span.weight_version) == (
                    0,
                    sample.response_length,
                    rollout_id + 1,
                )
    assert by_memory.series("perf/weight_version") == [2, 3, 4, 5, 6, 7]


@pytest.mark.full
def test_weights_are_pushed_at_the_interval(every_second: RunResult, by_memory: RunResult) -> None:
    assert every_second.series("rollout/weight_version/max") == [1, 1, 2, 2]
    assert every_second.series("rollout/staleness/max") == [0, 1, 0, 1]
    assert every_second.series("perf/weight_version") == [2, 3]
    assert every_second.tokens(0) == by_memory.tokens(0)
    assert every_second.tokens(1) != by_memory.tokens(1)


@pytest.mark.full
def test_seen_from_the_trainer(every_second: RunResult) -> None:
    """Stale samples show as a difference between trainer and engine, fresh ones do not."""
    difference = every_second.series("train/train_rollout_logprob_abs_diff_max")
    assert max(difference[0], difference[2]) < 1e-4 < min(difference[1], difference[3])
