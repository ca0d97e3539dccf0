"""Whose turn the GPUs are that trainer and engines share (--colocate with --offload-…): the one place that knows.

    launch     engines start ─► engines release all ─► trainer starts
    push       trainer frees all but its weights ─► engines take memory for weights ─► push
    generate   trainer frees its weights ─► engines take memory for caches and graphs ─► generate
    train      engines release all ─► trainer takes its memory back ─► train, save
    restart    engines release all, trainer frees all ─► dead engines start and release all ─► trainer takes its back

At no point does one side take memory before the other has given up what it can do without: the peak is the larger of
the trainer alone, the engines alone, and both copies of the weights with one or two buckets between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from slime.cluster.engine_table import ALL_MEMORY, WEIGHTS
from slime.log import get_logger

logger = get_logger(__name__)


class Turn(Enum):
    """Who has the GPUs' memory."""

    NOBODY = "nobody"  # or both: before the first turn, and since one began that has not come to its end
    TRAINER = "trainer"
    PUSH = "push"  # the trainer its weights, the engines theirs
    ENGINES = "engines"


class GpuTurns:
    """Moves memory between trainer and engines. Each verb does nothing when things are so already, and can be called
    again when it has failed because an engine died: the others may have done what was asked, or not.

    Args:
        release, resume: have all engines give up the tagged memory, or take it back; each engine is asked only for what
            it has not done yet.
        sleep, wake: have the trainer give its memory up (true: all but its weights), or take it back; metrics.
        offload_train, offload_rollout: which sides give memory up; where neither does, nobody takes turns and no verb
            does anything.
    """

    def __init__(
        self,
        release: Callable[[Sequence[str]], None],
        resume: Callable[[Sequence[str]], None],
        sleep: Callable[[bool], dict[str, float]],
        wake: Callable[[], dict[str, float]],
        *,
        offload_train: bool,
        offload_rollout: bool,
    ) -> None:
        self._release_engines, self._resume_engines, self._sleep_trainer, self._wake_trainer = (
            release,
            resume,
            sleep,
            wake,
        )
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self.taken = offload_train or offload_rollout
        self.turn = Turn.NOBODY
        self._metrics: dict[str, float] = {}

    def before_trainer(self) -> None:
        """At the launch: the engines make room for a trainer that is yet to be set up."""
        self._release()
        self.turn = Turn.TRAINER

    def to_trainer(self) -> None:
        """The engines give up everything, then the trainer takes its memory back."""
        if self.turn is Turn.TRAINER:
            return
        self.turn = Turn.NOBODY
        self._release()
        self._wake()
        self.turn = Turn.TRAINER

    def to_push(self) -> None:
        """Both sides have their weights, and nothing that can be done without."""
        if not self.taken or self.turn is Turn.PUSH:
            return
        assert self.turn is not Turn.ENGINES, "the trainer pushes what it has trained, before the engines generate"
        self.turn = Turn.NOBODY
        self._sleep(keep_weights=True)
        self._resume([WEIGHTS])
        self.turn = Turn.PUSH

    def to_engines(self) -> bool:
        """The trainer frees everything, then the engines take what they lack; true when they lacked something."""
        if self.turn is Turn.ENGINES:
            return False
        self.turn = Turn.NOBODY
        self._sleep(keep_weights=False)
        self._resume(ALL_MEMORY)
        self.turn = Turn.ENGINES
        return self._offload_rollout

    @contextmanager
    def to_nobody(self) -> Iterator[None]:
        """Within, nobody has memory, so that dead engines can start again, and be known before the end of the block;
        afterwards the trainer has it."""
        self._release()
        if self.turn is not Turn.ENGINES:  # in which the trainer sleeps
            self._sleep(keep_weights=False)
        self.turn = Turn.NOBODY
        yield
        self._release()  # of those that have just started
        self._wake()
        self.turn = Turn.TRAINER

    def metrics(self) -> dict[str, float]:
        """Seconds spent since the last call, and memory as the trainer saw it: ``perf/…``."""
        found, self._metrics = self._metrics, {}
        return found

    # -- what a turn is made of --------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._offload_rollout:
            with self._timed("perf/release_engines_time"):
                self._release_engines(ALL_MEMORY)

    def _resume(self, tags: Sequence[str]) -> None:
        if self._offload_rollout:
            with self._timed("perf/resume_engines_time"):
                self._resume_engines(tags)

    def _sleep(self, *, keep_weights: bool) -> None:
        if self._offload_train:
            with self._timed("perf/sleep_time"):
                self._metrics |= self._sleep_trainer(keep_weights)

    def _wake(self) -> None:
        if self._offload_train:
            with self._timed("perf/wake_time"):
                self._metrics |= self._wake_trainer()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
        logger.debug("%s: %.2f s", name, seconds)
