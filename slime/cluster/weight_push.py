"""The trainer's weights to the engines: who is connected, restarted engines that come back, and
proof that it worked.

A push is for a moment between two rollouts. Engines that were started again are taken in right
before it, since only with it do they have the policy's weights, and requests go to them right after
it.
"""

from __future__ import annotations

from slime.cluster.engine_table import State
from slime.cluster.engines import Engines
from slime.cluster.gpu_memory import GpuMemoryOwner, MemoryHolder
from slime.cluster.trainer_group import Trainers
from slime.weights.canary import Canary


class WeightPush:
    """From the trainer ranks to all engines of the policy.

    Those that joined since the last push are taken in as restarted ones are.

    Args:
        turns: whose turn the GPUs are; None where there are no trainers.
        canary: a prompt that engines and trainer must score alike; None where it is not checked.
        tolerant: engines that die are started again (--use-fault-tolerance).

    Attributes:
        is_pushing: or has failed at it, so that engines may be paused, with weights of two
            versions.
    """

    def __init__(
        self,
        engines: Engines,
        trainers: Trainers | None,
        turns: GpuMemoryOwner | None,
        canary: Canary | None,
        *,
        tolerant: bool,
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._turns = turns
        self._canary = canary
        self._tolerant = tolerant
        self._version = 0
        self._connected: list[str] = []  # URLs of the engines that the trainer pushes to
        self.is_pushing = False

    @property
    def can_generate(self) -> bool:
        """Engines generate beside the trainer, and are not being pushed to."""
        return not self.is_pushing and (self._turns is None or not self._turns.taken)

    def connect(self, version: int | None = None) -> None:
        """Introduce the engines that run to the trainer; where none is left, those that come back
        are.

        Args:
            version: that the engines have, the first time.
        """
        if self._trainers is None:
            return
        with self._engines.external.freeze_membership():
            self._connect(self._trainers, version)

    def _connect(self, trainers: Trainers, version: int | None) -> None:
        self._version = self._version if version is None else version
        layout = self._engines.layout
        self._connected = [engine.url for engine in layout]
        if layout:
            on_this_node = self._engines.nodes <= {
                trainers.nodes[0]
            }  # external ones are known by address only
            trainers.connect_engines(layout, self._version, on_this_node=on_this_node)

    def push(self) -> dict[str, float]:
        """Push to the engines, which then say the same of the canary as the trainer. When one dies
        of it, the others are pushed to again."""
        engines = self._engines
        if self._trainers is None:
            return {}
        self.is_pushing = True
        with engines.external.freeze_membership():
            metrics = engines.again_without_dead(self._push_once, "a weight push")
            if engines.table.those(State.REJOINING):
                engines.again_without_dead(
                    self._to_engines, "taking memory back"
                )  # requests may come from now on
                engines.admit()
        self.is_pushing = False
        engines.begin_rollout()  # questions that met a pause are asked anew
        return metrics

    def _push_once(self) -> dict[str, float]:
        engines = self._engines
        trainers = self._trainers
        assert trainers is not None
        if self._tolerant:
            engines.poll_for_deaths()
        self.take_in()
        if (
            self._tolerant
            and self._turns is not None
            and self._turns.turn is not MemoryHolder.TRAINER
        ):
            self._turns.onload_trainer()  # an engine died of the push
        with engines.external.newcomers_are_blamed():
            if self._connected != [engine.url for engine in engines.table.policy]:
                self.connect()
            return self._push_to_all(trainers)

    def _push_to_all(self, trainers: Trainers) -> dict[str, float]:
        canary = self._canary
        if self._turns is not None:
            self._turns.onload_weights()
        if canary is None:
            return trainers.update_weights([])[0]
        metrics, canary.expected = trainers.update_weights(canary.tokens)
        self._to_engines()  # without their caches they answer nothing
        return metrics | self._check_canary("a weight push", metrics)

    def _check_canary(self, event: str, pushed: dict[str, float] | None = None) -> dict[str, float]:
        """`Canary.check` of all engines that run; {} without a canary, or when none is left."""
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

        return engines.again_without_dead(check, "the check of the canary")

    def take_in(self) -> None:
        """Between rollouts: restarted engines that are up count among those that pushes go to.
        Others are waited for when no engine is left; where trainer and engines take turns, for all,
        which nobody may have memory beside."""
        engines = self._engines
        if not engines.table.away:
            return
        if not engines.table.policy and self._turns is not None and self._turns.taken:
            with self._turns.offload_all():
                engines.start_again()
                engines.wait_for_restarts(for_all=True)
                engines.table.rejoin()
            return
        if not engines.table.policy:
            engines.wait_for_restarts(for_all=False)
        engines.look()
        engines.table.rejoin()

    def wake_engines(self) -> None:
        """Before they are asked anything. Those that were asleep must still compute what the
        trainer computed."""
        engines = self._engines
        if self._tolerant:
            engines.poll_for_deaths()
            if not engines.table.policy:
                return  # whoever waits for the rollout brings them back
        if engines.again_without_dead(self._to_engines, "taking memory back"):
            self._check_canary("taking its memory back")

    def _to_engines(self) -> bool:
        took = self._turns is not None and self._turns.onload_engines()
        self._engines.restarts_at_once = True
        self._engines.start_again()  # what died while the trainer had the GPUs
        return took

    def onload_trainer(self) -> None:
        """The trainer takes its memory back, where engines had it. Those that are starting come up
        first, since they measure how much there is for them; what dies from now on starts when the
        trainer sleeps again."""
        engines = self._engines
        turns = self._turns
        if turns is None or not turns.taken:
            return
        engines.restarts_at_once = False
        engines.end_rollout()
        engines.wait_for_restarts(for_all=True)
        engines.table.rejoin()
        engines.again_without_dead(turns.onload_trainer, "giving memory up")
