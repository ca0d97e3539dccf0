"""The owner of the GPU memory that trainer and engines share (--colocate with --offload-…).

    launch     engines start ─► engines release all ─► trainer starts
    push       trainer frees all but its weights ─► engines take memory for weights ─► push
    generate   trainer frees its weights ─► engines take memory for caches and graphs ─► generate
    train      engines release all ─► trainer takes its memory back ─► train, save
    restart    dead engines start while the others generate, at the latest with the next rollout;
               they are up, and release all, before the trainer takes its memory back
    no engine  trainer frees all ─► dead engines start and release all ─► trainer takes its memory
               back

Neither side takes memory before the other has released everything that it does not need. So the
peak is the maximum of: the trainer alone, the engines alone, and both copies of the weights plus
one or two buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from slime import deadlines
from slime.cluster.engine_table import ALL_MEMORY, CACHE, GRAPHS, WEIGHTS, EngineEntry, EngineTable
from slime.engines.api import EngineError
from slime.engines.fleet import Body, EngineFleet, checked_answers
from slime.log import get_logger

logger = get_logger(__name__)


class MemoryHolder(Enum):
    """The side that holds the GPUs' memory."""

    NOBODY = "nobody"  # or unknown: before the first hand-over, and after one that failed
    TRAINER = "trainer"
    PUSH = "push"  # both sides hold their weights only
    ENGINES = "engines"


@dataclass(eq=False)
class GpuMemoryOwner:
    """Moves GPU memory between trainer and engines.

    Each method does nothing if the memory is already there. It can be repeated after the death of
    an engine made it fail, even if other engines had already moved their memory.

    Args:
        release, resume: make all engines release or take back the tagged memory; engines that have
            already done so are skipped.
        sleep, wake: make the trainer release its memory (true: all except its weights) or take it
            back; both return metrics.
        offload_train, offload_rollout: which sides release memory; without either, no method does
            anything.
        offload_weights: the engines release their weights, too.

    Attributes:
        is_shared: at least one side releases memory for the other.
        holder: the side that holds the memory now.
    """

    release_engines: Callable[[Sequence[str]], None]
    resume_engines: Callable[[Sequence[str]], None]
    sleep_trainer: Callable[[bool], dict[str, float]]
    wake_trainer: Callable[[], dict[str, float]]
    _: KW_ONLY
    offload_train: bool
    offload_rollout: bool
    offload_weights: bool = True

    def __post_init__(self) -> None:
        self._released = ALL_MEMORY if self.offload_weights else (CACHE, GRAPHS)
        self.is_shared = self.offload_train or self.offload_rollout
        self.holder = MemoryHolder.NOBODY
        self._metrics: dict[str, float] = {}

    def release_for_launch(self) -> None:
        """Make the engines release all memory, before the trainer is set up."""
        self._release()
        self.holder = MemoryHolder.TRAINER

    def onload_trainer(self) -> None:
        """Release all engine memory, then give the trainer its memory back."""
        if self.holder is MemoryHolder.TRAINER:
            return
        self.holder = MemoryHolder.NOBODY
        self._release()
        self._wake()
        self.holder = MemoryHolder.TRAINER

    def onload_weights(self) -> None:
        """Leave both sides with only their weights, for a push."""
        if not self.is_shared or self.holder is MemoryHolder.PUSH:
            return
        assert self.holder is not MemoryHolder.ENGINES, (
            "the trainer pushes what it has trained, before the engines generate"
        )
        self.holder = MemoryHolder.NOBODY
        self._sleep(keep_weights=True)
        self._resume([WEIGHTS])
        self.holder = MemoryHolder.PUSH

    def onload_engines(self) -> bool:
        """Release all trainer memory, then give the engines the memory that they lack.

        Returns:
            Whether the engines lacked memory.
        """
        if self.holder is MemoryHolder.ENGINES:
            return False
        self.holder = MemoryHolder.NOBODY
        self._sleep(keep_weights=False)
        self._resume(ALL_MEMORY)
        self.holder = MemoryHolder.ENGINES
        return self.offload_rollout

    @contextmanager
    def offload_all(self) -> Iterator[None]:
        """Release all memory within the block, so that dead engines can start there.

        Afterwards the trainer has the memory.
        """
        self._release()
        if self.holder is not MemoryHolder.ENGINES:  # otherwise the trainer already sleeps
            self._sleep(keep_weights=False)
        self.holder = MemoryHolder.NOBODY
        yield
        self._release()  # memory of the engines that have just started
        self._wake()
        self.holder = MemoryHolder.TRAINER

    def metrics(self) -> dict[str, float]:
        """Return the seconds spent since the last call, and the trainer's memory: ``perf/…``."""
        found = self._metrics
        self._metrics = {}
        return found

    # -- steps of a hand-over ----------------------------------------------------------------------

    def _release(self) -> None:
        if self.offload_rollout:
            with self._timed("perf/release_engines_time"):
                self.release_engines(self._released)

    def _resume(self, tags: Sequence[str]) -> None:
        if self.offload_rollout:
            with self._timed("perf/resume_engines_time"):
                self.resume_engines(tags)

    def _sleep(self, *, keep_weights: bool) -> None:
        if self.offload_train:
            with self._timed("perf/sleep_time"):
                self._metrics |= self.sleep_trainer(keep_weights)

    def _wake(self) -> None:
        if self.offload_train:
            with self._timed("perf/wake_time"):
                self._metrics |= self.wake_trainer()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
        logger.debug("%s: %.2f s", name, seconds)


