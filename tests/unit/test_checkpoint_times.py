"""When checkpoints are written: how often at the least and at the most, and where without a
word."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config import make_config, parse_args
from slime.run import saving as module
from slime.run.saving import Saving
from slime.run.schedule import Schedule

RUN = [
    "--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--rollout-batch-size", "2",
    "--run-name", "sums"
]  # fmt: skip


def saved_at(seconds: list[float], **flags: Any) -> list[int]:
    """The rollouts after which there is a checkpoint, of a run whose steps take these seconds."""
    clock = [0.0]
    config = make_config(save="c", num_rollout=len(seconds), rollout_batch_size=1, **flags)
    schedule = Schedule(config)
    schedule.begin(0, 0)
    written = []
    cluster: Any = SimpleNamespace(
        has_trainers=True, save=lambda rollout_id, *_: written.append(rollout_id)
    )
    sinks: Any = SimpleNamespace(phase=lambda _: nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        saving = Saving(config, SimpleNamespace(), sinks, cluster, schedule)  # type: ignore[arg-type]
        saving.begin()
        for rollout_id, taken in enumerate(seconds):
            clock[0] += taken
            if saving.is_due(rollout_id):
                saving.save(rollout_id, {}, {})
    return written


@given(
    seconds=st.lists(st.floats(1, 400), min_size=1, max_size=40),
    least=st.sampled_from([0.0, 60.0, 120.0, 1000.0]),
)
def test_checkpoints_are_apart_and_the_last_step_has_one(
    seconds: list[float], least: float
) -> None:
    written = saved_at(seconds, save_min_seconds=least)
    ends = [sum(seconds[: rollout_id + 1]) for rollout_id in written]
    assert written[-1] == len(seconds) - 1
    assert all(after - before >= least - 1e-6 for before, after in zip([0.0, *ends], ends[:-1]))


def test_by_default_short_runs_save_once_and_long_ones_every_tenth() -> None:
    assert saved_at([5.0] * 5) == [4]
    # due after each, written when two minutes have passed
    assert saved_at([50.0] * 10) == [2, 5, 8, 9]
    assert saved_at([100.0] * 40) == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]
    assert saved_at([2000.0] * 40) == list(range(40)), "half an hour is enough"


def test_an_interval_that_is_asked_for_is_kept() -> None:
    assert saved_at([1.0] * 5, save_interval=1) == [0, 1, 2, 3, 4]
    assert saved_at([50.0] * 6, save_interval=2, save_min_seconds=120) == [2, 5]


def test_a_run_keeps_its_checkpoints_in_its_folder_unless_told_otherwise() -> None:
    def save(*words: str) -> str | None:
        return parse_args([*RUN, "--num-rollout", "3", *words]).checkpoint.save

    assert save() == "outputs/sums/checkpoints"
    assert save("--save", "kept") == "kept"
    assert save("--no-save") is None
    assert save("--save-hf", "exported") is None
    assert save("--debug-rollout-only") is None
    assert make_config(num_rollout=3).checkpoint.save is None, "a part of the system saves nothing"
