"""The trainer's weights in the engines, seen from the driver: connect, push, ask the canary, and again if one died."""

from __future__ import annotations

from slime.cluster.engine_group import EngineGroup
from slime.cluster.engine_repair import EngineRepair
from slime.cluster.hand_over import CallTrainers, HandOver
from slime.cluster.trainer_group import TrainerGroup
from slime.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.weights.canary import Canary

logger = get_logger(__name__)


class EngineWeights:
    """One for a run that has trainers and engines.

    Args:
        call_trainers: calls a method of every trainer rank and returns their answers.
        hand_over: where trainer and engines take turns with memory.
        repair: with --use-fault-tolerance.
    """

    def __init__(
        self,
        config: Config,
        engines: EngineGroup,
        trainers: TrainerGroup,
        call_trainers: CallTrainers,
        hand_over: HandOver | None,
        repair: EngineRepair | None,
    ) -> None:
        self.config, self._engines, self._trainers, self._call_trainers = config, engines, trainers, call_trainers
        self._hand_over, self._repair = hand_over, repair
        self._connected: dict[int, str] = {}
        self._canary: Canary | None = None

    def connect(self, version: int = 0) -> None:
        """Introduce the engines that serve to the trainer.

        Args:
            version: that the engines have; counts the first time only.
        """
        self._connected = dict(self._engines.serving)
        self._trainers.call(
            "connect_engines",
            self._engines.layout,
            self._engines.nodes == {self._trainers.nodes[0]},
            version,
            what="connecting trainer and engines",
            timeout=self.config.cluster.distributed_timeout_minutes * 60.0,
        )
        if self._canary is None and self.config.debug.check_canary and self._engines.answers_alone:
            self._canary = Canary(self.config, self._engines.fleet)

    def update(self) -> dict[str, float]:
        """Push to the engines, which then say the same of the canary as the trainer; returns metrics.

        Engines that were restarted come back with it. When one dies of it, the others are pushed to again.
        """
        repair = self._repair
        if repair is None:
            return self._push()
        while True:
            lost = repair.num_lost
            try:
                repair.ask()
                repair.bring_back()
                if self._connected != self._engines.serving:
                    self.connect()
                metrics = self._push()
            except UserError as error:
                if not repair.has_lost_more_than(lost):
                    raise
                logger.warning("an engine died during a weight push, which is repeated: %s", error.what)
            else:
                repair.admit()
                return metrics

    def _push(self) -> dict[str, float]:
        if self._hand_over is not None:
            self._hand_over.to_push()
        tokens = self._canary.tokens if self._canary is not None else []
        by_rank = self._call_trainers("update_weights", tokens, what="pushing weights")
        metrics: dict[str, float] = by_rank[0][0]
        if self._canary is None:
            return metrics
        _, self._canary.expected = by_rank[self._trainers.reporting_rank]
        if self._hand_over is not None:
            self._hand_over.to_engines()  # without their caches they answer nothing
        return metrics | self.check_canary("a weight push")

    def check_canary(self, event: str) -> dict[str, float]:
        """`Canary.check` of all engines that serve; {} without a canary, or when none is left."""
        while self._canary is not None and self._engines.serving:
            lost = self._repair.num_lost if self._repair is not None else 0
            try:
                self._canary.fleet = self._engines.fleet
                return self._canary.check(event)
            except UserError:
                if self._repair is None or not self._repair.has_lost_more_than(lost):
                    raise
        return {}