@dataclass(eq=False)
class EngineMemory:
    """Makes engines release memory and take it back.

    Both methods skip what an engine has already done. They raise `RunFailed` if an engine died,
    refused or did not answer; the table records what the others have done until then.

    Engines of other models get no pushes: they move all their memory at once, together with the
    policy's caches.

    Args:
        fleet_of: returns connections to `EngineTable.policy` or `others`.
        explain_failures: `Engines.explain_failures`.
    """

    table: EngineTable
    fleet_of: Callable[[Sequence[EngineEntry]], EngineFleet]
    explain_failures: Callable[[str], AbstractContextManager[None]]

    def release(self, tags: Sequence[str]) -> None:
        """Make every engine finish its last requests, then release the tagged memory."""
        path = "/release_memory_occupation"
        table = self.table
        with self.explain_failures("giving memory up"):
            if todo := table.to_release(table.policy, tags):
                self._end_requests(list(todo))
                self._move(path, table.policy, todo, table.mark_released)
            if CACHE in tags and (todo := table.to_release(table.others, ALL_MEMORY)):
                self.fleet_of(table.others).flush_cache(deadlines.GPU_MEMORY_MOVE, list(todo))
                self._move(path, table.others, todo, table.mark_released)

    def resume(self, tags: Sequence[str]) -> None:
        """Make every engine take back the tagged memory, and continue paused generation."""
        path = "/resume_memory_occupation"
        table = self.table
        with self.explain_failures("taking memory back"):
            self._move(path, table.policy, table.to_resume(table.policy, tags), table.mark_resumed)
            if CACHE in tags:
                self._move(
                    path,
                    table.others,
                    table.to_resume(table.others, ALL_MEMORY),
                    table.mark_resumed,
                )
                paused: dict[str, Body] = {
                    engine.url: {} for engine in table.policy if engine.paused
                }
                self._ask("/continue_generation", table.policy, paused, table.mark_continued)

    def _end_requests(self, urls: list[str]) -> None:
        policy = self.table.policy
        try:
            self.fleet_of(policy).flush_cache(deadlines.GPU_MEMORY_IDLE, urls)
        except EngineError as error:
            # an abandoned rollout still sends requests, which would kill an engine without memory
            logger.warning("engines are paused, because they are not idle: %s", error)
            self.table.mark_paused(urls)  # before the call: it may fail for some of them
            self._ask("/pause_generation", policy, {url: {"mode": "abort"} for url in urls})
            self.fleet_of(policy).flush_cache(deadlines.GPU_MEMORY_MOVE, urls)

    def _move(
        self,
        path: str,
        engines: Sequence[EngineEntry],
        todo: Mapping[str, list[str]],
        note: Callable[[str, list[str]], None],
    ) -> None:
        bodies: dict[str, Body] = {url: {"tags": tags} for url, tags in todo.items()}
        self._ask(path, engines, bodies, lambda url: note(url, todo[url]))

    def _ask(
        self,
        path: str,
        engines: Sequence[EngineEntry],
        bodies: Mapping[str, Body],
        note: Callable[[str], None] = lambda url: None,
    ) -> None:
        """Post to some of ``engines``; call ``note`` for each success, then raise a failure."""
        if not bodies:
            return
        outcomes = self.fleet_of(engines).post_to(path, bodies, deadlines.GPU_MEMORY_MOVE)
        for url, outcome in outcomes.items():
            if not isinstance(outcome, EngineError):
                note(url)
        checked_answers(list(outcomes.values()))
