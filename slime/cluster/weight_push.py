"""Pushes of the trainer's weights to the engines: connections, restarted engines that come back,
and the canary that proves the result.

A push happens between two rollouts. Restarted engines rejoin right before it, because only a push
gives them the policy's weights. They get requests right after it.
"""

from __future__ import annotations

from slime.cluster.adapter_versions import AdapterVersions
from slime.cluster.engine_table import State
from slime.cluster.engines import Engines
from slime.cluster.gpu_memory import GpuMemoryOwner, MemoryHolder
from slime.cluster.trainer_group import Trainers
from slime.engines.adapters import adapter_name
from slime.weights.canary import Canary


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

    def __init__(
        self,
        engines: Engines,
        trainers: Trainers | None,
        gpu_memory: GpuMemoryOwner | None,
        canary: Canary | None,
        *,
        tolerant: bool,
        adapters: AdapterVersions | None = None,
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._gpu_memory = gpu_memory
        self._canary = canary
        self._tolerant = tolerant
        self._adapters = adapters
        self._version = 0
        self._connected: list[str] = []  # URLs of the engines that the trainer pushes to
        self.is_pushing = False

    @property
    def can_generate(self) -> bool:
        """Whether engines may be generating while the trainer works."""
        return not self.is_pushing and (self._gpu_memory is None or not self._gpu_memory.is_shared)

    def connect(self, version: int | None = None) -> None:
        """Connect the trainer to the running engines.

        Args:
            version: weight version of the engines, the first time.
        """
        trainers = self._trainers
        if trainers is None:
            return
        with self._engines.external.freeze_membership():
            self._version = self._version if version is None else version
            layout = self._engines.layout
            self._connected = [engine.url for engine in layout]
            if layout:
                # the node of an external engine is not known; it is reached by its address
                on_this_node = self._engines.nodes <= {trainers.nodes[0]}
                trainers.connect_engines(layout, self._version, on_this_node=on_this_node)

    def push(self) -> dict[str, float]:
        """Push to all engines, check the canary, and admit rejoined engines; return metrics.

        If an engine dies during the push, it is repeated for the others.
        """
        engines = self._engines
        if self._trainers is None:
            return {}
        self.is_pushing = True
        with engines.external.freeze_membership():
            metrics = engines.retry_without_dead(self._push_once, "a weight push")
            if self._adapters is not None:
                # before restarted engines get requests: they have no older adapter
                self._adapters.switch(int(metrics["perf/weight_version"]))
            if engines.table.in_state(State.REJOINING):
                # requests may come from now on
                engines.retry_without_dead(self._onload_engines, "taking memory back")
                engines.admit()
        self.is_pushing = False
        engines.begin_health_checks()  # paused engines have not answered earlier checks
        return metrics

    def _push_once(self) -> dict[str, float]:
        engines = self._engines
        trainers = self._trainers
        assert trainers is not None
        if self._tolerant:
            engines.poll_for_deaths()
        self.rejoin_restarted()
        memory = self._gpu_memory
        if self._tolerant and memory is not None and memory.holder is not MemoryHolder.TRAINER:
            memory.onload_trainer()  # the push is repeated, because an engine died
        with engines.external.drop_newcomers_on_failure():
            if self._connected != [engine.url for engine in engines.table.policy]:
                self.connect()
            if memory is not None:
                memory.onload_weights()
            if self._adapters is not None:
                self._adapters.unload_old(engines.fleet)
            canary = self._canary
            if canary is None:
                return trainers.update_weights([])[0]
            metrics, canary.expected, canary.expected_of_base = trainers.update_weights(
                canary.tokens
            )
            if self._adapters is not None:
                canary.adapter = adapter_name(int(metrics["perf/weight_version"]))
            self._onload_engines()  # without their caches they do not answer
            return metrics | self._check_canary("a weight push", metrics)

    def _check_canary(self, event: str, pushed: dict[str, float] | None = None) -> dict[str, float]:
        """Check the canary on all running engines; {} without a canary or without engines."""
        engines = self._engines
        canary = self._canary
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
        engines = self._engines
        if not engines.table.away:
            return
        if not engines.table.policy and self._gpu_memory is not None and self._gpu_memory.is_shared:
            with self._gpu_memory.offload_all():
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
        engines = self._engines
        if self._tolerant:
            engines.poll_for_deaths()
            if not engines.table.policy:
                return  # the wait for the rollout restarts them
        if engines.retry_without_dead(self._onload_engines, "taking memory back"):
            self._check_canary("taking its memory back")

    def _onload_engines(self) -> bool:
        took = self._gpu_memory is not None and self._gpu_memory.onload_engines()
        self._engines.restarts_immediately = True
        self._engines.restart_dead()  # engines that died while the trainer used the GPUs
        return took

    def onload_trainer(self) -> None:
        """Give the trainer its memory back if it shares GPUs with engines.

        Engines that are starting come up first, because they measure their free memory. An engine
        that dies from now on is started when the trainer sleeps again.
        """
        engines = self._engines
        memory = self._gpu_memory
        if memory is None or not memory.is_shared:
            return
        engines.restarts_immediately = False
        engines.stop_health_checks()
        engines.wait_for_restarts(for_all=True)
        engines.table.rejoin()
        engines.retry_without_dead(memory.onload_trainer, "giving memory up")
