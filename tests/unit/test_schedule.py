"""What of a run is due after which rollout, counted out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.run.schedule import Schedule, is_due

EVALUATES = {"eval_prompt_data": ("held-out", "held-out.jsonl")}


def schedule(start: int = 0, prompts: int = 0, **flags: Any) -> Schedule:
    if "num_epoch" not in flags:
        flags.setdefault("num_rollout", 10)
    found = Schedule(make_config(rollout_batch_size=4, **flags))
    found.begin(start, prompts)
    return found


def after(due: Any, length: int = 10) -> list[int]:
    return [rollout_id for rollout_id in range(length) if due(rollout_id)]


@pytest.mark.parametrize(
    ("interval", "per_epoch", "length", "due"),
    [
        (3, None, None, [2, 5, 8]),
        (3, None, 8, [2, 5, 7, 8]),
        (4, 5, None, [3, 4, 7, 9]),
        (None, 5, 8, []),
    ],
)
def test_every_interval_every_epoch_and_at_the_end(
    interval: int | None, per_epoch: int | None, length: int | None, due: list[int]
) -> None:
    assert after(lambda rollout_id: is_due(rollout_id, interval, per_epoch, length)) == due


def test_epochs_are_of_whole_rollouts() -> None:
    """23 prompts are five rollouts of four; what is left goes into the next epoch."""
    epochs = schedule(prompts=23, num_epoch=2)
    assert epochs.num_rollout == 10 and list(epochs.rollout_ids) == list(range(10))
    assert after(lambda rollout_id: epochs.is_due(rollout_id, 4)) == [3, 4, 7, 9]
    counted = schedule(prompts=23)  # a run that is given in rollouts knows no epochs
    assert after(lambda rollout_id: counted.is_due(rollout_id, 4)) == [3, 7, 9]
    assert schedule(prompts=4, num_epoch=3).num_rollout == 3
    with pytest.raises(UserError, match="3 prompts, less than one --rollout-batch-size"):
        schedule(prompts=3, num_epoch=2)
    assert list(schedule(start=7).rollout_ids) == [7, 8, 9]


def test_when_it_evaluates() -> None:
    assert after(schedule().evaluates) == []
    assert after(schedule(**EVALUATES).evaluates) == [9]
    assert after(schedule(**EVALUATES, eval_interval=4).evaluates) == [3, 7, 9]


def test_weights_are_pushed_every_interval_and_before_each_evaluation() -> None:
    assert after(schedule().pushes) == list(range(10))
    assert after(schedule(update_weights_interval=3).pushes) == [2, 5, 8]
    assert after(schedule(update_weights_interval=3, **EVALUATES, eval_interval=4).pushes) == [
        2,
        3,
        5,
        7,
        8,
        9,
    ]
    alone = schedule(debug_train_only=True, load_debug_rollout_data="data/{rollout_id}.pt")
    assert after(alone.pushes) == []


def test_a_run_that_saves_has_ten_checkpoints_unless_told_otherwise() -> None:
    assert schedule().save_interval is None
    assert [schedule(save="x", num_rollout=n).save_interval for n in (1, 10, 11, 95)] == [
        1,
        1,
        2,
        10,
    ]
    assert schedule(save="x", save_interval=7).save_interval == 7


def test_when_it_evaluates_before_training() -> None:
    assert schedule(**EVALUATES).evaluates_first
    assert not schedule(start=3, **EVALUATES).evaluates_first
    assert not schedule(**EVALUATES, skip_eval_before_train=True).evaluates_first
