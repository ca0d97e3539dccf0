"""What the driver knows of a launch, and of what is under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import ray

from slime.errors import RunFailed

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What the drivers must know once everything runs.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_prompts: prompts per epoch, for --num-epoch; 0 when unknown (streaming) or not needed.
        seconds: time by part of the launch.
        saved_metrics: of the step that the checkpoint holds, as far as they were known when it was
            written.
        pushes: weight version → rollouts that were trained on when it was pushed, by the
            checkpoint.
        lineages: rollouts trained on → lineage of the weights, by the checkpoint.
    """

    start_rollout_id: int
    num_prompts: int
    seconds: dict[str, float]
    saved_metrics: dict[str, float]
    pushes: dict[int, int] = field(default_factory=dict)
    lineages: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generating:
    """A rollout, or an evaluation, that was started and not yet collected."""

    rollout_id: int
    ref: ray.ObjectRef

    def ends_within(self, seconds: float) -> bool:
        """Well or not; waits no longer than that."""
        return bool(ray.wait([self.ref], timeout=seconds)[0])


class LapTimer:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def require_launched(part: T | None) -> T:
    """A part of a cluster that has been launched."""
    assert part is not None, "launch comes first"
    return part


def connect(
    ask: Callable[[], None],
    explained: Callable[[str], AbstractContextManager[None]],
    *,
    tolerant: bool,
) -> None:
    """The rollout actor to the router, which may die in the launch, too.

    Args:
        ask: the rollout actor to do it, with the router's address of that moment.
        explained: `Engines.explained`.
        tolerant: it is started again then (--use-fault-tolerance), as soon as it is heard of.
    Raises:
        RunFailed: the router died, or does not answer.
    """
    for is_last in (not tolerant, True):
        try:
            with explained("connecting to the router"):
                return ask()
        except RunFailed:
            if is_last:
                raise
