"""Whose turn the GPUs are that trainer and engines share (--colocate with --offload-…): the one
place that knows.

    launch     engines start ─► engines release all ─► trainer starts
    push       trainer frees all but its weights ─► engines take memory for weights ─► push
    generate   trainer frees its weights ─► engines take memory for caches and graphs ─► generate
    train      engines release all ─► trainer takes its memory back ─► train, save
    restart    dead engines start while the others generate, at the latest with the next rollout;
    before the trainer
               takes its memory back they are up, and release all
    no engine  trainer frees all ─► dead engines start and release all ─► trainer takes its memory
    back

At no point does one side take memory before the other has given up what it can do without: the peak
is the larger of the trainer alone, the engines alone, and both copies of the weights with one or
two buckets between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum

from slime import deadlines
from slime.cluster.engine_table import ALL_MEMORY, CACHE, WEIGHTS, EngineEntry, EngineTable
from slime.engines.api import EngineError
from slime.engines.fleet import Body, EngineFleet, answers
from slime.log import get_logger

logger = get_logger(__name__)


class MemoryHolder(Enum):
    """Who has the GPUs' memory."""

    NOBODY = (
        "nobody"  # or both: before the first turn, and since one began that has not come to its end
    )
    TRAINER = "trainer"
    PUSH = "push"  # the trainer its weights, the engines theirs
    ENGINES = "engines"


