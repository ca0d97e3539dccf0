"""Ranks that train one model together, as Ray actors, and the driver's handle of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from slime import deadlines
from slime.cluster.placement import GpuSlots
from slime.cluster.waiting import Asked, NamedActor, Process, this_process, wait_for
from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.log import log_to_file_only
from slime.processes.host import reserve_port
from slime.redact import secrets_in
from slime.samples.batch import TrainBatch

if TYPE_CHECKING:
    from slime.trainer.non_finite import FailedStep

#: Matrix products on a CPU cache code per shape, and every micro-batch has another shape. The
#: default of 1024 entries in torch's and oneDNN's caches grows to half a GB over hundreds of steps.
_CPU_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

#: Share of a slot; engines take 0.2 (the reference's fractions), so both fit on one GPU.
_COLOCATED_SHARE = 0.4


class RankActor:
    """One rank of a model. A subclass sets ``backend`` in `setup`.

    Attributes:
        name: prefix of the ranks' names in messages and log files: "trainer" for "trainer-0".
    """

    name: ClassVar[str]

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        run_path: Path,
        num_threads: int,
        environment: dict[str, str],
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.run_path = run_path
        self.num_threads = num_threads
        self.backend: Any = None  # from `setup` on
        os.environ.update(environment)  # before torch is imported
        log_to_file_only(
            f"{self.name}-{rank}", run_path / "logs", config.observe.log_level, *config.for_hiding()
        )

    def process(self) -> Process:
        return this_process()

    def address(self) -> tuple[str, int]:
        """Reserve and return the address for the process group's rendezvous, on rank 0."""
        self._reservation = reserve_port()
        return ray.util.get_node_ip_address(), self._reservation.port

    def set_run_length(self, num_rollout: int) -> None:
        self.backend.set_run_length(num_rollout)

    def failed_step(self) -> FailedStep | None:
        """Return the rank's part of the step that ended in `NonFiniteTraining`, or None."""
        return self.backend.failed_step

    def finish_saving(self) -> None:
        self.backend.finish_saving()

    def shutdown(self) -> None:
        if self.backend is not None:
            self.backend.close()

    def _shard(self, shards: Sequence[ray.ObjectRef], replica: int | None = None) -> TrainBatch:
        """Fetch only this rank's shard of a rollout, or that of another data-parallel rank."""
        return ray.get(shards[self.backend.data_parallel_rank if replica is None else replica])

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that explains out-of-memory errors."""
        from slime.trainer.memory import PhaseMemory

        return PhaseMemory(self.config, self.backend.device).phase(name)


@dataclass(eq=False)
class RankGroup:
    """The driver's handle of ranks that train one model together.

    A call asks all ranks at once, because their work is collective, and waits for all of them. The
    first failure is raised at once.

    Args:
        actor: the class that runs on each rank.
        places: the slot of each rank.
        on_wait: called about twice a second while waiting; what it raises ends the wait.
        shares: engines use the same slots.

    Attributes:
        nodes: node of each rank.
        actors: the ranks in order, from `begin_setup` on.
    """

    _reporting_rank = 0  # the rank whose metrics are logged

    actor: type[RankActor]
    config: Config
    slots: GpuSlots
    places: Sequence[int]
    run_path: Path
    num_threads: int
    on_wait: Callable[[], None] = lambda: None
    _: KW_ONLY
    shares: bool

    def __post_init__(self) -> None:
        self._share = _COLOCATED_SHARE if self.shares else 1.0
        self.nodes = [self.slots.places[slot].node for slot in self.places]
        self.actors: dict[NamedActor, Any] = {}
        limit = self.config.cluster.distributed_timeout_minutes * 60.0
        self._answer_seconds = limit
        # collectives have the process group's timeout; this outer limit covers everything else
        self._work_seconds = max(3600.0, 4 * limit)

    def begin_setup(self, should_stop: Callable[[], bool]) -> dict[NamedActor, ray.ObjectRef]:
        """Start all ranks and their setup.

        This waits for rank 0, which reserves the rendezvous address.
        """
        environment = trainer_environment(self.config, self.num_threads, on_gpu=self.slots.on_gpu)
        remote: Any = ray.remote(self.actor)  # Ray's types do not know the remote methods
        for rank, slot in enumerate(self.places):
            options = self.slots.options(slot, self._share) | _runtime_environment(self.config)
            actor = remote.options(name=None, max_restarts=0, **options).remote(
                self.config,
                rank,
                len(self.nodes),
                self.run_path,
                self.num_threads,
                environment | self.slots.places[slot].environment,
            )
            name = f"{self.actor.name}-{rank}"
            self.actors[NamedActor(name, actor.process.remote())] = actor
        first, actor = next(iter(self.actors.items()))
        [(address, port)] = wait_for(
            {first: actor.address.remote()}, "starting", deadlines.TRAINER_GROUP_START, should_stop
        )
        if len(set(self.nodes)) == 1:
            address = "127.0.0.1"  # no other node needs to reach rank 0
        local_ranks = [self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)]
        return {
            worker: actor.setup.remote(address, port, local)
            for (worker, actor), local in zip(self.actors.items(), local_ranks)
        }

    def _begin(self, begin: Callable[[Any], ray.ObjectRef]) -> dict[NamedActor, ray.ObjectRef]:
        return {worker: begin(actor) for worker, actor in self.actors.items()}

    def wait(self, asked: Asked, what: str, seconds: float | None = None) -> list[Any]:
        """Wait for answers of ranks.

        Args:
            seconds: deadline for all of them together, by default that of training.
        """
        return wait_for(asked, what, seconds or self._work_seconds, on_poll=self.on_wait)

    def _ask(
        self, begin: Callable[[Any], ray.ObjectRef], what: str, seconds: float | None = None
    ) -> list[Any]:
        """Ask every rank; return the answers by rank.

        Args:
            begin: starts the call of one rank.
            seconds: as in `wait`.
        """
        return self.wait(self._begin(begin), what, seconds)


def trainer_environment(config: Config, num_threads: int, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables that every trainer rank sets before it imports torch, on top
    of the driver's; ``--train-env-vars`` takes precedence."""
    # an OpenMP pool's size is read when torch is first imported
    found = {"OMP_NUM_THREADS": str(num_threads)}
    if not on_gpu:
        found |= {name: os.environ.get(name, most) for name, most in _CPU_CACHES.items()}
    found |= {
        name: os.environ.get(name, value)
        for name, value in engine_of(config).trainer_environment.items()
    }
    return found | _variables(config)


def _variables(config: Config) -> dict[str, str]:
    return {str(name): str(value) for name, value in (config.cluster.train_env_vars or {}).items()}


def _runtime_environment(config: Config) -> dict[str, Any]:
    """Return Ray's option with the variables of ``--train-env-vars``, some of which act only on a
    new process (LD_PRELOAD). Secrets are left out, because Ray logs the option. {} if no variable
    remains, because a worker with a runtime environment imports Ray twice."""
    public = {
        name: value for name, value in _variables(config).items() if not secrets_in(value, name)
    }
    return {"runtime_env": {"env_vars": public}} if public else {}


def threads_per_process(num_processes_on_node: int, take_turns: bool) -> int:
    """Return the CPU threads of each of ``num_processes_on_node``.

    Args:
        take_turns: trainer and engines never run at the same time, so each may use all cores.
    """
    cores = len(os.sched_getaffinity(0))
    share = cores if take_turns else max(1, cores // 2)
    return max(1, share // max(1, num_processes_on_node))
