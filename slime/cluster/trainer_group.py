"""Trainer ranks as Ray actors, each with one rank of the Megatron backend and of weight sync, and
the driver's handle of all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime import deadlines
from slime.checkpoints.critic_part import is_part_written
from slime.checkpoints.load_plan import LoadPlan
from slime.cluster.placement import GpuSlots
from slime.cluster.rank_group import RankActor, RankGroup
from slime.cluster.waiting import Asked, NamedActor, Watch, all_answered, raise_failed
from slime.config.config import Config
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.placement import PlacementPlan
from slime.processes.garbage import freeze_gc, paused
from slime.samples.batch import TrainBatch, TrainedTokens, TrainLayout

if TYPE_CHECKING:
    from slime.observe.torch_profile import TorchProfile
    from slime.trainer.memory_snapshot import MemorySnapshot
    from slime.trainer.non_finite import FailedStep
    from slime.trainer.update import ByPosition
    from slime.weights.transport import EngineSlots

logger = get_logger(__name__)

_HANDING_OVER = "handing memory over"


@dataclass(frozen=True)
class Launch:
    """Facts for the driver after the launch.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_prompts: prompts per epoch, for --num-epoch; 0 if unknown (streaming) or not needed.
        seconds: duration of each part of the launch.
        saved_metrics: metrics of the checkpoint's step that were known when it was written.
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
        extra_state: saved state besides the weights (data position, weight version, …); {} on a
            fresh start.
        layout: data that packing needs.
        reports: whether this rank's metrics are logged.
        skipped: a line for each damaged checkpoint that was skipped.
        plan: the files that were loaded.
    """

    start_rollout_id: int
    extra_state: dict[str, Any] = field(default_factory=dict)
    layout: TrainLayout = field(default_factory=TrainLayout)
    reports: bool = True
    skipped: Sequence[str] = ()
    plan: LoadPlan | None = None

    @property
    def saved_for(self) -> int | None:
        """The rollout after which the saved data position was written; None if there is none."""
        if "source" in self.extra_state:
            return self.extra_state.get("rollout_id", self.start_rollout_id - 1)
        return None

    def launch(self, num_prompts: int, seconds: dict[str, float]) -> Launch:
        metrics, pushes, ancestries = (
            self.extra_state.get(name, {}) for name in ("metrics", "pushes", "lineages")
        )
        return Launch(self.start_rollout_id, num_prompts, seconds, metrics, pushes, ancestries)


class TrainerActor(RankActor):
    """One trainer rank. `setup` does the slow imports, so all ranks start at once."""

    name = "trainer"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sync: Any = None  # from `connect_engines` on
        self._has_learned = False  # since the last push
        self._profile: TorchProfile | None = None  # while steps are profiled
        self._snapshot: MemorySnapshot | None = None  # with --record-memory-history

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
            backend.plan,
        )

    def connect_engines(self, engines: list[EngineSlots], on_this_node: bool, version: int) -> None:
        """Connect to the engines, again when they change. ``version`` is only used the first
        time."""
        from slime.weights.adapter_sync import AdapterSync
        from slime.weights.sync import WeightSync

        assert self.backend.hf_config is not None
        if self.sync is None:
            model = (self.config, self.backend.pushed_chunks, self.backend.hf_config)
            ranks: Any = {"rank": self.rank, "world_size": self.world_size}
            ranks["start_version"] = version
            if self.backend.adapters is None:
                self.sync = WeightSync(*model, **ranks)
            else:
                self.sync = AdapterSync(*model, self.backend.adapters, **ranks)
        self.sync.connect(engines, on_this_node=on_this_node)

    def update_weights(
        self, canary: list[int]
    ) -> tuple[dict[str, float], list[float] | None, list[float] | None]:
        """Push the current weights to every engine, and score ``canary`` with them unless it is
        empty. Collective.

        Returns:
            Metrics, the log-probs of ``canary[1:]`` if this rank has them, and those without
            adapters if adapters are trained.
        """
        metrics: dict[str, float] = {}
        of_base: list[float] | None = None
        log_probs: list[float] | None = None
        with self._phase("update_weights"):
            if canary:
                started = time.perf_counter()
                if self.backend.adapters is not None:
                    of_base = self.backend.canary_log_probs(canary, base=True)
                log_probs = self.backend.canary_log_probs(canary)
                if self.backend.engine_weights is not None:
                    plain = self.backend.canary_log_probs(canary, plain=True)
                    if plain is not None and log_probs is not None:
                        moved = statistics.fmean(abs(a - b) for a, b in zip(plain, log_probs))
                        metrics["train/canary_quantisation_abs_diff"] = moved
                metrics["perf/canary_time"] = time.perf_counter() - started
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

    def train(
        self, shards: list[ray.ObjectRef], critic_shards: Sequence[ray.ObjectRef] = ()
    ) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Do one rollout's training steps on this rank's shard; return metrics and data of tokens.

        Collective.

        Args:
            shards: references to the `TrainBatch` of each data-parallel rank, so that a rank
                fetches only its own.
            critic_shards: the same for a critic with another layout on these ranks.
        """
        batch = self._shard(shards)
        of_critic: TrainBatch | None = None
        if critic_shards:
            of_critic = self._shard(critic_shards, self.backend.critic.ranks.replica)
        return self._trained(lambda: self.backend.train(batch, of_critic))

    def score(self, shards: list[ray.ObjectRef]) -> None:
        """Begin a rollout's training if the critic is on other ranks; see `train`."""
        self.backend.score(self._shard(shards))

    def returns(self, values: ByPosition) -> tuple[ByPosition, ByPosition]:
        """Compute advantages with the critic's values; return the critic's targets and loss masks.
        Collective."""
        return self.backend.returns(values)

    def learn(self) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Finish the training that `score` began; return as `train`. Collective."""
        return self._trained(self.backend.learn)

    def _trained(
        self, train: Callable[[], dict[str, float]]
    ) -> tuple[dict[str, float], list[TrainedTokens]]:
        from slime.weights.adapter_checks import has_visibly_learned

        rates = self.backend.learning_rates()
        metrics = train()
        self._has_learned |= has_visibly_learned(
            self.config.megatron.optimizer_name, rates, self.backend.step_metrics
        )
        if self._snapshot is not None:
            self._snapshot.step_ended()
        return metrics, self.backend.trained_tokens

    def evaluate(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Score held-out preferences; see `train`. Collective."""
        return self.backend.evaluate(self._shard(shards)), self.backend.trained_tokens

    def start_profile(self, folder: Path) -> None:
        """Start to profile this rank, if it is one of --profile-ranks."""
        from slime.observe.torch_profile import TRACE_SUFFIX, TorchProfile

        if self.rank in self.config.debug.profile_ranks:
            self._profile = TorchProfile(folder / f"trainer-rank-{self.rank}{TRACE_SUFFIX}")

    def stop_profile(self) -> None:
        """Write the profile. A full disk loses the profile, and does not end the run."""
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

    def shutdown(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        if self.sync is not None:
            self.sync.close()
        super().shutdown()


class CriticTrainerActor(RankActor):
    """One rank of a critic on separate GPUs; see `slime.trainer.megatron.critic_process`."""

    name = "critic"

    def setup(self, master_addr: str, master_port: int, local_rank: int) -> TrainerStart:
        with paused():
            import torch

            from slime.trainer.megatron.critic_process import CriticProcess
            from slime.trainer.megatron.parallel import RankInfo

        torch.set_num_threads(self.num_threads)
        info = RankInfo(self.rank, self.world_size, local_rank, master_addr, master_port)
        self.backend = CriticProcess(self.config, info)
        self.backend.setup()
        freeze_gc()
        backend = self.backend
        return TrainerStart(0, layout=backend.layout, reports=backend.is_reporting_rank)

    def load(self, plan: LoadPlan) -> None:
        self.backend.load(plan)

    def values(self, shards: list[ray.ObjectRef]) -> ByPosition:
        """Compute the values of this rank's shard. Collective."""
        return self.backend.values(self._shard(shards))

    def learn(self, returns: ByPosition, loss_masks: ByPosition) -> dict[str, float]:
        """Take the steps on the batch of the last `values`; return metrics. Collective."""
        return self.backend.learn(returns, loss_masks)

    def save(self, rollout_id: int) -> None:
        with self._phase("save_model"):
            self.backend.save(rollout_id)


class Trainers(RankGroup):
    """The driver's handle of all trainer ranks, including those of a critic on separate GPUs.

    A call asks all ranks at once, because their work is collective, and waits for all of them. The
    first failure is raised at once.

    Args:
        on_wait: called about twice a second while waiting; what it raises ends the wait.

    Attributes:
        layout: data that packing needs, known after setup.
    """

    _critic: Critics | None = None
    _saving: int | None = None  # the last checkpoint that was begun

    def __init__(
        self,
        config: Config,
        plan: PlacementPlan,
        slots: GpuSlots,
        run_path: Path,
        num_threads: int,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            TrainerActor,
            config,
            slots,
            range(plan.num_train),
            run_path,
            num_threads,
            on_wait,
            shares=config.cluster.colocate,
        )
        self.layout = TrainLayout()
        if plan.num_critic:
            places = range(plan.critic_offset, plan.total)
            self._critic = Critics(
                CriticTrainerActor,
                config,
                slots,
                places,
                run_path,
                num_threads,
                on_wait,
                shares=False,
            )

    @property
    def names(self) -> set[str]:
        """Names of the ranks in errors."""
        return {worker.name for worker in self._everyone}

    @property
    def _everyone(self) -> dict[NamedActor, Any]:
        return self.actors | (self._critic.actors if self._critic is not None else {})

    # -- coming up ---------------------------------------------------------------------------------

    def begin_setup(self, should_stop: Callable[[], bool]) -> dict[NamedActor, ray.ObjectRef]:
        """Start all ranks and their setup; pass the answers to `agreed_start`.

        This waits for rank 0, which reserves the rendezvous address.
        """
        found = super().begin_setup(should_stop)
        if self._critic is not None:
            found |= self._critic.begin_setup(should_stop)
        return found

    def agreed_start(self, starts: Sequence[TrainerStart]) -> TrainerStart:
        """Store layouts and reporting ranks from the answers to `begin_setup`, and let a critic on
        separate GPUs load the checkpoint that belongs to the policy's; return the start.

        Raises:
            UserError: ranks found different checkpoints, or the critic's weights do not match.
        """
        of_critic = list(starts[len(self.actors) :]) if self._critic is not None else []
        starts = starts[: len(starts) - len(of_critic)]
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
        if self._critic is not None:
            assert starts[0].plan is not None, "trainer ranks always load something"
            layout = self._critic.load(starts[0].plan, of_critic)
            self.layout = replace(self.layout, critic=layout)
        return starts[0]

    def set_run_length(self, num_rollout: int) -> None:
        self._ask_everyone(
            lambda actor: actor.set_run_length.remote(num_rollout), "setting the length of the run"
        )

    def connect_engines(
        self, engines: list[EngineSlots], version: int, *, on_this_node: bool
    ) -> None:
        """Make each rank connect to the engines (`slime.weights.sync.WeightSync.connect`).
        ``version`` is only used the first time."""
        what = "connecting trainer and engines"
        self._ask(
            lambda a: a.connect_engines.remote(engines, on_this_node, version),
            what,
            self._answer_seconds,
        )

    # -- work --------------------------------------------------------------------------------------

    def train(
        self, shards: list[ray.ObjectRef], critic_shards: Sequence[ray.ObjectRef] = ()
    ) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Do one rollout's training steps.

        Args:
            critic_shards: for a critic with its own layout.
        Returns:
            Metrics of the reporting rank, the first of the last pipeline stage, and data of tokens
            from all ranks.
        """
        metrics: dict[str, float] = {}
        if self._critic is None:
            answers = self._ask(lambda actor: actor.train.remote(shards, critic_shards), "training")
        else:
            answers, metrics = self._train_both(self._critic, shards, critic_shards)
        of_policy = answers[self._reporting_rank][0]
        longest = max(one.get("perf/train_time", 0.0) for one in (metrics, of_policy))
        metrics |= of_policy | {"perf/train_time": longest}
        return metrics, [one for _, trained in answers for one in trained]

    def _train_both(
        self, critic: Critics, shards: list[ray.ObjectRef], critic_shards: Sequence[ray.ObjectRef]
    ) -> tuple[list[Any], dict[str, float]]:
        """Train policy and critic at the same time; return the answers of the policy's ranks and
        the critic's metrics."""
        scoring = self._begin(lambda actor: actor.score.remote(shards))
        values = critic.values(list(critic_shards), scoring)
        parts = self._ask(lambda actor: actor.returns.remote(values), "computing advantages")
        learning = self._begin(lambda actor: actor.learn.remote())
        answers, metrics = critic.learn(
            joined(part[0] for part in parts), joined(part[1] for part in parts), learning
        )
        return answers, metrics

    def evaluate(self, shards: list[ray.ObjectRef]) -> tuple[dict[str, float], list[TrainedTokens]]:
        """Score held-out preferences; return as `train`."""
        answers = self._ask(lambda actor: actor.evaluate.remote(shards), "evaluating")
        return answers[self._reporting_rank][0], [one for _, scored in answers for one in scored]

    def update_weights(
        self, canary: list[int]
    ) -> tuple[dict[str, float], Sequence[float], Sequence[float]]:
        """Push to the connected engines; return metrics and the log-probs of ``canary[1:]``, with
        and without trained adapters (() if there are none)."""
        by_rank = self._ask(lambda actor: actor.update_weights.remote(canary), "pushing weights")
        _, log_probs, of_base = by_rank[self._reporting_rank]
        return by_rank[0][0], log_probs or (), of_base or ()

    def sleep(self, keep_weights: bool) -> dict[str, float]:
        """Free the GPUs for the engines; return rank 0's metrics."""
        return self._ask(lambda actor: actor.sleep.remote(keep_weights), _HANDING_OVER)[0]

    def wake(self) -> dict[str, float]:
        """Take the GPUs' memory back; return rank 0's metrics."""
        return self._ask(lambda actor: actor.wake.remote(), _HANDING_OVER)[0]

    def start_profile(self, folder: Path) -> None:
        """Start to profile the ranks of --profile-ranks, into files in ``folder``."""
        what = "starting the profiler"
        self._ask(
            lambda actor: actor.start_profile.remote(folder), what, deadlines.TRAINER_GROUP_PROFILE
        )

    def stop_profile(self) -> None:
        """Write what was recorded."""
        what = "writing profiles"
        self._ask(lambda actor: actor.stop_profile.remote(), what, deadlines.TRAINER_GROUP_PROFILE)

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        if self._critic is not None:
            self._critic.save(rollout_id)
        self._saving = rollout_id
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
        asked = {worker: actor.finish_saving.remote() for worker, actor in self._everyone.items()}
        of_critic = {worker: ref for worker, ref in asked.items() if worker not in self.actors}
        end = math.inf
        while not all_answered(asked) and not is_settled():
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=deadlines.WAITING_POLL)
            if of_critic and _has_failed(of_critic):  # its other ranks may still write it
                end = min(end, time.monotonic() + deadlines.TRAINER_GROUP_CRITIC_PART)
            elif of_critic and all_answered(of_critic):
                end = time.monotonic()
            if time.monotonic() >= end and self._lacks_critic() and not is_settled():
                raise_failed(asked, "finishing the checkpoint")
                raise UserError("the critic's part of the checkpoint was not written")
        raise_failed(asked, "finishing the checkpoint")

    def _lacks_critic(self) -> bool:
        """Return whether the critic's part of the last checkpoint is not written."""
        root = self.config.checkpoint.save
        saving = self._saving
        return not (root is None or saving is None or is_part_written(Path(root), saving))

    def finish_saving(self) -> None:
        self._ask_everyone(lambda actor: actor.finish_saving.remote(), "finishing the checkpoint")

    def ping(self) -> dict[NamedActor, ray.ObjectRef]:
        """Return refs to each rank's pid and host, answered between calls."""
        return {worker: actor.process.remote() for worker, actor in self._everyone.items()}

    def failed_step(self) -> list[FailedStep]:
        """Return the ranks' records of a step with NaN or Inf, from the policy or the critic: all
        its ranks have failed, while the other's may still train."""
        asked = [
            {worker: actor.failed_step.remote() for worker, actor in actors.items()}
            for actors in (self.actors, self._critic.actors if self._critic is not None else {})
        ]
        end = time.monotonic() + deadlines.TRAINER_GROUP_QUICK_CALL
        waiting = [group for group in asked if group]
        while waiting and time.monotonic() < end:
            for group in [one for one in waiting if all_answered(one)]:
                waiting.remove(group)
                if _has_failed(group):  # the other model's ranks may have the record
                    continue
                parts = [part for part in ray.get(list(group.values())) if part is not None]
                if parts:
                    return parts
            pending = [ref for group in waiting for ref in group.values()]
            if pending:
                ray.wait(pending, num_returns=len(pending), timeout=deadlines.WAITING_POLL)
        raise RunFailed("no rank has returned its failed step", "none has answered in time")

    # -- the end -----------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Return a watch that raises `ActorDied` soon after a rank is gone."""
        return Watch({worker: actor.process.remote for worker, actor in self._everyone.items()})

    def close(self, timeout: float) -> None:
        """Ask the ranks to end their process groups, then kill what is left."""
        everyone = self._everyone.values()
        if refs := [actor.shutdown.remote() for actor in everyone]:
            ray.wait(refs, num_returns=len(refs), timeout=timeout)
        for actor in everyone:
            ray.kill(actor, no_restart=True)

    def _ask_everyone(self, begin: Callable[[Any], ray.ObjectRef], what: str) -> list[Any]:
        """Call `_ask` for all ranks, the critic's included."""
        return self.wait({worker: begin(actor) for worker, actor in self._everyone.items()}, what)


