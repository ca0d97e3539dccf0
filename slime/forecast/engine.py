"""A discrete-event simulation of generating engines. The time of an iteration grows with the number
of running requests and with their cached tokens; the events are the ends of requests."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from slime.forecast.rates import Rates
from slime.forecast.trainer import experts_per_token
from slime.memory.engine import EngineSettings
from slime.models import table_of
from slime.models.flops import SequenceCost

#: Constant seconds per iteration, and seconds per request in it (sampling and log-probs over the
#: vocabulary, detokenising). Fitted to docs/performance.md: 0.6B on an H200 with 256 and with 1,024
#: requests in flight, 4B with 32.
_ITERATION = 1.0e-3
_REQUEST = 11e-6
#: Fraction of a large product's rate that products in decoding and prefilling reach.
_PRODUCTS_SHARE = 0.8
#: Seconds of one all-reduce in a tensor-parallel engine; a layer has two. Assumed.
_ALL_REDUCE = 12e-6


@dataclass(frozen=True)
class EngineSpeed:
    """Cost of an iteration of one engine.

    Attributes:
        dense, experts: seconds to read the weights that every token uses, and all experts.
        routed: fraction of the experts that one token uses.
        compute: seconds of matrix products per token.
        fixed: constant seconds per iteration.
        cached: seconds to read one token's part of the KV cache.
        capacity: tokens that the KV cache holds.
        request: seconds per request in an iteration.
    """

    dense: float
    experts: float
    routed: float
    compute: float
    fixed: float
    cached: float
    capacity: float
    request: float = _REQUEST

    @staticmethod
    def of(
        settings: EngineSettings, cost: SequenceCost, rates: Rates, gpu_bytes: float
    ) -> EngineSpeed:
        """Return the speed of an engine as the memory plan describes it.

        Args:
            cost: forward FLOPs of the model.
            gpu_bytes: memory of one GPU.
        """
        spec = settings.spec
        gpus = settings.tensor * settings.pipeline
        whole = list(table_of(spec).parameters(spec, range(spec.num_layers)))
        entries = sum(one.numel for one in whole)
        share = sum(one.numel for one in whole if one.is_expert) / entries
        read = settings.weights * settings.pipeline / rates.memory
        sums = 2 * spec.num_layers * _ALL_REDUCE if settings.tensor > 1 else 0.0
        return EngineSpeed(
            dense=read * (1 - share),
            experts=read * share,
            routed=experts_per_token(spec) / max(1, spec.num_experts),
            compute=cost.linear / gpus / (rates.products * _PRODUCTS_SHARE),
            fixed=_ITERATION + sums,
            cached=settings.kv_per_token * settings.pipeline / rates.memory,
            capacity=float(settings.kv_tokens(gpu_bytes)),
        )

    def iteration(self, running: int) -> float:
        """Return the seconds of an iteration with ``running`` requests, without reading their
        caches."""
        used = 1 - (1 - self.routed) ** running
        products = max(self.dense + self.experts * used, self.compute * running)
        return self.fixed + self.request * running + products


class Request(NamedTuple):
    """One response to generate.

    Attributes:
        group: number of the group that it belongs to.
        prompt, response: tokens.
        prefill: tokens of the prompt that are not cached yet.
    """

    group: int
    prompt: int
    response: int
    prefill: int


class SimulatedEngine:
    """One simulated engine.

    Attributes:
        time: simulated seconds.
    """

    def __init__(self, speed: EngineSpeed) -> None:
        self.speed = speed
        self.time = 0.0
        self._iteration = 0.0
        self._cached = 0.0
        self._running = list[tuple[float, Request]]()
        self._waiting = deque[Request]()

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, request: Request, now: float) -> None:
        self.advance(now)
        self._waiting.append(request)
        self._admit()

    def next_end(self) -> float:
        """Return when the next response ends; infinity if none runs."""
        if not self._running:
            return math.inf
        steps = self._running[0][0] - self._iteration
        running = len(self._running)
        growing = self.speed.cached * (steps * self._cached + running * steps * steps / 2)
        return self.time + steps * self.speed.iteration(running) + growing

    def advance(self, now: float) -> None:
        """Generate until ``now``, which must not be after `next_end`."""
        left = now - self.time
        if left <= 0:
            return
        running = len(self._running)
        if running:
            linear = self.speed.iteration(running) + self.speed.cached * self._cached
            quadratic = self.speed.cached * running / 2
            steps = 2 * left / (linear + math.sqrt(linear * linear + 4 * quadratic * left))
            self._iteration += steps
            self._cached += running * steps
        self.time = now

    def finish(self) -> Request:
        """Advance to the next end and return the response that ends."""
        self.advance(self.next_end())
        self._iteration, request = heapq.heappop(self._running)
        self._cached = max(0.0, self._cached - request.prompt - request.response)
        self._admit()
        return request

    def stall(self, now: float, seconds: float) -> None:
        """Pause generation for ``seconds`` from ``now`` on, for a weight push."""
        self.advance(now)
        self.time += seconds

    def stop(self, groups: Collection[int], now: float) -> list[Request]:
        """Abort the requests of some groups; return what is left of each, which has to prefill
        what it has generated."""
        self.advance(now)
        left = [one for one in self._waiting if one.group in groups]
        self._waiting = deque(one for one in self._waiting if one.group not in groups)
        running = self._running
        self._running = []
        for end, request in running:
            if request.group not in groups:
                self._running.append((end, request))
                continue
            missing = max(1, math.ceil(end - self._iteration))
            tokens = request.prompt + request.response - missing
            left.append(Request(request.group, tokens, missing, tokens))
            self._cached = max(0.0, self._cached - tokens)
        heapq.heapify(self._running)
        self._admit()
        return left

    def _admit(self) -> None:
        while self._waiting and (
            not self._running
            or self._cached + self._waiting[0].prompt + len(self._running) < self.speed.capacity
        ):
            request = self._waiting.popleft()
            self.time += request.prefill * self.speed.compute
            self._cached += request.prompt
            heapq.heappush(self._running, (self._iteration + request.response, request))


class Fleet:
    """Equal engines behind a router that sends a request to the engine with the fewest."""

    def __init__(self, speed: EngineSpeed, count: int) -> None:
        self.engines = [SimulatedEngine(speed) for _ in range(count)]
        self._ends = [(math.inf, number) for number in range(count)]

    def add(self, requests: list[Request], now: float) -> None:
        loads = [(engine.load, number) for number, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        for request in requests:
            load, number = loads[0]
            self.engines[number].add(request, now)
            heapq.heapreplace(loads, (load + 1, number))
        self._update_ends()

    def stall(self, now: float, seconds: float) -> None:
        for engine in self.engines:
            engine.stall(now, seconds)
        self._update_ends()

    def stop(self, groups: Collection[int], now: float) -> list[Request]:
        """Abort the requests of some groups on all engines; see `SimulatedEngine.stop`."""
        left = [one for engine in self.engines for one in engine.stop(groups, now)]
        self._update_ends()
        return left

    def next_end(self) -> float:
        return self._ends[0][0]

    def finish(self) -> tuple[float, Request]:
        """Return the time of the next end of a response, and its request."""
        time, number = self._ends[0]
        engine = self.engines[number]
        request = engine.finish()
        heapq.heapreplace(self._ends, (engine.next_end(), number))
        return time, request

    def _update_ends(self) -> None:
        self._ends = [(engine.next_end(), number) for number, engine in enumerate(self.engines)]
        heapq.heapify(self._ends)
