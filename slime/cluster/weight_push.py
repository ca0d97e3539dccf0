"""Pushes of the trainer's weights to the engines: connections, restarted engines that come back,
and the canary that proves the result.

A push happens between two rollouts. Restarted engines rejoin right before it, because only a push
gives them the policy's weights. They get requests right after it.

Adapters (LoRA) have a name for each version: engines hold some, and requests name one.

    push 7    load policy-7 into every engine (`slime.weights.adapter_sync`), check the canary
    switch    new requests name policy-7; running ones end with policy-6, or are aborted and
              continue with policy-7 (--update-weights-in-flight)
    push 8    first unload policy-6 …

So two versions are resident: the one that requests name and its predecessor. A restarted engine has
the newest version before it gets requests. SGLang unloads an adapter only after its last request,
and loads no other one meanwhile. So an adapter in use is unloaded at a later push.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from slime import deadlines
from slime.cluster.engine_table import State
from slime.cluster.engines import Engines
from slime.cluster.gpu_memory import GpuMemoryOwner, MemoryHolder
from slime.cluster.trainer_group import Trainers
from slime.engines.adapters import UNLOAD_ADAPTER, adapter_name
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.log import get_logger
from slime.weights.canary import Canary

logger = get_logger(__name__)


@dataclass(eq=False)
class AdapterVersions:
    """Switches requests to a new version, and unloads old ones.

    Args:
        use: makes requests name a version; with ``cut``, requests for older versions are aborted.
        in_use: returns the names of the adapters that running requests use.
        cuts: running requests continue with the new version at once.
    """

    use: Callable[[int, bool], None]
    in_use: Callable[[], set[str]]
    _: KW_ONLY
    cuts: bool

    def __post_init__(self) -> None:
        self._resident: list[int] = []  # oldest first; new requests use the last one

    def switch(self, version: int) -> None:
        """Make requests name this version, which every engine holds."""
        if version not in self._resident:
            self._resident.append(version)
        self.use(version, self.cuts)

    def unload_old(self, fleet: EngineFleet) -> None:
        """Unload all versions except the newest and those in use; call it before a push."""
        old = self._resident[:-1]
        if not old:
            return
        in_use = self.in_use()
        for version in old:
            name = adapter_name(version)
            if name in in_use:
                logger.info("%s stays loaded: requests use it", name)
                continue
            bodies = {url: {"lora_name": name} for url in fleet.urls}
            answers = fleet.post_to(UNLOAD_ADAPTER, bodies, deadlines.ADAPTER_UNLOAD)
            for url, answer in answers.items():
                # status 400: the engine was restarted and never had this adapter
                if isinstance(answer, EngineError) and answer.status != 400:
                    logger.warning("%s could not be unloaded from %s: %s", name, url, answer)
            self._resident.remove(version)


@dataclass(eq=False)
class WeightPush:
    """Pushes weights from the trainer ranks to all engines of the policy.

    Args:
        gpu_memory: owner of the shared GPU memory; None without trainers.
        canary: a prompt that engines and trainer must score alike; None if it is not checked.
        tolerant: engines that die are restarted (--use-fault-tolerance).
        adapters: switches requests to the pushed adapter; None if whole weights are pushed.

    Attributes:
        is_pushing: a push runs or has failed, so engines may be paused and hold weights of two
            versions.
    """

    engines: Engines
    trainers: Trainers | None
    gpu_memory: GpuMemoryOwner | None
    canary: Canary | None
    _: KW_ONLY
    tolerant: bool
    adapters: AdapterVersions | None = None

    def __post_init__(self) -> None:
        self._version = 0
        self._connected: list[str] = []  # URLs of the engines that the trainer pushes to
        self.is_pushing = False

    @property
    def can_generate(self) -> bool:
        """Whether engines may be generating while the trainer works."""
        return not self.is_pushing and (self.gpu_memory is None or not self.gpu_memory.is_shared)

    def connect(self, version: int | None = None) -> None:
        """Connect the trainer to the running engines.

        Args:
            version: weight version of the engines, the first time.
        """
        trainers = self.trainers
        if trainers is None:
            return
        with self.engines.external.freeze_membership():
            self._version = self._version if version is None else version
            layout = self.engines.layout
            self._connected = [engine.url for engine in layout]
            if layout:
                # the node of an external engine is not known; it is reached by its address
                on_this_node = self.engines.nodes <= {trainers.nodes[0]}
                trainers.connect_engines(layout, self._version, on_this_node=on_this_node)

    def push(self) -> dict[str, float]:
        """Push to all engines, check the canary, and admit rejoined engines; return metrics.

        If an engine dies during the push, it is repeated for the others.
        """
        engines = self.engines
        if self.trainers is None:
            return {}
        self.is_pushing = True
        with engines.external.freeze_membership():
            metrics = engines.retry_without_dead(self._push_once, "a weight push")
            if self.adapters is not None:
                # before restarted engines get requests: they have no older adapter
                self.adapters.switch(int(metrics["perf/weight_version"]))
            if engines.table.in_state(State.REJOINING):
                # requests may come from now on
                engines.retry_without_dead(self._onload_engines, "taking memory back")
                engines.admit()
        self.is_pushing = False
        engines.begin_health_checks()  # paused engines have not answered earlier checks
        return metrics

    def _push_once(self) -> dict[str, float]:
        engines = self.engines
        trainers = self.trainers
        assert trainers is not None
        if self.tolerant:
            engines.poll_for_deaths()
        self.rejoin_restarted()
        memory = self.gpu_memory
        if self.tolerant and memory is not None and memory.holder is not MemoryHolder.TRAINER:
            memory.onload_trainer()  # the push is repeated, because an engine died
        with engines.external.drop_newcomers_on_failure():
            if self._connected != [engine.url for engine in engines.table.policy]:
                self.connect()
            if memory is not None:
                memory.onload_weights()
            if self.adapters is not None:
                self.adapters.unload_old(engines.fleet)
            canary = self.canary
            if canary is None:
                return trainers.update_weights([])[0]
            metrics, canary.expected, canary.expected_of_base = trainers.update_weights(
                canary.tokens
            )
            if self.adapters is not None:
                canary.adapter = adapter_name(int(metrics["perf/weight_version"]))
            self._onload_engines()  # without their caches they do not answer
            started = time.perf_counter()
            metrics |= self._check_canary("a weight push", metrics)
            of_trainer = metrics.get("perf/canary_time", 0.0)
            metrics["perf/canary_time"] = of_trainer + time.perf_counter() - started
            return metrics

    def _check_canary(self, event: str, pushed: dict[str, float] | None = None) -> dict[str, float]:
        """Check the canary on all running engines; {} without a canary or without engines."""
        engines = self.engines
        canary = self.canary
        if canary is None:
            return {}

        def check() -> dict[str, float]:
            if not engines.table.policy:
                return {}
            canary.fleet = engines.fleet
            canary.pushed = pushed
            return canary.check(event)

        return engines.retry_without_dead(check, "the check of the canary")

    def rejoin_restarted(self) -> None:
        """Let restarted engines that are up take part in pushes; call this between rollouts.

        If no engine is left, wait for the first one. If trainer and engines share GPUs, wait for
        all, because they can only start while nothing else holds memory.
        """
        engines = self.engines
        if not engines.table.away:
            return
        if not engines.table.policy and self.gpu_memory is not None and self.gpu_memory.is_shared:
            with self.gpu_memory.offload_all():
                engines.restart_dead()
                engines.wait_for_restarts(for_all=True)
                engines.table.rejoin()
            return
        if not engines.table.policy:
            engines.wait_for_restarts(for_all=False)
        engines.poll()
        engines.table.rejoin()

    def wake_engines(self) -> None:
        """Give the engines their memory before requests; then check the canary again."""
        engines = self.engines
        if self.tolerant:
            engines.poll_for_deaths()
            if not engines.table.policy:
                return  # the wait for the rollout restarts them
        if engines.retry_without_dead(self._onload_engines, "taking memory back"):
            self._check_canary("taking its memory back")

    def _onload_engines(self) -> bool:
        took = self.gpu_memory is not None and self.gpu_memory.onload_engines()
        self.engines.restarts_immediately = True
        self.engines.restart_dead()  # engines that died while the trainer used the GPUs
        return took

    def onload_trainer(self) -> None:
        """Give the trainer its memory back if it shares GPUs with engines.

        Engines that are starting come up first, because they measure their free memory. An engine
        that dies from now on is started when the trainer sleeps again.
        """
        engines = self.engines
        memory = self.gpu_memory
        if memory is None or not memory.is_shared:
            return
        engines.restarts_immediately = False
        engines.stop_health_checks()
        engines.wait_for_restarts(for_all=True)
        engines.table.rejoin()
        engines.retry_without_dead(memory.onload_trainer, "giving memory up")