class GpuMemoryOwner:
    """Moves memory between trainer and engines. Each verb does nothing when things are so already,
    and can be called again when it has failed because an engine died: the others may have done what
    was asked, or not.

    Args:
        release, resume: have all engines give up the tagged memory, or take it back; each engine is
            asked only for what it has not done yet.
        sleep, wake: have the trainer give its memory up (true: all but its weights), or take it
            back; metrics.
        offload_train, offload_rollout: which sides give memory up; where neither does, nobody takes
            turns and no verb does anything.
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
        self._release_engines = release
        self._resume_engines = resume
        self._sleep_trainer = sleep
        self._wake_trainer = wake
        self._offload_train = offload_train
        self._offload_rollout = offload_rollout
        self.taken = offload_train or offload_rollout
        self.turn = MemoryHolder.NOBODY
        self._metrics: dict[str, float] = {}

    def before_trainer(self) -> None:
        """At the launch: the engines make room for a trainer that is yet to be set up."""
        self._release()
        self.turn = MemoryHolder.TRAINER

    def onload_trainer(self) -> None:
        """The engines give up everything, then the trainer takes its memory back."""
        if self.turn is MemoryHolder.TRAINER:
            return
        self.turn = MemoryHolder.NOBODY
        self._release()
        self._wake()
        self.turn = MemoryHolder.TRAINER

    def onload_weights(self) -> None:
        """Both sides have their weights, and nothing that can be done without."""
        if not self.taken or self.turn is MemoryHolder.PUSH:
            return
        assert self.turn is not MemoryHolder.ENGINES, (
            "the trainer pushes what it has trained, before the engines generate"
        )
        self.turn = MemoryHolder.NOBODY
        self._sleep(keep_weights=True)
        self._resume([WEIGHTS])
        self.turn = MemoryHolder.PUSH

    def onload_engines(self) -> bool:
        """The trainer frees everything, then the engines take what they lack; true when they lacked
        something."""
        if self.turn is MemoryHolder.ENGINES:
            return False
        self.turn = MemoryHolder.NOBODY
        self._sleep(keep_weights=False)
        self._resume(ALL_MEMORY)
        self.turn = MemoryHolder.ENGINES
        return self._offload_rollout

    @contextmanager
    def offload_all(self) -> Iterator[None]:
        """Within, nobody has memory, so that dead engines can start again, and be known before the
        end of the block; afterwards the trainer has it."""
        self._release()
        if self.turn is not MemoryHolder.ENGINES:  # in which the trainer sleeps
            self._sleep(keep_weights=False)
        self.turn = MemoryHolder.NOBODY
        yield
        self._release()  # of those that have just started
        self._wake()
        self.turn = MemoryHolder.TRAINER

    def metrics(self) -> dict[str, float]:
        """Seconds spent since the last call, and memory as the trainer saw it: ``perf/…``."""
        found = self._metrics
        self._metrics = {}
        return found

    # -- what a turn is made of
    # --------------------------------------------------------------------------------

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


class EngineMemory:
    """Has engines release memory and take it back. Both verbs ask an engine only for what it has
    not done yet, and raise a `RunFailed` when one died, refused or did not answer; what others have
    done by then is noted in the table.

    Models other than the policy take part in no push: they give and take all at once, with the
    caches.

    Args:
        fleet_of: connections to those of the policy, or the others, that run.
        explained: a context in which errors of engines are worded, told what is being done.
    """

    def __init__(
        self,
        table: EngineTable,
        fleet_of: Callable[[Sequence[EngineEntry]], EngineFleet],
        explained: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._table = table
        self._fleet_of = fleet_of
        self._explained = explained

    def release(self, tags: Sequence[str]) -> None:
        """Have every engine give up what it has of the tagged memory, once it has ended its last
        request."""
        path = "/release_memory_occupation"
        table = self._table
        with self._explained("giving memory up"):
            if todo := table.to_release(table.policy, tags):
                self._end_requests(list(todo))
                self._move(path, table.policy, todo, table.released)
            if CACHE in tags and (todo := table.to_release(table.others, ALL_MEMORY)):
                self._fleet_of(table.others).flush_cache(deadlines.GPU_MEMORY_MEMORY, list(todo))
                self._move(path, table.others, todo, table.released)

    def resume(self, tags: Sequence[str]) -> None:
        """Have every engine take what it lacks of the tagged memory; the contents are those of
        before or none."""
        path = "/resume_memory_occupation"
        table = self._table
        with self._explained("taking memory back"):
            self._move(path, table.policy, table.to_resume(table.policy, tags), table.resumed)
            if CACHE in tags:
                self._move(
                    path, table.others, table.to_resume(table.others, ALL_MEMORY), table.resumed
                )
                paused: dict[str, Body] = {
                    engine.url: {} for engine in table.policy if engine.paused
                }
                self._ask("/continue_generation", table.policy, paused, table.went_on)

    def _end_requests(self, urls: list[str]) -> None:
        policy = self._table.policy
        try:
            self._fleet_of(policy).flush_cache(deadlines.GPU_MEMORY_IDLE, urls)
        except EngineError as error:
            # a rollout that was given up still sends requests; on memory that is gone they would
            # kill the engine
            logger.warning("engines are paused, because they are not idle: %s", error)
            self._table.paused(urls)  # some of them, even if others fail
            self._ask("/pause_generation", policy, {url: {"mode": "abort"} for url in urls})
            self._fleet_of(policy).flush_cache(deadlines.GPU_MEMORY_MEMORY, urls)

    def _move(
        self,
        path: str,
        engines: Sequence[EngineEntry],
        todo: Mapping[str, list[str]],
        note: Callable[[str, list[str]], None],
    ) -> None:
        """Have some of ``engines`` release or take these tags, by URL."""
        bodies: dict[str, Body] = {url: {"tags": tags} for url, tags in todo.items()}
        self._ask(path, engines, bodies, lambda url: note(url, todo[url]))

    def _ask(
        self,
        path: str,
        engines: Sequence[EngineEntry],
        bodies: Mapping[str, Body],
        note: Callable[[str], None] = lambda url: None,
    ) -> None:
        """Some of ``engines``, by URL.

        Args:
            note: called with the URL of each that has done it, before the failure of others is
                raised.
        """
        if not bodies:
            return
        outcomes = self._fleet_of(engines).post_to(path, bodies, deadlines.GPU_MEMORY_MEMORY)
        for url, outcome in outcomes.items():
            if not isinstance(outcome, EngineError):
                note(url)
        answers(list(outcomes.values()))
