"""Run the scheduler on the engine thread, which executes commands of other threads and returns
results in batches."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from slime import deadlines
from slime.embedded.adapters import AdapterTable
from slime.embedded.architecture import Architecture
from slime.embedded.kv_cache import KVCache
from slime.embedded.options import EngineOptions
from slime.embedded.scheduler import Scheduler, StepOutput
from slime.embedded.sequence import Sequence
from slime.embedded.weights import WeightError, WeightStore, make_store
from slime.errors import UserError
from slime.log import get_logger
from slime.processes.host import free_host_memory

logger = get_logger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
Deliver = Callable[[StepOutput], None]
T = TypeVar("T")

_RATE_WINDOW = 5.0


class EngineDead(Exception):
    """The engine thread ended with an error; it cannot generate any more."""


class Engine:
    """Owns model, cache and scheduler, which only its thread uses.

    Construct (loads the model), `start`, then from any thread: `submit`, `abort`, `call`, `pause`,
    `resume`, `stop`.

    Args:
        deliver: called on the engine thread with every step's output.
    """

    def __init__(self, options: EngineOptions, deliver: Deliver) -> None:
        self.options = options
        self.device = _device(options.device)
        self.arch = Architecture.from_dir(options.model_path, options.enable_multimodal)
        if options.enable_return_routed_experts and self.arch.experts is None:
            raise UserError(
                f"{options.model_path} has no layers of experts",
                why="--enable-return-routed-experts was given (slime passes it with "
                "--use-rollout-routing-replay)",
                fix="leave the flag out",
            )
        longest = self.arch.context_length
        self.max_length = min(options.max_context_len or longest, longest)
        self.store = load_store(options, self.arch, self.device, self.max_length)
        self.adapters = load_adapters(options, self.store)
        kv_bytes = _kv_budget(options.kv_cache_gb, self.device)
        self.cache = KVCache(
            self.arch,
            self.store.dtype,
            self.device,
            options.max_slots,
            kv_bytes,
            whole_rings=options.deterministic,
        )
        self.scheduler = Scheduler(
            self.store,
            self.cache,
            options.prefill_tokens,
            options.deterministic,
            options.enable_return_routed_experts,
        )
        self.paused: PauseMode | None = None
        self.released: set[str] = set()
        self.death: BaseException | None = None
        self.on_death: Callable[[], object] = lambda: None
        self.last_step = time.monotonic()
        self._deliver = deliver
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._rate: collections.deque[tuple[float, int]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = deadlines.EMBEDDED_ENGINE_STOP) -> None:
        """End the thread after the current step."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def check_alive(self) -> None:
        """Raise `EngineDead` if the engine thread has ended."""
        if self.death is not None:
            raise EngineDead(f"the engine stopped: {type(self.death).__name__}: {self.death}")

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences.

        Raises:
            EngineDead: the engine thread has ended.
        """
        self._post(lambda: self.scheduler.submit(sequences))

    def abort(
        self, matches: Callable[[Sequence], bool], message: str = "Aborted by AbortReq."
    ) -> None:
        """End every matching sequence with its current tokens."""

        def run() -> None:
            self.scheduler.abort([s for s in self.scheduler.everything() if matches(s)], message)

        self._post(run)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # raised in the caller's thread
                future.set_exception(error)

        self._post(run)
        return future

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop stepping. New requests wait.

        "abort" ends all sequences; "retract" returns them to the queue, to be prefilled again with
        their tokens; "in_place" keeps their keys and values.
        """

        def run() -> None:
            if mode == "abort":
                self.scheduler.abort(self.scheduler.everything(), "Aborted by pause_generation.")
            elif mode == "retract":
                self.scheduler.retract_all()
            self.paused = mode

        return self.call(run)

    def resume(self) -> Future[None]:
        def run() -> None:
            self.paused = None

        return self.call(run)

    def throughput(self) -> float:
        """Return the decoded tokens per second over the last seconds."""
        now = time.monotonic()
        recent = [(at, count) for at, count in list(self._rate) if now - at <= _RATE_WINDOW]
        return sum(count for _, count in recent) / _RATE_WINDOW

    # -- the thread --------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        self.check_alive()
        self._inbox.append(command)
        self._wake.set()

    def _run(self) -> None:
        if self.options.num_threads:
            # OpenMP has a separate setting per thread
            torch.set_num_threads(self.options.num_threads)
        try:
            while not self._stopping:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                if self.paused or not self.scheduler.has_work:
                    self._deliver_finished()
                    if not self._inbox:
                        self._wake.wait(deadlines.EMBEDDED_ENGINE_WAKE)
                    continue
                self._step()
        except BaseException as error:
            self.death = error
            logger.exception("the engine thread failed")
            self._fail_everything(error)
            self.on_death()

    def _step(self) -> None:
        before = self.scheduler.counters.decoded_tokens
        output = self.scheduler.step()
        self.last_step = time.monotonic()
        self._rate.append((self.last_step, self.scheduler.counters.decoded_tokens - before))
        while self._rate and self.last_step - self._rate[0][0] > _RATE_WINDOW:
            self._rate.popleft()
        if output.finished or output.progressed:
            self._deliver(output)

    def _deliver_finished(self) -> None:
        finished = self.scheduler.take_finished()
        if finished:
            self._deliver(StepOutput(finished=finished))

    def _fail_everything(self, error: BaseException) -> None:
        failed = self.scheduler.everything()
        for sequence in failed:
            sequence.abort(f"the engine failed: {type(error).__name__}: {error}")
        self._deliver(StepOutput(finished=[*self.scheduler.take_finished(), *failed]))


