"""The rollout's HTTP client: every request goes through it, to the router or straight to an engine.

    generate function ──► RolloutClient ──► router ──► engine
        slots      at most concurrency × engines samples at once
        retries    lost connections and 5xx, with backoff, until ``retry_seconds`` have passed;
                   about once per second while any engine serves
        deadline   one for each request, retries included
        abort      everything on every engine; requests made meanwhile come back as aborted
        fork       a second client with requests of its own, for what runs at the same time

A request may be sent again after a failure: its only effect is its answer, and in deterministic
mode its seed makes the answer the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime import deadlines
from slime.engines.adapters import ADAPTER_FIELD, GENERATING, with_version
from slime.engines.api import LOADS_PATH, TRANSIENT, EngineClient, EngineError, GenerateResult
from slime.engines.request_fields import SamplingParams
from slime.engines.router import ROUTING_KEY_HEADER, RouterWorker, list_workers
from slime.log import get_logger

logger = get_logger(__name__)

_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
#: The longest wait while any engine is healthy, so that requests of a dead engine soon go to
#: another one after the router has removed it.
_LONGEST_WHILE_SERVED = 1.0
_FIRST_POLL = 0.02
_LONGEST_POLL = 1.0
#: Fields of a request that sglang-router 0.3.2 drops, because it parses requests into a fixed form.
_NOT_FORWARDED = ("return_routed_experts", "routed_experts_start_len", "return_sampling_mask")
#: Sampling parameters that it forwards. It drops all others, so requests with others go straight to
#: an engine, which refuses unknown ones.
_FORWARDED_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)} - {
    "logit_bias"
} | {
    *("regex", "json_schema", "ebnf"),
}


def loses_fields(body: dict[str, Any]) -> bool:
    """Tell whether the router would drop a field of a request to ``/generate``."""
    params = body.get("sampling_params")
    names = params.keys() if isinstance(params, dict) else set()
    return any(body.get(name) for name in _NOT_FORWARDED) or not names <= _FORWARDED_PARAMS


class RequestRefused(EngineError):
    """The engine understood the request and refused it (HTTP 4xx): sending it again would not
    help."""


@dataclass
class InFlight:
    """A request that waits for its answer; what the watchdog reports."""

    name: str
    started: float
    num_input_tokens: int = 0
    attempt: int = 1
    #: The engine that it was sent to; empty where the router chooses.
    url: str = ""
    #: Whether an abort ends it: true for the policy's engines, false for judges and tools.
    ends_with_rollout: bool = True
    #: Name of the adapter that the last attempt requested; "" for the base.
    adapter: str = ""


class RequestSlots(asyncio.Semaphore):
    """A semaphore whose number of slots follows the number of engines; shrinking does not wait."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
        self._owed = 0

    async def resize(self, size: int) -> None:
        """Change the number of slots. Surplus slots in use disappear when they are released."""
        self._owed += self.size - size
        self.size = size
        while self._owed > 0 and not self.locked():
            self._owed -= 1
            await super().acquire()  # at once
        while self._owed < 0:
            self._owed += 1
            super().release()

    def release(self) -> None:
        if self._owed > 0:
            self._owed -= 1
        else:
            super().release()


@dataclass
class SharedState:
    """What all forks of a client share.

    Attributes:
        adapter: the adapter that requests for the policy name; "" if the policy is none.
        has_engine: whether the router lists a healthy engine, as it said at ``asked_at``.
    """

    adapter: str = ""
    has_engine: bool = True
    asked_at: float = -math.inf


@dataclass
class ClientCounters:
    """Counts since the last `take`."""

    requests: int = 0
    retries: int = 0

    def take(self) -> dict[str, int]:
        """Return the counts and reset them."""
        taken = {"requests": self.requests, "retries": self.retries}
        self.requests = self.retries = 0
        return taken


