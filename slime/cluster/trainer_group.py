"""Trainer ranks as Ray actors, each with one rank of the Megatron backend and of weight sync, and
the driver's handle of all of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime import deadlines
from slime.cluster.placement import GpuSlots
from slime.cluster.waiting import (
    NamedActor,
    Process,
    Watch,
    all_answered,
    raise_failed,
    this_process,
    wait_for,
)
from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.errors import UserError
from slime.log import get_logger, log_to_file_only
from slime.placement import PlacementPlan
from slime.processes.garbage import freeze_gc, paused
from slime.processes.host import reserve_port
from slime.redact import secrets_in
from slime.samples.batch import TrainedTokens, TrainLayout

if TYPE_CHECKING:
    from slime.observe.torch_profile import TorchProfile
    from slime.trainer.memory_snapshot import MemorySnapshot
    from slime.trainer.non_finite import FailedStep
    from slime.weights.transport import EngineSlots

logger = get_logger(__name__)

#: Matrix products on a CPU cache code per shape, and every micro-batch has another shape. The
#: default of 1024 entries in torch's and oneDNN's caches grows to half a GB over hundreds of steps.
_CPU_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

#: Share of a slot; engines take 0.2 (the reference's fractions), so both fit on one GPU.
_COLOCATED_SHARE = 0.4
_HANDING_OVER = "handing memory over"


@dataclass(frozen=True)
class Launch:
    """What the driver must know once everything runs.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_prompts: prompts per epoch, for --num-epoch; 0 if unknown (streaming) or not needed.
        seconds: duration of each part of the launch.
        saved_metrics: metrics of the step that the checkpoint holds, as far as they were known when
            it was written.
        pushes: weight version → rollouts trained on when it was pushed, from the checkpoint.
        ancestries: rollouts trained on → ancestry of the weights, from the checkpoint.
    """

    start_rollout_id: int
    num_prompts: int
    seconds: dict[str, float]
    saved_metrics: dict[str, float]
    pushes: dict[int, int] = field(default_factory=dict)
    ancestries: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerStart:
    """State of a rank after its setup.

    Attributes:
        start_rollout_id: the next rollout to train on.
        extra_state: what was saved besides the weights (data position, weight version, …); {} on a
            fresh start.
        layout: data that packing needs.
        reports: whether this rank's metrics are logged.
        skipped: a line for each damaged checkpoint that was skipped.
    """

    start_rollout_id: int
    extra_state: dict[str, Any] = field(default_factory=dict)
    layout: TrainLayout = field(default_factory=TrainLayout)
    reports: bool = True
    skipped: Sequence[str] = ()

    @property
    def saved_for(self) -> int | None:
        """The rollout after which the saved data position was written; None if there is none."""
        return (
            self.extra_state.get("rollout_id", self.start_rollout_id - 1)
            if "source" in self.extra_state
            else None
        )

    def launch(self, num_prompts: int, seconds: dict[str, float]) -> Launch:
        metrics, pushes, ancestries = (
            self.extra_state.get(name, {}) for name in ("metrics", "pushes", "lineages")
        )
        return Launch(self.start_rollout_id, num_prompts, seconds, metrics, pushes, ancestries)


class TrainerActor:
    """One trainer rank. Heavy imports happen in `setup`, so that all ranks start at once."""

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
        self.sync: Any = None  # from `connect_engines` on
        self._has_learned = False  # since the last push
        self._profile: TorchProfile | None = None  # while steps are profiled
        self._snapshot: MemorySnapshot | None = None  # with --record-memory-history
        os.environ.update(environment)  # before torch is imported
        log_to_file_only(
            f"trainer-{rank}", run_path / "logs", config.observe.log_level, *config.for_hiding()
        )

    def process(self) -> Process:
        return this_process()

    def address(self) -> tuple[str, int]:
        """Reserve and return the address for the process group's rendezvous, on rank 0."""
        self._reservation = reserve_port()
        return ray.util.get_node_ip_address(), self._reservation.port

    def setup(self, master_addr: str, master_port: int, local_rank: int) -> TrainerStart:
        with paused():
            import torch

            from slime.trainer.megatron.backend import MegatronBackend
            from slime.trainer.megatron.parallel import RankInfo

        torch.set_num_threads(self.num_threads)
        info = RankInfo(self.rank, self.world_size, local_rank, master_addr, master_port)
        self.backend = MegatronBackend(self.config, info)
        if self.config.debug.record_memory_history:
            from slime.trainer.memory_snapshot import MemorySnapshot

            self._snapshot = MemorySnapshot(self.config, self.rank)
        start = self.backend.setup()
        freeze_gc()
        backend = self.backend
        return TrainerStart(
            start,
            dict(backend.extra_state),
            backend.layout,
            backend.is_reporting_rank,
            tuple(backend.skipped),
        )

    def set_run_length(self, num_rollout: int) -> None:
        self.backend.set_run_length(num_rollout)

    def connect_engines(self, engines: list[EngineSlots], on_this_node: bool, version: int) -> None:
        """Connect to the engines, again when they change. ``version`` counts only once."""
        from slime.weights.adapter_sync import AdapterSync
        from slime.weights.sync import WeightSync

        assert self.backend.hf_config is not None
        if self.sync is None:
            model = (self.config, self.backend.pushed_chunks, self.backend.hf_config)
            ranks: Any = {
                "rank": self.rank,
                "world_size": self.world_size,
                "start_version": version,
            }
            adapters = self.backend.adapters
            self.sync = (
                WeightSync(*model, **ranks)
                if adapters is None
                else AdapterSync(*model, adapters, **ranks)
            )
        self.sync.connect(engines, on_this_node=on_this_node)

    def update_weights(
        self, canary: list[int]
    ) -> tuple[dict[str, float], list[float] | None, list[float] | None]:
        """Push the current weights to every engine, and score ``canary`` with what they get unless
        it is empty. Collective.

        Returns:
            Metrics, the log-probs of ``canary[1:]`` where this rank has them, and those without
            adapters where these are trained.
        """
        metrics: dict[str, float] = {}
        of_base: list[float] | None = None
        with self._phase("update_weights"):
            if canary and self.backend.adapters is not None:
                of_base = self.backend.canary_log_probs(canary, base=True)
            log_probs = self.backend.canary_log_probs(canary) if canary else None
            if canary and self.backend.engine_weights is not None:
                plain = self.backend.canary_log_probs(canary, plain=True)
                if plain is not None and log_probs is not None:
                    moved = statistics.fmean(abs(a - b) for a, b in zip(plain, log_probs))
                    metrics["train/canary_quantisation_abs_diff"] = moved
            if self.backend.adapters is None:
                receipt = self.sync.push()
            else:
                receipt = self.sync.push(has_learned=self._has_learned)
        self._has_learned = False
        return receipt.metrics() | metrics, log_probs, of_base

    def sleep(self, keep_weights: bool) -> dict[str, float]:
        """Free the GPU for the engines; return metrics."""
        return self.backend.sleep(keep_weights=keep_weights)

    def wake(self) -> dict[str, float]:
        """Take the GPU's memory back; return metrics."""
        with self._phase("wake"):
            return self.backend.wake()

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that explains errors of memory."""
        from slime.trainer.memory import PhaseMemory

        return PhaseMemory(self.config, self.backend.device).phase(name)

    def train(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Do one rollout's training steps on this rank's shard; return metrics and data of tokens.

        Collective.

        Args:
            shards: references to the `TrainBatch` of each data-parallel rank, so that a rank
                fetches only its own.
        """
        batch = ray.get(shards[self.backend.data_parallel_rank])
        from slime.weights.adapter_checks import has_visibly_learned

        rates = self.backend.learning_rates()
        metrics = self.backend.train(batch)
        self._has_learned |= has_visibly_learned(
            self.config.megatron.optimizer_name, rates, self.backend.step_metrics
        )
        if self._snapshot is not None:
            self._snapshot.step_ended()
        return metrics, self.backend.trained_tokens

    def evaluate(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Score held-out preferences; see `train`. Collective."""
        batch = ray.get(shards[self.backend.data_parallel_rank])
        return self.backend.evaluate(batch), self.backend.trained_tokens

    def start_profile(self, folder: Path) -> None:
        """Record what this rank computes, if it is one of --profile-ranks."""
        from slime.observe.torch_profile import TRACE_SUFFIX, TorchProfile

        if self.rank in self.config.debug.profile_ranks:
            self._profile = TorchProfile(folder / f"trainer-rank-{self.rank}{TRACE_SUFFIX}")

    def stop_profile(self) -> None:
        """Write what was recorded. A full disk costs the profile, and not the run."""
        profile = self._profile
        self._profile = None
        try:
            if profile is not None:
                profile.stop()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d has no profile: %s", self.rank, error)

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        with self._phase("save_model"):
            self.backend.save(rollout_id, extra_state)

    def export(self, directory: str) -> None:
        with self._phase("save_model"):
            self.backend.export(directory)

    def failed_step(self) -> FailedStep | None:
        """The rank's part of the step that ended in `NonFiniteTraining`
        (`slime.trainer.non_finite.FailedStep`)."""
        return self.backend.failed_step

    def finish_saving(self) -> None:
        self.backend.finish_saving()

    def shutdown(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        if self.sync is not None:
            self.sync.close()
        if self.backend is not None:
            self.backend.close()


class Trainers:
    """The driver's handle of all trainer ranks.

    A call asks all ranks at once, because their work is collective, and waits for all of them. The
    first failure is raised at once.

    Args:
        on_wait: called about twice a second while waiting; what it raises ends the wait.

    Attributes:
        layout: data that packing needs, known after setup.
        nodes: node of each rank.
    """

    def __init__(
        self,
        config: Config,
        plan: PlacementPlan,
        slots: GpuSlots,
        run_path: Path,
        num_threads: int,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._slots = slots
        self._run_path = run_path
        self._num_threads = num_threads
        self._on_wait = on_wait
        self.layout = TrainLayout()
        self.nodes = [place.node for place in slots.places[: plan.num_train]]
        self._reporting_rank = 0
        self._actors: dict[NamedActor, Any] = {}
        limit = config.cluster.distributed_timeout_minutes * 60.0
        self._answer_seconds = limit
        # collectives have the process group's timeout; this outer one catches what that cannot see
        self._work_seconds = max(3600.0, 4 * limit)

    @property
    def names(self) -> set[str]:
        """Names of the ranks in errors."""
        return {worker.name for worker in self._actors}

    # -- coming up ---------------------------------------------------------------------------------

    def begin_setup(self, should_stop: Callable[[], bool]) -> dict[NamedActor, ray.ObjectRef]:
        """Start all ranks and their setup; pass the answers to `agreed_start`.

        This waits for rank 0, which reserves the rendezvous address.
        """
        share = _COLOCATED_SHARE if self.config.cluster.colocate else 1.0
        environment = trainer_environment(self.config, self._num_threads, on_gpu=self._slots.on_gpu)
        remote: Any = ray.remote(TrainerActor)  # Ray's types do not know the remote methods
        for rank in range(len(self.nodes)):
            options = self._slots.options(rank, share) | _runtime_environment(self.config)
            actor = remote.options(name=None, max_restarts=0, **options).remote(
                self.config,
                rank,
                len(self.nodes),
                self._run_path,
                self._num_threads,
                environment,
            )
            self._actors[NamedActor(f"trainer-{rank}", actor.process.remote())] = actor
        first, actor = next(iter(self._actors.items()))
        [(address, port)] = wait_for(
            {first: actor.address.remote()}, "starting", deadlines.TRAINER_GROUP_START, should_stop
        )
        if len(set(self.nodes)) == 1:
            address = "127.0.0.1"  # no other node needs to reach rank 0
        local_ranks = [self.nodes[:rank].count(node) for rank, node in enumerate(self.nodes)]
        return {
            worker: actor.setup.remote(address, port, local)
            for (worker, actor), local in zip(self._actors.items(), local_ranks)
        }

    def agreed_start(self, starts: Sequence[TrainerStart]) -> TrainerStart:
        """Store layout and reporting rank from the answers to `begin_setup`; return the start.

        Raises:
            UserError: ranks found different checkpoints.
        """
        ids = sorted({start.start_rollout_id for start in starts})
        if len(ids) > 1:
            raise UserError(
                f"trainer ranks would start at different rollouts: {', '.join(map(str, ids))}",
                why="they found different checkpoints: --load is not the same directory on every "
                "node",
                fix="put it on a file system that all nodes see",
            )
        for line in starts[0].skipped:
            logger.warning("%s", line)
        self.layout = starts[0].layout
        self._reporting_rank = [start.reports for start in starts].index(True)
        return starts[0]

    def set_run_length(self, num_rollout: int) -> None:
        self._ask(
            lambda actor: actor.set_run_length.remote(num_rollout), "setting the length of the run"
        )

    def connect_engines(
        self, engines: list[EngineSlots], version: int, *, on_this_node: bool
    ) -> None:
        """Have each rank connect to the engines (`slime.weights.sync.WeightSync.connect`).
        ``version`` counts only the first time."""
        what = "connecting trainer and engines"
        self._ask(
            lambda a: a.connect_engines.remote(engines, on_this_node, version),
            what,
            self._answer_seconds,
        )

    # -- work --------------------------------------------------------------------------------------

    def train(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Do one rollout's training steps.

        Returns:
            Metrics of the reporting rank, the first of the last pipeline stage, and data of tokens
            from all ranks.
        """
        answers = self._ask(lambda actor: actor.train.remote(shards), "training")
        return answers[self._reporting_rank][0], [one for _, trained in answers for one in trained]

    def evaluate(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Score held-out preferences; return as `train`."""
        answers = self._ask(lambda actor: actor.evaluate.remote(shards), "evaluating")
        return answers[self._reporting_rank][0], [one for _, scored in answers for one in scored]

    def update_weights(
        self, canary: list[int]
    ) -> tuple[dict[str, float], Sequence[float], Sequence[float]]:
        """Push to the connected engines; return metrics and the log-probs of ``canary[1:]``, with
        and without the adapters that are trained (() without such)."""
        by_rank = self._ask(lambda actor: actor.update_weights.remote(canary), "pushing weights")
        _, log_probs, of_base = by_rank[self._reporting_rank]
        return by_rank[0][0], log_probs or (), of_base or ()

    def sleep(self, keep_weights: bool) -> dict[str, float]:
        """Free the GPUs for the engines; return rank 0's metrics."""
        found: dict[str, float] = self._ask(
            lambda actor: actor.sleep.remote(keep_weights), _HANDING_OVER
        )[0]
        return found

    def wake(self) -> dict[str, float]:
        """Take the GPUs' memory back; return rank 0's metrics."""
        found: dict[str, float] = self._ask(lambda actor: actor.wake.remote(), _HANDING_OVER)[0]
        return found

    def start_profile(self, folder: Path) -> None:
        """Record what the ranks of --profile-ranks compute, into files in ``folder``."""
        what = "starting the profiler"
        self._ask(
            lambda actor: actor.start_profile.remote(folder), what, deadlines.TRAINER_GROUP_PROFILE
        )

    def stop_profile(self) -> None:
        """Write what was recorded."""
        what = "writing profiles"
        self._ask(lambda actor: actor.stop_profile.remote(), what, deadlines.TRAINER_GROUP_PROFILE)

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        self._ask(lambda actor: actor.save.remote(rollout_id, extra_state), "saving a checkpoint")

    def export(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory."""
        self._ask(lambda actor: actor.export.remote(str(directory)), "exporting the model")

    def wait_for_async_save(self, is_settled: Callable[[], bool]) -> None:
        """Wait, after a failure, until the ranks have finished an async save or ``is_settled``.

        The writers are threads, which continue even if their rank waits forever for another one
        that failed. Such a rank does not answer.

        Raises:
            UserError: the save failed. ActorDied: a rank is gone.
        """
        asked = {worker: actor.finish_saving.remote() for worker, actor in self._actors.items()}
        while not all_answered(asked) and not is_settled():
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=deadlines.WAITING_POLL)
        raise_failed(asked, "finishing the checkpoint")

    def finish_saving(self) -> None:
        self._ask(lambda actor: actor.finish_saving.remote(), "finishing the checkpoint")

    def ping(self) -> dict[NamedActor, ray.ObjectRef]:
        """Return refs to each rank's pid and host, answered between calls."""
        return {worker: actor.process.remote() for worker, actor in self._actors.items()}

    def failed_step(self) -> list[FailedStep]:
        """Return what ranks that did not wait for others kept of a step with NaN or Inf."""
        parts = self._ask(
            lambda a: a.failed_step.remote(),
            "asking for the step that failed",
            deadlines.TRAINER_GROUP_QUICK_CALL,
        )
        return [part for part in parts if part is not None]

    # -- the end -----------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Return a watch that raises `ActorDied` soon after a rank is gone."""
        return Watch({worker: actor.process.remote for worker, actor in self._actors.items()})

    def close(self, timeout: float) -> None:
        """Ask the ranks to end their process groups, then kill what is left."""
        if refs := [actor.shutdown.remote() for actor in self._actors.values()]:
            ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)

    def _ask(
        self, begin: Callable[[Any], ray.ObjectRef], what: str, seconds: float | None = None
    ) -> list[Any]:
        """Ask every rank; return the answers by rank.

        Args:
            begin: starts the call of one rank.
            seconds: deadline for all, by default that of training.
        """
        asked = {worker: begin(actor) for worker, actor in self._actors.items()}
        return wait_for(asked, what, seconds or self._work_seconds, on_poll=self._on_wait)


def trainer_environment(config: Config, num_threads: int, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables that every trainer rank sets before it imports torch, on
    top of the driver's; those of ``--train-env-vars`` win."""
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
    new process (LD_PRELOAD). Secrets are left out, as Ray logs it; {} where nothing is left,
    because a worker with a runtime environment imports Ray twice."""
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