class Hub:
    """Sequences in flight and their waiting tasks. Lives on the event loop; the engine thread calls
    `deliver`.

    Each engine step wakes the loop at most once, however many sequences it ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._finished: dict[Sequence, asyncio.Future[None]] = {}
        self._progress: dict[Sequence, asyncio.Event] = {}

    def deliver(self, output: StepOutput) -> None:
        """Pass a step's results to the loop; called by the engine thread."""
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: StepOutput) -> None:
        for sequence in output.progressed:
            if sequence in self._progress:
                self._progress[sequence].set()
        for sequence in output.finished:
            future = self._finished.get(sequence)
            if future is not None and not future.done():
                future.set_result(None)
            if sequence in self._progress:
                self._progress[sequence].set()

    @property
    def in_flight(self) -> list[Sequence]:
        return list(self._finished)

    async def run(self, engine: Engine, sequences: list[Sequence]) -> None:
        """Submit sequences and wait until all are finished; abort them if the waiting task is
        cancelled."""
        try:
            await asyncio.gather(*self._submit(engine, sequences))
        except asyncio.CancelledError:
            self._abandon(engine, sequences)
            raise
        finally:
            self._forget(sequences)

    async def stream(
        self, engine: Engine, sequences: list[Sequence]
    ) -> AsyncIterator[tuple[int, bool]]:
        """Yield (index, finished) whenever a sequence has one or more new tokens, or has ended."""
        wake = asyncio.Event()
        for sequence in sequences:
            self._progress[sequence] = wake
        shown = [0] * len(sequences)
        open_ones = set(range(len(sequences)))
        try:
            futures = self._submit(engine, sequences)
            while open_ones:
                await wake.wait()
                wake.clear()
                for index in sorted(open_ones):
                    ended = futures[index].done()
                    count = len(sequences[index].output_ids)
                    if ended or count > shown[index]:
                        shown[index] = count
                        if ended:
                            open_ones.discard(index)
                        yield index, ended
        finally:
            self._forget(sequences)
            if open_ones:
                self._abandon(engine, [sequences[index] for index in open_ones])

    def _submit(self, engine: Engine, sequences: list[Sequence]) -> list[asyncio.Future[None]]:
        futures = []
        for sequence in sequences:
            self._finished[sequence] = self._loop.create_future()
            futures.append(self._finished[sequence])
        engine.submit(sequences)
        return futures

    def _abandon(self, engine: Engine, sequences: list[Sequence]) -> None:
        chosen = set(sequences)
        engine.abort(lambda sequence: sequence in chosen, "the client went away")

    def _forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._finished.pop(sequence, None)
            self._progress.pop(sequence, None)


def load_store(
    options: EngineOptions, arch: Architecture, device: torch.device, max_length: int
) -> WeightStore:
    begin = time.monotonic()
    store = make_store(
        options.model_path, arch, options.dtype, device, max_length, options.deterministic
    )
    logger.info(
        "%s: %.0f M parameters in %s on %s, loaded in %.1f s",
        Path(options.model_path).name,
        sum(tensor.numel() for tensor in store.named.values()) / 1e6,
        str(store.dtype).removeprefix("torch."),
        device,
        time.monotonic() - begin,
    )
    return store


def load_adapters(options: EngineOptions, store: WeightStore) -> AdapterTable:
    """Load the adapters of the command line.

    Raises:
        UserError: an adapter cannot be loaded.
    """
    adapters = AdapterTable(
        store,
        enabled=options.enable_lora or bool(options.lora_paths),
        max_rank=options.max_lora_rank,
        max_loaded=options.max_loaded_loras,
    )
    for name, path in options.lora_paths:
        try:
            adapters.load_directory(name, path, pinned=True)
        except WeightError as error:
            raise UserError(
                f"--lora-paths {name}={path} cannot be loaded", why=str(error)
            ) from error
    return adapters


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _kv_budget(gigabytes: float | None, device: torch.device) -> int:
    """Return the bytes for keys and values: the given size, else half of the free memory of this
    host or container, or 80 % of the free GPU memory."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.8)
    return int(free_host_memory() / 2)


def describe_adapters(engine: Engine) -> list[dict[str, Any]]:
    """Report the adapters in memory, for ``/server_info``; call it on the engine's thread."""
    loaded = engine.adapters.loaded
    users = [sequence.adapter for sequence in engine.scheduler.everything()]
    return [
        {
            "lora_name": adapter.name,
            "lora_path": adapter.path,
            "loaded": loaded.get(adapter.name) is adapter,
            "pinned": adapter.pinned,
            "rank": adapter.form.rank,
            "scaling": adapter.form.scale,
            "weight_version": adapter.version,
            "num_tensors": len(adapter.names),
            "bytes": adapter.nbytes,
            "num_requests": users.count(adapter),
        }
        for adapter in engine.adapters.resident
    ]


def load_report(engine: Engine) -> dict[str, Any]:
    """Report an engine's load with the field names of SGLang's ``/v1/loads``; call it on the
    engine's thread."""
    scheduler = engine.scheduler
    cache = engine.cache
    running = scheduler.num_active
    waiting = len(scheduler.waiting)
    used = sum(sequence.length for sequence in scheduler.prefilling) + scheduler.num_running_tokens
    counters = scheduler.counters
    total = max(1, cache.max_slots * engine.max_length)
    cached = counters.cached_tokens / max(1, counters.cached_tokens + counters.prefilled_tokens)
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + sum(sequence.length for sequence in scheduler.waiting),
        "max_total_num_tokens": total,
        "max_running_requests": cache.max_slots,
        "token_usage": round(used / total, 4),
        "gen_throughput": round(engine.throughput(), 2),
        "cache_hit_rate": round(cached, 4),
        "utilization": round(running / cache.max_slots, 4),
    }