class BusyClock:
    """Measures the share of time with at least one running request, over all clients that share the
    clock.

    Args:
        clock: seconds.

    Example:
        >>> seconds = iter([0, 2, 5, 10])
        >>> busy = BusyClock(clock=lambda: next(seconds))     # at 0 s
        >>> busy.began(); busy.ended()                        # from 2 s to 5 s
        >>> busy.take_idle_ratio()                            # at 10 s
        0.7
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._busy = 0.0
        self._taken = self._since = clock()

    def began(self) -> None:
        self._turn()
        self._count += 1

    def ended(self) -> None:
        self._turn()
        self._count -= 1

    def _turn(self) -> None:
        now = self._clock()
        self._busy += (now - self._since) * (self._count > 0)
        self._since = now

    def take_idle_ratio(self) -> float:
        """Share of the time without a running request, since the last call or the beginning."""
        self._turn()
        seconds = self._since - self._taken
        busy = self._busy
        self._taken = self._since
        self._busy = 0.0
        return max(0.0, 1.0 - busy / seconds) if seconds > 0 else 0.0


class RolloutClient:
    """Use as ``async with RolloutClient(url, max_concurrency=512) as client``, on one event loop.

    Args:
        base_url: the router (or a single engine).
        max_concurrency: samples generated at once per engine behind the router; each sample holds
            one of `slots` meanwhile.
        request_timeout: seconds until a request is given up, including retries.
        retry_seconds: seconds after its first failure during which a request is retried.
        send_routing_key: pass the session id in the header that the router's ``manual`` policy
            reads.
        engine_urls: known URLs of the engines behind the router; if empty, one engine is assumed.

    Attributes:
        in_flight: requests waiting for an answer, oldest first.
        busy: measures how busy the policy's engines are, by requests of this client and all its
            forks.
        last_progress: `time.monotonic` of the last answer.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_concurrency: int,
        request_timeout: float = 14400.0,
        retry_seconds: float = 120.0,
        send_routing_key: bool = False,
        engine_urls: Iterable[str] = (),
    ) -> None:
        self.base_url = base_url.rstrip("/")
        urls = set(engine_urls)
        self.slots = RequestSlots(max_concurrency * max(1, len(urls)))
        self.max_concurrency = max_concurrency
        self.request_timeout = request_timeout
        self.retry_seconds = retry_seconds
        self.send_routing_key = send_routing_key
        self.counters = ClientCounters()
        self.busy = BusyClock()
        self.in_flight: dict[int, InFlight] = {}
        self.last_progress = time.monotonic()
        self._aborting = asyncio.Event()
        self._on_abort: set[Callable[[], object]] = set()
        self._engines: dict[str, EngineClient] = {}
        #: URLs of the router, and of the engines that it has named so far.
        self._policy_urls = {self.base_url, *urls}
        self._next_key = 0
        self._shared = SharedState()
        #: The first client and all its forks.
        self._forks = [self]

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()

    @contextlib.contextmanager
    def fork(self, *, own_slots: bool = False) -> Iterator[RolloutClient]:
        """Yield a client for a concurrent rollout, with separate counters, requests and aborts.

        Engines can only abort all requests, so an abort also aborts the requests of other forks;
        their senders continue them (`slime.rollout.generate`).

        Args:
            own_slots: give it the same number of separate slots, so it does not queue behind other
                samples.
        """
        client = copy.copy(self)
        client.counters = ClientCounters()
        client.in_flight = {}
        client._aborting = asyncio.Event()
        client._on_abort = set()
        client.last_progress = time.monotonic()
        if own_slots:
            client.slots = RequestSlots(self.slots.size)
        self._forks.append(client)
        try:
            yield client
        finally:
            self._forks.remove(client)

    async def engine(self, url: str = "") -> EngineClient:
        """Return the shared connection pool of one base URL (default: the router's)."""
        url = url or self.base_url
        if url not in self._engines:
            self._engines[url] = await EngineClient(url, timeout=self.request_timeout).__aenter__()
        return self._engines[url]

    async def _workers(self) -> list[RouterWorker]:
        workers = await list_workers(await self.engine())
        self._policy_urls.update(worker.url for worker in workers)
        if workers:  # engines join and leave; keep the slots while there is none
            for slots in {client.slots for client in self._forks}:
                await slots.resize(self.max_concurrency * len(workers))
        return workers

    # -- adapters ----------------------------------------------------------------------------------

    async def use_adapter(self, name: str, *, cut: bool) -> None:
        """Make all requests from now on, including retries, name this adapter.

        Args:
            cut: abort requests for older adapters, so that their senders continue with this one;
                else they end with their first adapter.
        """
        self._shared.adapter = name
        if cut and self.adapters_in_use() - {name}:
            workers = await self._workers_or_known()
            for (_, problem), worker in zip(
                await asyncio.gather(*(self._abort_worker(worker) for worker in workers)), workers
            ):
                if problem:
                    logger.warning("%s still uses an older adapter: %s", worker.url, problem)

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that running requests use."""
        requests = (one for client in self._forks for one in client.in_flight.values())
        return {request.adapter for request in requests if request.adapter}

    def _adapter_for(self, path: str, body: dict[str, Any], request: InFlight) -> str:
        """Return the adapter to add to a request; "" for none, or if the request names one
        itself."""
        if not request.ends_with_rollout or path not in GENERATING or ADAPTER_FIELD in body:
            return ""
        return self._shared.adapter

    # -- requests ----------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        rid: str = "",
        routing_key: str = "",
        **extra: Any,
    ) -> GenerateResult:
        """Generate tokens from tokens; return an empty "abort" result during an abort.

        Args:
            rid: names the request on the engine; retries get ``-r1``, ``-r2``, … appended, because
                the engine may still hold the first one.
            routing_key: the session, for policies with affinity.
            extra: further fields of the request body. If the router would drop a field or sampling
                parameter, the request goes straight to the engine with the fewest of our requests.
        Raises:
            RequestRefused: HTTP 4xx; carries the engine's message.
            EngineError: all retries failed, or there was no answer within the deadline.
        """
        body = {
            "input_ids": input_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
            **extra,
        }
        if rid:
            body["rid"] = rid
        headers = (
            {ROUTING_KEY_HEADER: routing_key} if routing_key and self.send_routing_key else None
        )
        answer = await self.post(
            "/generate",
            body,
            headers=headers,
            name=rid,
            num_input_tokens=len(input_ids),
            past_router=loses_fields(body),
        )
        if answer is None:
            meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 0}
            return GenerateResult([], [], "", "abort", meta)
        return GenerateResult.from_json(answer)

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        url: str = "",
        headers: dict[str, str] | None = None,
        name: str = "",
        num_input_tokens: int = 0,
        retry: bool = True,
        past_router: bool = False,
    ) -> dict[str, Any] | None:
        """Send a POST with retries, counted as in flight; None if an abort kept it from being sent.

        Args:
            url: the server, instead of the router. An abort only affects the router and the engines
                behind it.
            past_router: choose an engine here for each attempt.
        """
        ends_with_rollout = not url or url in self._policy_urls
        request = InFlight(
            name or path, time.monotonic(), num_input_tokens, ends_with_rollout=ends_with_rollout
        )
        end = request.started + self.request_timeout
        first_failure: float | None = None
        backoff = _FIRST_BACKOFF
        with self._tracked(request):
            while not (ends_with_rollout and self._aborting.is_set()):
                if request.attempt > 1 and name:
                    body = {**body, "rid": f"{name}-r{request.attempt - 1}"}
                adapter = self._adapter_for(path, body, request)
                request.adapter = adapter or str(body.get(ADAPTER_FIELD) or "")
                sent = {**body, ADAPTER_FIELD: adapter} if adapter else body
                try:
                    if past_router:
                        request.url = await self._least_busy(request)
                    engine = await self.engine(request.url or url)
                    left = max(0.001, end - time.monotonic())
                    answer = await engine.request("POST", path, sent, timeout=left, headers=headers)
                    return with_version(answer, adapter) if adapter else answer
                except EngineError as error:
                    status = error.status
                    if status is not None and 400 <= status < 500 and status not in TRANSIENT:
                        if adapter != self._adapter_for(path, body, request):
                            request.attempt += 1
                            continue  # a restarted engine has only the newest adapter
                        raise RequestRefused(error.url, error.what, error.status) from error
                    first_failure = first_failure or time.monotonic()
                    give_up = min(end, first_failure + self.retry_seconds * retry)
                    if time.monotonic() + backoff > give_up:
                        said = f"{error.what} (given up after {request.attempt} attempts)"
                        raise EngineError(error.url, said, error.status) from error
                    logger.debug("%s: attempt %d failed: %s", request.name, request.attempt, error)
                self.counters.retries += 1
                request.attempt += 1
                sleep = self._sleep_unless_aborting if ends_with_rollout else asyncio.sleep
                if (
                    backoff > _LONGEST_WHILE_SERVED
                    and ends_with_rollout
                    and await self._some_engine_serves()
                ):
                    backoff = _LONGEST_WHILE_SERVED
                await sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
            return None

    async def _some_engine_serves(self) -> bool:
        """Tell whether the router lists a healthy engine, asked at intervals; true if the router
        does not answer, because it may return at any moment."""
        shared = self._shared
        now = time.monotonic()
        if now - shared.asked_at >= deadlines.CLIENT_WORKERS:
            shared.asked_at = now
            try:
                async with asyncio.timeout(deadlines.CLIENT_WORKERS):
                    shared.has_engine = any(worker.healthy for worker in await self._workers())
            except (EngineError, TimeoutError):
                shared.has_engine = True
        return shared.has_engine

    async def _least_busy(self, request: InFlight) -> str:
        """Return the URL of the healthy engine with the fewest of our other requests.

        Raises:
            EngineError: the router does not answer, or has no healthy engine.
        """
        workers = await self._workers()
        counts = {worker.url: 0 for worker in workers if worker.healthy}
        if not counts:
            raise EngineError(self.base_url, "the router has no healthy engine", 503)
        for other in (other for client in self._forks for other in client.in_flight.values()):
            if other is not request and other.url in counts:
                counts[other.url] += 1
        return min(counts, key=lambda url: counts[url])

    @contextlib.contextmanager
    def _tracked(self, request: InFlight) -> Iterator[None]:
        key = self._next_key
        self._next_key = self._next_key + 1
        self.in_flight[key] = request
        self.counters.requests += 1
        if request.ends_with_rollout:
            self.busy.began()
        try:
            yield
        finally:
            del self.in_flight[key]
            if request.ends_with_rollout:
                self.busy.ended()
            self.last_progress = time.monotonic()

    # -- abort -------------------------------------------------------------------------------------

    @property
    def aborting(self) -> bool:
        return self._aborting.is_set()

    async def wait_for_abort(self) -> None:
        """Return as soon as an abort begins."""
        await self._aborting.wait()

    @contextlib.contextmanager
    def on_abort(self, call: Callable[[], object]) -> Iterator[None]:
        """Call ``call`` as soon as an abort begins within the block."""
        self._on_abort.add(call)
        try:
            yield
        finally:
            self._on_abort.discard(call)

    @contextlib.contextmanager
    def abort_scope(self) -> Iterator[None]:
        """Send no new requests within the block: they return at once as aborted."""
        self._aborting.set()
        for call in list(self._on_abort):
            call()
        try:
            yield
        finally:
            self._aborting.clear()

    async def abort_all(self, timeout: float) -> None:
        """Stop every request on every engine. Return when all engines are idle or, if a fork has
        requests too, when this client's requests have returned. Call inside `abort_scope`.

        The abort is repeated until then, because a request may arrive after the first abort. The
        call does not wait for a silent engine once all requests of this client have returned.

        Raises:
            EngineError: requests remain after ``timeout`` seconds; names the engines and their
                errors.
        """
        end = time.monotonic() + timeout
        workers = await self._workers_or_known()
        poll = _FIRST_POLL
        while True:
            states = await asyncio.gather(*(self._abort_worker(worker) for worker in workers))
            unanswered = sum(request.ends_with_rollout for request in self.in_flight.values())
            alone = not any(client.in_flight for client in self._forks if client is not self)
            if not unanswered and not (alone and any(count for count, _ in states)):
                break
            if time.monotonic() > end:
                said = [f"{unanswered} requests unanswered"]
                said += [
                    f"{w.url} has {count} requests"
                    for w, (count, _) in zip(workers, states)
                    if count
                ]
                said += [
                    f"{w.url} {problem}" for w, (_, problem) in zip(workers, states) if problem
                ]
                raise EngineError(
                    self.base_url, f"abort is not finished after {timeout:.0f} s: {'; '.join(said)}"
                )
            await asyncio.sleep(poll)
            poll = min(2 * poll, _LONGEST_POLL)
        for worker, (_, problem) in zip(workers, states):
            if problem:
                logger.warning("abort: %s %s", worker.url, problem)

    async def _workers_or_known(self) -> list[RouterWorker]:
        """Return the router's workers, or those that it has named so far if it does not answer."""
        try:
            return await self._workers()
        except EngineError as error:
            known = self._known_workers()
            if not known:
                raise
            logger.warning("abort: %s; the engines are asked directly", error)
            return known

    def _known_workers(self) -> list[RouterWorker]:
        return [
            RouterWorker("", url, healthy=True)
            for url in sorted(self._policy_urls - {self.base_url})
        ]

    async def _abort_worker(self, worker: RouterWorker) -> tuple[int, str]:
        """Send an abort; return the number of requests that the worker still has, and an error or
        ""."""
        try:
            engine = await self.engine(worker.url)
            await engine.request(
                "POST", "/abort_request", {"abort_all": True}, timeout=deadlines.CLIENT_ABORT
            )
            return num_requests(await engine.get(LOADS_PATH, timeout=deadlines.CLIENT_ABORT)), ""
        except EngineError as error:
            return 0, error.what

    async def _sleep_unless_aborting(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._aborting.wait(), timeout=seconds)

    # -- load --------------------------------------------------------------------------------------

    async def worker_loads(self) -> dict[str, tuple[int, int]]:
        """Return (requests, tokens held) of every engine by URL; (-1, -1) if it does not answer.

        Without the router these are the engines that it has named so far."""
        try:
            workers = await self._workers()
        except EngineError:
            workers = self._known_workers()

        async def load(worker: RouterWorker) -> tuple[int, int]:
            try:
                answer = await (await self.engine(worker.url)).get(
                    LOADS_PATH, timeout=deadlines.CLIENT_LOADS
                )
            except EngineError:
                return -1, -1
            return num_requests(answer), sum(
                item.get("num_used_tokens", 0) for item in answer.get("loads", [])
            )

        loads = await asyncio.gather(*(load(worker) for worker in workers))
        return {worker.url: load for worker, load in zip(workers, loads)}


def num_requests(loads: dict[str, Any]) -> int:
    """Count the requests running and waiting in the body of ``/v1/loads``.

    Example:
        >>> num_requests({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]})
        3
    """
    return sum(item["num_running_reqs"] + item["num_waiting_reqs"] for item in loads["loads"])
