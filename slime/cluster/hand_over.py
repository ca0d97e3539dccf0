"""Trainer and engines take turns with the memory of the GPUs they share (--colocate with --offload-…).

    launch     engines start ─► engines release all ─► trainer starts
    push       trainer frees all but its weights ─► engines take memory for weights ─► push
    generate   trainer frees its weights ─► engines take memory for caches and graphs ─► generate
    train      engines release all ─► trainer takes its memory back ─► train, save

At no point does one side take memory before the other has given up what it can do without: the peak is the larger of
the trainer alone, the engines alone, and both copies of the weights with one or two buckets between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from slime.log import get_logger

logger = get_logger(__name__)

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"


class Engines(Protocol):
    """Each verb asks only those engines that have not done it yet, so that one that failed can be tried again."""

    def release_memory(self, tags: list[str]) -> None: ...
    def resume_memory(self, tags: list[str]) -> None: ...


#: Calls a method of every trainer rank (`sleep`, `wake`) and returns their answers.
CallTrainers = Callable[..., list[Any]]


class Holder(Enum):
    """Who has the GPUs' memory."""

    BOTH = "both"  # before the first turn, or since one began that has not come to its end
    TRAINER = "trainer"
    PUSH = "push"  # the trainer its weights, the engines theirs
    ENGINES = "engines"


class HandOver:
    """Moves memory between trainer and engines; each verb does nothing when things are so already, and can be called
    again when it has failed because an engine died: the others may have done what was asked, or not.

    Args:
        engines: None while there are none.
        call_trainers: None where there is no trainer.
        offload_train, offload_rollout: which sides give memory up.
    """

    def __init__(
        self, engines: Engines, call_trainers: CallTrainers | None, *, offload_train: bool, offload_rollout: bool
    ) -> None:
        self._engines, self._call_trainers = engines, call_trainers
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self.holder = Holder.BOTH
        self._seconds: dict[str, float] = {}
        self._trainer_metrics: dict[str, float] = {}
        self._held, self._absent = {WEIGHTS, CACHE, GRAPHS}, set[str]()
        """Tags of which some engine may have the memory, and which some engine may have released. In both are those
        of a request that has failed."""

    def to_trainer(self) -> None:
        """The engines give up everything, then the trainer takes its memory back."""
        if self.holder is Holder.TRAINER:
            return
        self.holder = Holder.BOTH
        self._release()
        with self._timed("perf/wake_time"):
            self._trainers("wake")
        self.holder = Holder.TRAINER

    def before_trainer(self) -> None:
        """At the launch: the engines make room for a trainer that is yet to be set up."""
        self._release()
        self.holder = Holder.TRAINER

    def to_push(self) -> None:
        """Both sides have their weights, and nothing that can be done without."""
        if self.holder in (Holder.PUSH, Holder.ENGINES):
            assert self.holder is Holder.PUSH, "the trainer pushes what it has trained, before the engines generate"
            return
        self.holder = Holder.BOTH
        with self._timed("perf/sleep_time"):
            self._trainers("sleep", True)
        self._resume([WEIGHTS])
        self.holder = Holder.PUSH

    def to_engines(self) -> bool:
        """The trainer frees everything, then the engines take what they lack; true when there was something."""
        if self.holder is Holder.ENGINES:
            return False
        self.holder = Holder.BOTH
        with self._timed("perf/sleep_time"):
            self._trainers("sleep", False)
        lacking = bool(self._absent)
        self._resume([WEIGHTS, CACHE, GRAPHS])
        self.holder = Holder.ENGINES
        return lacking

    @contextmanager
    def restarting(self, release_fresh: Callable[[list[str]], None]) -> Iterator[None]:
        """Within, nobody has memory, so that dead engines can start again; afterwards the trainer has it.

        Args:
            release_fresh: has the engines that were started within, which hold all their memory, release these tags.
        """
        self._release()
        if self.holder is not Holder.ENGINES:
            with self._timed("perf/sleep_time"):
                self._trainers("sleep", False)
        self.holder = Holder.ENGINES
        yield
        if self._absent:
            release_fresh(sorted(self._absent))
        with self._timed("perf/wake_time"):
            self._trainers("wake")
        self.holder = Holder.TRAINER

    def metrics(self) -> dict[str, float]:
        """Seconds spent since the last call, and memory as the trainer saw it: ``perf/…``."""
        found = self._seconds | self._trainer_metrics
        self._seconds, self._trainer_metrics = {}, {}
        return found

    def _release(self) -> None:
        tags = [tag for tag in (CACHE, WEIGHTS, GRAPHS) if tag in self._held]
        if self._offload_rollout and tags:
            self._absent |= set(tags)
            with self._timed("perf/release_engines_time"):
                self._engines.release_memory(tags)
            self._held -= set(tags)

    def _resume(self, wanted: list[str]) -> None:
        tags = [tag for tag in wanted if tag in self._absent]
        if tags:
            self._held |= set(tags)
            with self._timed("perf/resume_engines_time"):
                self._engines.resume_memory(tags)
            self._absent -= set(tags)

    def _trainers(self, method: str, *args: Any) -> None:
        if self._offload_train and self._call_trainers is not None:
            for answer in self._call_trainers(method, *args, what="handing memory over")[:1]:
                self._trainer_metrics |= answer or {}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
        logger.debug("%s: %.2f s", name, time.perf_counter() - started)
