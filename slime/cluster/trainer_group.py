"""Trainer ranks as Ray actors: each holds one rank of the Megatron backend and its side of weight sync."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.cluster.placement import Slots
from slime.cluster.ports import node_ip, reserve_port
from slime.cluster.waiting import Watch, wait_for
from slime.config import Config
from slime.engines.kinds import engine_of
from slime.errors import UserError
from slime.log import get_logger, log_to_file_only
from slime.placement import PlacementPlan
from slime.samples.batch import TrainLayout

if TYPE_CHECKING:
    from slime.weights.transport import EngineSlots

logger = get_logger(__name__)

#: Products on a CPU keep code for each shape that they met, and every micro-batch is another shape: with the 1024
#: entries that both caches (of torch, of oneDNN) may have, half a GB, reached only after hundreds of steps.
_CPU_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

_COLOCATED_SHARE = 0.4  # of a slot; engines take 0.2 (the reference's fractions), so both fit on one GPU


@dataclass(frozen=True)
class TrainerStart:
    """What a rank found when it was set up.

    Attributes:
        start_rollout_id: the next rollout to train.
        extra_state: what was saved beside the weights (data position, weight version, …), {} on a fresh start.
        layout: what packing must know.
        reports: this rank's metrics are those to log.
    """

    start_rollout_id: int
    extra_state: dict[str, Any] = field(default_factory=dict)
    layout: TrainLayout = field(default_factory=TrainLayout)
    reports: bool = True


class TrainerActor:
    """One trainer rank. Heavy imports happen in `setup`, so that all ranks start at once."""

    def __init__(self, config: Config, rank: int, world_size: int, run_path: Path, num_threads: int) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.run_path, self.num_threads = run_path, num_threads
        self.backend: Any = None  # from `setup` on
        self.sync: Any = None  # from `connect_engines` on
        log_to_file_only(f"trainer-{rank}", run_path / "logs", config.observe.log_level)

    def address(self) -> tuple[str, int]:
        """Where rank 0 listens for the process group's rendezvous."""
        self._reservation = reserve_port()
        return node_ip(), self._reservation.port

    def setup(self, master_addr: str, master_port: int, local_rank: int) -> TrainerStart:
        import torch

        from slime.train.megatron.backend import MegatronBackend
        from slime.train.megatron.parallel import RankInfo

        torch.set_num_threads(self.num_threads)
        info = RankInfo(self.rank, self.world_size, local_rank, master_addr, master_port)
        self.backend = MegatronBackend(self.config, info)
        start = self.backend.setup()
        self.backend.settle()
        return TrainerStart(
            start, dict(self.backend.extra_state), self.backend.layout, reports=self.backend.is_reporting_rank
        )

    def set_run_length(self, num_rollout: int) -> None:
        self.backend.set_run_length(num_rollout)

    def connect_engines(self, engines: list[EngineSlots], on_this_node: bool, version: int) -> None:
        """Call again when the engines have changed: ``version`` then counts no more, the number of pushes goes on."""
        from slime.weights.sync import WeightSync

        assert self.backend.hf_config is not None
        if self.sync is None:
            self.sync = WeightSync(
                self.config,
                self.backend.model_chunks,
                self.backend.hf_config,
                rank=self.rank,
                world_size=self.world_size,
                start_version=version,
            )
        self.sync.connect(engines, on_this_node=on_this_node)

    def update_weights(self, canary: list[int]) -> tuple[dict[str, float], list[float] | None]:
        """Push the current weights to every engine, and score ``canary`` with them unless it is empty. Collective.

        Returns:
            Metrics, and the log-probs of ``canary[1:]`` where this rank has them.
        """
        with self._phase("update_weights"):
            log_probs = self.backend.canary_log_probs(canary) if canary else None
            receipt = self.sync.push()
        return receipt.metrics(), log_probs

    def sleep(self, keep_weights: bool) -> dict[str, float]:
        """Free the GPU for the engines; returns what was measured."""
        return self.backend.sleep(keep_weights=keep_weights)

    def wake(self) -> dict[str, float]:
        """Take the GPU's memory back; returns what was measured."""
        with self._phase("wake"):
            return self.backend.wake()

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Running out of memory inside is explained."""
        from slime.train.memory import PhaseMemory

        return PhaseMemory(self.config, self.backend.device).phase(name)

    def train(self, shards: list[ray.ObjectRef]) -> dict[str, float]:
        """One rollout's training steps on this rank's shard. Collective.

        Args:
            shards: references to the `TrainBatch` of each data-parallel rank, so that a rank fetches only its own.
        """
        batch = ray.get(shards[self.backend.data_parallel_rank])
        return self.backend.train(batch)

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        with self._phase("save_model"):
            self.backend.save(rollout_id, extra_state)

    def failed_step(self) -> Any:
        """The rank's part of the step that ended in `NonFiniteTraining` (`slime.train.non_finite.FailedStep`)."""
        return self.backend.failed_step

    def finish_saving(self) -> None:
        self.backend.finish_saving()

    def is_alive(self) -> bool:
        return True

    def shutdown(self) -> None:
        if self.sync is not None:
            self.sync.close()
        if self.backend is not None:
            self.backend.close()


