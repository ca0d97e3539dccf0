"""A group of samples on its way through the rollout, and each of its trajectories: where it is, and
what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.rollout.sample_steps import copy_of_prompt
from slime.samples.types import Group, Sample, SampleStatus

_FINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
#: Attributes of a group's samples between two rollouts.
_KEY = "drawn_as"
_DRAWN = "as_drawn"


class Activity(StrEnum):
    """Where a trajectory is; the watchdog's words."""

    QUEUED = "queued"
    GENERATING = "generating"
    HOOKS = "sample hooks"
    REWARD = "reward"
    FILTER = "filter"
    DONE = "done"


@dataclass
class Trajectory:
    """One run of the generate function.

    Attributes:
        prompt: the sample as this rollout took it up, kept when user code might change it beyond
            repair; else ``samples[0]``.
        drawn: `Sample.to_dict` of it as it was first drawn, where it was taken up as more than
            that; None where ``prompt`` without its response is the same.
        samples: what it is now; several after a fan-out.
        failure: what stopped it for good.
        function: of the user's, that is called now; "" for our own.
        num_failures: how often the user's code has failed on it.
        hung_seconds: how long nothing had moved when it was given up; 0: it was not.
    """

    prompt: Sample
    samples: list[Sample]
    drawn: dict[str, Any] | None = None
    fanned_out: bool = False
    activity: Activity = Activity.QUEUED
    since: float = field(default_factory=time.monotonic)
    failure: Exception | None = None
    function: str = ""
    num_failures: int = 0
    hung_seconds: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def is_generated(self) -> bool:
        return bool(self.samples) and all(sample.status in _FINAL for sample in self.samples)

    @property
    def was_cut(self) -> bool:
        """By an abort."""
        return any(sample.status is SampleStatus.ABORTED for sample in self.samples)

    def enter(self, activity: Activity) -> None:
        self.activity, self.since = activity, time.monotonic()

    def rewind(self) -> None:
        """Back to what it was when this rollout took it up."""
        self.samples = [self.prompt]
        self.fanned_out = False
        self.enter(Activity.QUEUED)

    def restart(self) -> None:
        """Back to the prompt alone, without what users' code has made of it in this rollout or an
        earlier one."""
        if self.drawn is not None:
            self.prompt = copy_of_prompt(Sample.from_dict(self.drawn))
        self.rewind()
        self.prompt.reset_response()


@dataclass
class GroupRun:
    """A drawn group on its way through the loop.

    Attributes:
        order: counts the draws of this rollout.
        drawn_as: see `slime.rollout.journal.drawn_as`; is_noted: the journal has it as it is.
        is_restored: it came out of the journal.
        was_prompt: it was drawn as a prompt: all that it has came out of the journal.
    """

    trajectories: list[Trajectory]
    order: int = 0
    drawn_as: int = 0
    is_noted: bool = False
    is_restored: bool = False
    was_prompt: bool = False

    @staticmethod
    def of(drawn: Sequence[Sample], order: int = 0) -> GroupRun:
        """From what a data source gives: one trajectory per sample, except that what had fanned out
        in an earlier rollout comes back as several samples with one ``rollout_id``."""
        trajectories: dict[Any, Trajectory] = {}
        for sample in drawn:
            key = ("of", id(sample)) if sample.rollout_id is None else sample.rollout_id
            if key in trajectories:
                trajectories[key].samples.append(sample)
                trajectories[key].fanned_out = True
            else:
                trajectories[key] = Trajectory(sample, [sample], getattr(sample, _DRAWN, None))
        return GroupRun(list(trajectories.values()), order)

    def restored(self, found: Sequence[Sample]) -> GroupRun:
        """This group, as it was drawn just now, as far as it ``found`` itself in the journal."""
        run = GroupRun.of(found, self.order)
        for trajectory, ours in zip(run.trajectories, self.trajectories):
            is_prompt = not ours.prompt.response_length
            trajectory.drawn = ours.drawn or (ours.prompt.to_dict() if is_prompt else None)
        run.is_restored = True
        return run

    @property
    def index(self) -> int:
        index = self.trajectories[0].prompt.group_index
        return self.order if index is None else index

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory.samples]

    @property
    def is_generated(self) -> bool:
        return all(trajectory.is_generated for trajectory in self.trajectories)

    @property
    def is_scored(self) -> bool:
        return self.is_generated and all(sample.reward is not None for sample in self.samples)

    @property
    def failure(self) -> Exception | None:
        return next((e.failure for e in self.trajectories if e.failure is not None), None)

    def to_group(self) -> Group:
        return Group(self.index, [trajectory.samples for trajectory in self.trajectories])

    def restart(self) -> None:
        for trajectory in self.trajectories:
            trajectory.restart()

    def for_later(self) -> list[Sample]:
        """The samples, to be put back, and with them what only this rollout knows of how they were
        drawn."""
        for trajectory in self.trajectories:
            first = trajectory.samples[0]
            prompt = trajectory.prompt
            setattr(first, _KEY, self.drawn_as)
            if trajectory.drawn is not None:
                setattr(first, _DRAWN, trajectory.drawn)
            elif prompt is not first and not prompt.response_length:
                setattr(first, _DRAWN, prompt.to_dict())
        return self.samples

    def for_training(self) -> GroupRun:
        """This group, whose samples keep nothing of what `for_later` has left with them."""
        for sample in self.samples:
            for name in (_KEY, _DRAWN):
                vars(sample).pop(name, None)
        return self


def key_left_with(drawn: Sequence[Sample]) -> int | None:
    """What `GroupRun.for_later` has left of `GroupRun.drawn_as`, where the group was put back
    before."""
    return getattr(drawn[0], _KEY, None)
