"""How old samples may be: a rollout that would be too old begins after a push, and each one is
trained on, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.config.config import Config
from slime.errors import UserError
from slime.loop import train_on
from slime.run.schedule import Schedule, StalenessTracker


@dataclass
class Session:
    """A run on nothing but its schedule: a rollout is its number and the weights that it began
    with.

    Attributes:
        ages_seen: of each rollout, at the time when it is trained on.
        begun_by, asked_by: rollouts that had been begun when each one's training began; when it was
            waited for.
    """

    config: Config
    start: int = 0
    trained: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    begun_by: list[int] = field(default_factory=list)
    asked_by: list[int] = field(default_factory=list)
    ages_seen: list[int] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.schedule, self.staleness = Schedule(self.config), StalenessTracker(self.config)
        self.schedule.begin(self.start, 0)
        self.saving = SimpleNamespace(is_due=lambda rollout_id: False)
        self.step, self.under_way = self.start, set[int]()
        self.update_weights()

    def may_start(self, rollout_id: int) -> bool:
        return self.staleness.may_start(rollout_id)

    def start_generating(self, rollout_id: int) -> tuple[int, int]:
        self.begun.append(rollout_id)
        self.under_way.add(rollout_id)
        return rollout_id, self.staleness.version

    def collect(self, generating: tuple[int, int]) -> tuple[int, int]:
        self.under_way.discard(generating[0])
        self.asked_by.append(len(self.begun))
        return generating

    def wait_for(self, generating: Any) -> None:
        self.under_way.clear()

    def train(self, batch: tuple[int, int]) -> dict[str, float]:
        rollout_id, version = batch
        found = self.staleness.metrics({(version,): 4}, self.step)
        self.ages_seen.append(int(found["rollout/staleness/max"]))
        assert found.get("rollout/staleness/num_too_old", 0) == 0
        self.begun_by.append(len(self.begun))
        self.trained.append(rollout_id)
        self.step = rollout_id + 1
        return {}

    def update_weights(self) -> dict[str, float]:
        assert not self.under_way or self.config.sync.update_weights_in_flight
        self.staleness.pushed(self.staleness.version + 1, self.step)
        return {}

    lacks_evaluation = False

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return {}

    def finish_evaluation(self) -> None: ...

    def log(self, metrics: dict[str, float]) -> None: ...

    def stop_if_asked(self) -> None: ...


def config_of(
    ahead: int, interval: int, most: int | None, count: int, evaluate: int | None, flight: bool
) -> Config:
    flags: dict[str, Any] = {
        "async_buffer_size": ahead,
        "update_weights_interval": interval,
        "max_staleness": most,
    }
    if evaluate is not None:
        flags |= {"eval_prompt_data": ("held_out", "data.jsonl"), "eval_interval": evaluate}
    if flight and ahead:
        flags["update_weights_in_flight"] = True
    return make_config(rollout_batch_size=4, num_rollout=count, **flags)


@settings(max_examples=300)
@given(
    ahead=st.integers(0, 5),
    interval=st.integers(1, 5),
    most=st.none() | st.integers(0, 10),
    count=st.integers(1, 40),
    first=st.integers(0, 7),
    evaluate=st.none() | st.integers(1, 7),
    flight=st.booleans(),
)
def test_each_rollout_is_trained_on_once_in_order_and_in_time(
    ahead: int,
    interval: int,
    most: int | None,
    count: int,
    first: int,
    evaluate: int | None,
    flight: bool,
) -> None:
    if most is not None and most < interval - 1:
        with pytest.raises(
            UserError, match=f"--max-staleness {most} is too little for --update-weights-interval"
        ):
            config_of(ahead, interval, most, count, evaluate, flight)
        return
    config = config_of(ahead, interval, most, count, evaluate, flight)
    session: Any = Session(config, start=min(first, count - 1))
    train_on(session)
    rollouts = list(range(session.start, count))
    assert session.trained == session.begun == rollouts
    bound = config.sync.staleness
    assert max(session.ages_seen) <= bound and (most is None or bound <= most)
    if evaluate is None and len(rollouts) > ahead + 2 * interval:
        assert max(session.ages_seen) == bound, "what is said at launch is reached"
    unpaced = [min(len(rollouts), i + 1 + ahead) for i in range(len(rollouts))]
    assert all(begun <= most_begun for begun, most_begun in zip(session.begun_by, unpaced))
    if most is None:
        assert session.begun_by == unpaced
        at_once = min(len(rollouts), max(1, ahead))
        assert session.asked_by == [
            at_once,
            *(max(i + 1, unpaced[i - 1]) for i in range(1, len(rollouts))),
        ]


@pytest.mark.parametrize("flight", [False, True])
def test_pacing_leaves_as_many_ahead_as_the_bound_allows(flight: bool) -> None:
    """Four may be ahead, one is: with a push after each rollout that is as far as samples of the
    weights before go. What was held back begins with the push, and does not wait until the one
    before it is generated."""
    session: Any = Session(config_of(4, 1, 1, 6, None, flight))
    train_on(session)
    assert session.begun_by == [2, 3, 4, 5, 6, 6] and session.ages_seen == [0, 1, 1, 1, 1, 1]
    assert session.asked_by == [2, 3, 4, 5, 6, 6]


def test_what_a_launch_says_of_the_bound() -> None:
    assert make_config(rollout_batch_size=4, entry="train_async").sync.paced == ""
    assert make_config(rollout_batch_size=4, entry="train_async", max_staleness=1).sync.paced == ""
    paced = make_config(rollout_batch_size=4, async_buffer_size=4, max_staleness=2).sync
    assert paced.staleness == 2 and "with --async-buffer-size 4 alone it would be 4" in paced.paced


@pytest.mark.parametrize(
    ("flags", "trained_at", "rollout_id", "expected"),
    [
        ({}, {1: 0, 2: 1, 3: 2}, 2, 0),
        ({"max_staleness": 0}, {1: 0, 2: 1, 3: 2}, 2, 3),
        ({"max_staleness": 1}, {1: 0, 2: 1, 3: 2}, 2, 2),
        ({"max_staleness": 9}, {1: 0, 2: 1, 3: 2}, 2, 1),
        # a resumed run: 4 was pushed at 6
        ({"max_staleness": 3, "update_weights_interval": 2}, {5: 8, 6: 10}, 11, 5),
    ],
)
def test_the_oldest_weights_that_a_rollout_may_have(
    flags: dict[str, Any], trained_at: dict[int, int], rollout_id: int, expected: int
) -> None:
    ages = StalenessTracker(make_config(rollout_batch_size=1, **flags))
    for version, trained in trained_at.items():
        ages.pushed(version, trained)
    assert ages.versions(rollout_id)[:4] == (expected, max(trained_at), set(), set())


def test_weights_of_later_steps_than_those_that_a_run_has_gone_back_to() -> None:
    """The third weights are of the second step, then the run began again behind the first: what the
    third ones have finished for the rollout behind the second step is as young as what the fifth
    would make."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, max_staleness=1))
    for version, trained in {1: 0, 2: 1, 3: 2, 4: 1, 5: 2}.items():
        ages.pushed(version, trained)
    assert ages.versions(3)[:4] == (3, 5, {4}, set())
    assert ages.versions(3).allowed == "weights 3 and newer, without 4 of other steps"
    assert ages.versions(2)[:4] == (2, 5, set(), set()) and ages.versions(4)[:4] == (
        5,
        5,
        set(),
        set(),
    )
    assert ages.versions(3).stale_among([3, 5]) is None
    assert (
        ages.versions(3).stale_among([5, 4, 3]) == 4 and ages.versions(3).stale_among([2, 4]) == 2
    )


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 3), st.integers(0, 8))
def test_weights_are_stale_by_the_steps_that_they_are_of(
    trained: list[int], most: int, rollout_id: int
) -> None:
    """Whatever checkpoints the run has gone back to between its pushes."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, max_staleness=most))
    for number, step in enumerate(trained):
        ages.pushed(number + 1, step)
    versions = ages.versions(rollout_id)
    for number, step in enumerate(trained[:-1]):
        assert (versions.stale_among([number + 1]) is not None) == (abs(rollout_id - step) > most)
    ahead = {number + 1 for number, step in enumerate(trained) if step > trained[-1]}
    assert versions.newest == len(trained) and versions.ahead == ahead
    assert versions.stale_among([len(trained)]) is None, (
        "what engines have is not refused: `may_start` sees to it"
    )


def test_samples_that_are_too_old_all_the_same_are_counted() -> None:
    """A generate function of the user's own may bring tokens from anywhere."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, max_staleness=1))
    for version in (1, 2, 3):
        ages.pushed(version, version - 1)
    assert ages.metrics({(3,): 5, (2,): 2, (1,): 3}, trained=2) == {
        "rollout/staleness/mean": 0.8,
        "rollout/staleness/max": 2.0,
        "rollout/staleness/num_too_old": 3.0,
    }
    assert ages.metrics({}, trained=2) == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"async_buffer_size": 1}, 3.0),
        ({"async_buffer_size": 1, "update_weights_interval": 2}, 0.0),
        ({"async_buffer_size": 1, "max_staleness": 2}, 0.0),
        ({}, None),  # lock step promises nothing of what was put back
    ],
)
def test_without_max_staleness_the_bound_that_the_launch_says_is_checked(
    flags: dict[str, Any], expected: float | None
) -> None:
    """Three samples were put back: they are two pushes old."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, **flags))
    for version in (1, 2, 3):
        ages.pushed(version, version - 1)
    assert (
        ages.metrics({(3,): 5, (2,): 2, (1,): 3}, trained=2).get("rollout/staleness/num_too_old")
        == expected
    )


def test_what_a_launch_says_of_groups_that_were_put_back() -> None:
    assert (
        "may be older, and are counted"
        in StalenessTracker(make_config(rollout_batch_size=4, entry="train_async")).put_back_policy
    )
    said = {
        name: StalenessTracker(make_config(max_staleness=2, stale_samples=name)).put_back_policy
        for name in ("requeue", "drop")
    }
    assert said["requeue"].startswith("are generated anew when they are older than 2")
    assert said["drop"].startswith("are passed over when they are older than 2")


def test_no_sample_is_younger_than_its_training() -> None:
    """A run that began again has groups that were sampled with weights that it has not reached
    yet."""
    ages = StalenessTracker(make_config(rollout_batch_size=1))
    for version, trained in (
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 0),
    ):  # the last one at the checkpoint that was loaded again
        ages.pushed(version, trained)
    assert ages.metrics({(3,): 1}, trained=0) == {
        "rollout/staleness/mean": 2.0,
        "rollout/staleness/max": 2.0,
    }


def test_a_sample_of_two_lives_is_as_old_as_its_oldest_token() -> None:
    """The second weights are of this step and the third of the one behind it, although they are
    newer."""
    ages = StalenessTracker(make_config(rollout_batch_size=1))
    for version, trained in ((1, 0), (2, 1), (3, 3), (4, 1)):
        ages.pushed(version, trained)
    assert ages.metrics({(2, 3): 1, (2, 4): 1}, trained=1) == {
        "rollout/staleness/mean": 1.0, "rollout/staleness/max": 2.0,
    }  # fmt: skip


def test_ages_over_a_resume_between_two_pushes() -> None:
    """Saved after rollout 2; the journal has samples of versions 3 and 4, which were pushed behind
    that checkpoint."""
    first = StalenessTracker(make_config(rollout_batch_size=1, update_weights_interval=2))
    first.pushed(1, trained=0)
    first.pushed(2, trained=2)
    second = StalenessTracker(make_config(rollout_batch_size=1, update_weights_interval=2))
    second.remember(first.recent_pushes())
    second.pushed(5, trained=3)
    assert [second.trained_when(version) for version in range(1, 6)] == [0, 2, 4, 6, 3]
    assert second.metrics({(3,): 1}, trained=4) == {
        "rollout/staleness/mean": 0.0,
        "rollout/staleness/max": 0.0,
    }
    assert second.recent_pushes() == {1: 0, 2: 2, 3: 4, 4: 6, 5: 3}
    for version in range(6, 200):
        second.pushed(version, trained=version)
    assert len(second.recent_pushes()) == 64 and max(second.recent_pushes()) == 199