class Critics(RankGroup):
    """The driver's handle of the ranks of a critic on separate GPUs."""

    def load(self, plan: LoadPlan, starts: Sequence[TrainerStart]) -> TrainLayout:
        """Load the critic that belongs to the policy's checkpoint; return the layout.

        Args:
            starts: answers to `begin_setup`.
        """
        self._reporting_rank = [start.reports for start in starts].index(True)
        self._ask(lambda actor: actor.load.remote(plan), "loading the critic")
        return starts[0].layout

    def values(
        self, shards: list[ray.ObjectRef], beside: dict[NamedActor, ray.ObjectRef]
    ) -> ray.ObjectRef:
        """Compute the values of a rollout.

        Args:
            beside: calls of the policy's ranks to wait for at the same time.
        Returns:
            A reference to a `ByPosition` of the whole rollout.
        """
        asked = self._begin(lambda actor: actor.values.remote(shards))
        answers = self.wait(beside | asked, "training")
        return joined(answers[len(beside) :])

    def learn(
        self,
        returns: ray.ObjectRef,
        loss_masks: ray.ObjectRef,
        beside: dict[NamedActor, ray.ObjectRef],
    ) -> tuple[list[Any], dict[str, float]]:
        """Take the critic's steps; return the answers to ``beside``, and the critic's metrics."""
        asked = self._begin(lambda actor: actor.learn.remote(returns, loss_masks))
        answers = self.wait(beside | asked, "training")
        return answers[: len(beside)], answers[len(beside) + self._reporting_rank]

    def save(self, rollout_id: int) -> None:
        """Write the critic's part of a checkpoint."""
        self._ask(lambda actor: actor.save.remote(rollout_id), "saving a checkpoint")


def _has_failed(asked: Asked) -> bool:
    """Return whether a rank is gone or has raised an error by now, without waiting."""
    try:
        raise_failed(asked, "asking ranks that may be gone")
    except Exception as error:  # the rank may raise anything
        logger.debug("%s", error)
        return True
    return False


def joined(parts: Iterable[ByPosition]) -> ray.ObjectRef:
    """Put the shards of a column into the object store as one."""
    return ray.put({place: values for part in parts for place, values in part.items()})