class TrainerGroup:
    """All trainer ranks, driven together.

    Attributes:
        layout: of the ranks, known once they are set up.
        reporting_rank: whose metrics are logged: the first of the last pipeline stage, which sees the loss.
    """

    def __init__(self, config: Config, plan: PlacementPlan, slots: Slots, run_path: Path, num_threads: int) -> None:
        share = _COLOCATED_SHARE if config.cluster.colocate else 1.0
        environment = trainer_environment(config, num_threads, on_gpu=slots.on_gpu)
        actor: Any = ray.remote(TrainerActor)  # Ray makes the methods remote; its types do not say so
        self.config = config
        self.layout, self.reporting_rank = TrainLayout(), 0
        self.world_size = plan.num_train
        self.names = [f"trainer-{rank}" for rank in range(plan.num_train)]
        self.nodes = [place.node for place in slots.places[: plan.num_train]]
        self.actors = [
            actor.options(
                name=None, max_restarts=0, runtime_env={"env_vars": environment}, **slots.options(rank, share)
            ).remote(config, rank, plan.num_train, run_path, num_threads)
            for rank in range(plan.num_train)
        ]

    def start_setup(self, should_stop: Callable[[], bool]) -> dict[str, ray.ObjectRef]:
        """Begin setting up all ranks; a reference by name for each, whose values go to `agreed_start`."""
        ref = self.actors[0].address.remote()
        [(address, port)] = wait_for([ref], "starting", 180, should_stop, names=self.names)
        if len(set(self.nodes)) == 1:
            address = "127.0.0.1"  # nobody else needs to reach rank 0
        local_ranks = [self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)]
        refs = [actor.setup.remote(address, port, local) for actor, local in zip(self.actors, local_ranks)]
        return dict(zip(self.names, refs))

    def agreed_start(self, starts: list[TrainerStart]) -> TrainerStart:
        """Take note of the layout and of who reports, from all ranks' answers to `start_setup`.

        Raises:
            UserError: ranks found different checkpoints.
        """
        ids = sorted({start.start_rollout_id for start in starts})
        if len(ids) > 1:
            raise UserError(
                f"trainer ranks would start at different rollouts: {', '.join(map(str, ids))}",
                why="they found different checkpoints: --load is not the same directory on every node",
                fix="put it on a file system that all nodes see",
            )
        self.layout = starts[0].layout
        self.reporting_rank = [start.reports for start in starts].index(True)
        return starts[0]

    def call(
        self,
        method: str,
        *args: Any,
        what: str,
        timeout: float,
        should_stop: Callable[[], bool] = lambda: False,
        on_poll: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call ``method`` on every rank and wait for all."""
        refs = self.begin(method, *args)
        return wait_for(list(refs.values()), what, timeout, should_stop, on_poll, self.names)

    def begin(self, method: str, *args: Any) -> dict[str, ray.ObjectRef]:
        """Call ``method`` on every rank and do not wait; a reference by name for each."""
        return {name: getattr(actor, method).remote(*args) for name, actor in zip(self.names, self.actors)}

    def watch(self) -> Watch:
        """Raises an `ActorDied` soon after a rank is gone, also while the trainer is not needed."""
        return Watch(dict(zip(self.names, self.actors)), "is_alive")

    def close(self, timeout: float) -> None:
        """Ask the ranks to end their process groups, then kill what is left."""
        refs = [actor.shutdown.remote() for actor in self.actors]
        ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


def trainer_environment(config: Config, num_threads: int, *, on_gpu: bool) -> dict[str, str]:
    """Variables of every trainer rank, on top of the driver's; those of ``--train-env-vars`` win."""
    # an OpenMP pool's size is read when torch is first imported
    found = {"OMP_NUM_THREADS": str(num_threads)}
    if not on_gpu:
        found |= {name: os.environ.get(name, most) for name, most in _CPU_CACHES.items()}
    found |= {name: os.environ.get(name, value) for name, value in engine_of(config).trainer_environment.items()}
    return found | {str(k): str(v) for k, v in (config.cluster.train_env_vars or {}).items()}


def threads_per_process(num_processes_on_node: int, take_turns: bool) -> int:
    """CPU threads for each of ``num_processes_on_node`` that work at the same time.

    Args:
        take_turns: trainer and engines do not run at the same time (synchronous loop), so each may use all cores.
    """
    cores = len(os.sched_getaffinity(0))
    share = cores if take_turns else max(1, cores // 2)
    return max(1, share // max(1, num_processes_on_node))
