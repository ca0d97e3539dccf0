"""All parts of a run that live in Ray, as plain blocking methods for the driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from slime import deadlines
from slime.checkpoints.load_plan import config_for_resume
from slime.cluster.engine_table import State
from slime.cluster.engines import Engines
from slime.cluster.gpu_memory import EngineMemory, GpuMemoryOwner
from slime.cluster.placement import GpuSlots
from slime.cluster.rank_group import threads_per_process
from slime.cluster.ray_session import reserve, start_ray
from slime.cluster.rollout_actor import Generating, RolloutHandle, RolloutResult, log_warnings
from slime.cluster.slow_waits import stopped_parts
from slime.cluster.trainer_group import Launch, Trainers, TrainerStart
from slime.cluster.waiting import (
    ActorLost,
    ConnectionBroken,
    NamedActor,
    NoEngineLeft,
    StartupProgress,
    StopRequested,
    Watch,
    describe_unanswered,
    raise_failed,
    wait_for,
)
from slime.cluster.weight_push import AdapterVersions, WeightPush
from slime.config.config import Config
from slime.engines.api import EngineError
from slime.engines.kinds import engine_of
from slime.engines.wire.shared_memory import remove_stale
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.memory.check import check_memory_of_cluster
from slime.placement import PlacementPlan, has_evaluation
from slime.samples.batch import TrainLayout
from slime.samples.types import ANY_VERSION, VersionWindow
from slime.weights.canary import Canary

if TYPE_CHECKING:
    from slime.trainer.non_finite import FailedStep

logger = get_logger(__name__)
T = TypeVar("T")


class LapTimer:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def require_launched(part: T | None) -> T:
    """Return ``part``, which is not None after the launch."""
    assert part is not None, "launch comes first"
    return part


class Cluster:
    """Owns Ray, the rollout actor, the trainer ranks, the engines and the routers.

    The driver, which runs this class, waits for all other processes, with a deadline, and checks
    twice a second whether one has died. The trainer's rank 0 waits for engines in a push. The
    rollout actor waits for engines and rewards. No actor waits for another actor.

    Args:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        on_progress: called with the rollout's counters while a rollout is waited for.
        on_push: called with the weight version after a push within a rollout, which happens if all
            engines have died.
    Attributes:
        is_sequential: trainer and engines never work at the same time, so each may use all CPU
            cores.
    """

    def __init__(
        self,
        config: Config,
        run_path: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[dict[str, float]], None] = lambda counters: None,
        on_push: Callable[[int], None] = lambda version: None,
    ) -> None:
        self.config = config
        self.run_path = run_path
        self.plan = PlacementPlan.of(config)
        self._should_stop = should_stop
        self._on_progress = on_progress
        self._on_push = on_push
        uses_data = config.algorithm.trains_on_data  # its engines, if any, only evaluate
        self.is_sequential = uses_data or config.sync.async_buffer_size == 0
        self._started_ray = False
        self._slots: GpuSlots | None = None
        self._rollout: RolloutHandle | None = None
        self._trainers: Trainers | None = None
        self._trainers_are_lost = False  # until they are started again
        self._engines: Engines | None = None
        self._gpu_memory: GpuMemoryOwner | None = None
        self._weights: WeightPush | None = None  # if there are engines
        self._canary: Canary | None = None
        self._adapters: AdapterVersions | None = None  # if adapters are trained
        self._generating: dict[int, Generating] = {}  # started and not collected, by rollout id
        self._source_at_launch: dict[str, Any] = {}
        self._watches: list[Watch] = []
        self._progress: Watch | None = None
        engine_seconds = engine_of(config).startup_seconds if self.plan.num_engines else 0.0
        self._limits = (
            max(config.cluster.distributed_timeout_minutes * 60.0, engine_seconds),
            should_stop,
        )

    # -- start and end -----------------------------------------------------------------------------

    def launch(self) -> Launch:
        """Start everything; data, trainer ranks and engines come up at the same time.

        Raises:
            UserError: data are invalid, the model does not load, there are too few GPUs, or an
                engine does not start.
        """
        config = self.config
        clock = LapTimer()
        self._started_ray = start_ray(config, self.plan.total, self._should_stop)
        clock.lap("ray")
        slots = self._slots = reserve(
            self.plan, config.cluster.placement_timeout, self._should_stop
        )
        if not self._started_ray:  # with its own Ray, this host is checked before the launch
            check_memory_of_cluster(
                config, slots.gpu_memory, slots.host_memory, on_gpu=slots.on_gpu
            )
        clock.lap("placement")
        rollout = self._rollout = RolloutHandle(config, self.run_path)
        data = {rollout.worker: rollout.begin_setup()}
        coming_up = dict(data)
        progress = StartupProgress(coming_up, self.run_path / "logs")

        def wait(asked: Mapping[NamedActor, ray.ObjectRef], what: str) -> list[Any]:
            """Wait for ``asked``; a failure of anything that comes up ends the wait."""

            def poll() -> None:
                raise_failed(coming_up, "while the run came up")
                progress.poll()

            return wait_for(asked, what, *self._limits, poll, logs_slow_waits=False)

        engines = self._make_engines(slots)
        trainers = self._make_trainers(slots, config)
        starting = engines.begin_start() if engines is not None else {}
        coming_up.update(starting)
        if engines is not None and self._gpu_memory is not None and self._gpu_memory.is_shared:
            # engines start alone on the GPUs, because they measure the free memory for their caches
            engines.start_routers(wait(starting, "starting"))
            self._gpu_memory.release_for_launch()
            clock.lap("engines")
        setting_up = trainers.begin_setup(self._should_stop) if trainers is not None else {}
        coming_up.update(setting_up)

        num_prompts, warnings = wait(data, "reading the data")[0]
        log_warnings(warnings)
        clock.lap("data")
        start = TrainerStart(config.rollout.start_rollout_id or 0)
        if trainers is not None:
            start = trainers.agreed_start(wait(setting_up, "setting up"))
        clock.lap("trainer")
        if engines is not None and not engines.routers.urls:
            engines.start_routers(wait(starting, "starting"))
            clock.lap("engines")
        self._connect(rollout, start)
        clock.lap("connect")
        return start.launch(num_prompts, clock.seconds)

    def _connect(self, rollout: RolloutHandle, start: TrainerStart) -> None:
        """Connect rollout actor, engines and trainers, which have come up, with the checkpoint's
        data position and weight version."""
        config = self.config
        engines = self._engines
        if engines is not None:
            self._connect_router(rollout, engines)
        self._load_source(config, start)
        if config.fault_tolerance.max_restarts:
            self._source_at_launch = rollout.source_state()
        # continue after the versions in the journal, which may belong to other weights
        self._connect_trainers(
            max(start.extra_state.get("weight_version", 0), rollout.newest_version())
        )
        self._progress = rollout.watch_progress(self._on_progress)

    def _connect_router(self, rollout: RolloutHandle, engines: Engines) -> None:
        """Connect the rollout actor to the router. With --use-fault-tolerance a router that dies
        meanwhile is restarted, and the actor connects to its new address."""
        keys = engines.keys
        for is_last in (not self.config.fault_tolerance.use_fault_tolerance, True):
            try:
                with engines.explain_failures("connecting to the router"):
                    return rollout.connect(engines.routers.url, engines.routers.urls, keys)
            except RunFailed:
                if is_last:
                    raise

    def _load_source(self, config: Config, start: TrainerStart, *, is_again: bool = False) -> None:
        """Restore the data position of the checkpoint, or else that of the launch."""
        if start.saved_for is not None or is_again:
            state = start.extra_state.get("source", self._source_at_launch)
            require_launched(self._rollout).load_source(
                config, start.saved_for, state, is_again=is_again
            )

    def _connect_trainers(self, version: int) -> None:
        """Connect trainer and engines, and watch both.

        Args:
            version: weight version of the engines.
        """
        engines = self._engines
        trainers = self._trainers
        if engines is not None:
            checks = (
                trainers is not None and self.config.debug.check_canary and engines.answers_alone
            )
            tolerant = self.config.fault_tolerance.use_fault_tolerance
            if checks and self._canary is None:
                with engines.explain_failures("asking the engines what they serve"):
                    self._canary = Canary(self.config, engines.fleet)
            if tolerant:
                engines.poll_for_deaths()  # some may have died while the trainers came up
            if self._adapters is None and self.config.lora.lora_rank:
                rollout = require_launched(self._rollout)
                self._adapters = AdapterVersions(
                    rollout.use_adapter,
                    rollout.adapters_in_use,
                    cuts=self.config.sync.update_weights_in_flight,
                )
            self._weights = WeightPush(
                engines,
                trainers,
                self._gpu_memory,
                self._canary,
                tolerant=tolerant,
                adapters=self._adapters,
            )
            self._weights.connect(version)
        self._watches = [group.watch() for group in (trainers, engines) if group is not None]

    def restart_trainers(self, version: int) -> TrainerStart:
        """Restart all trainer ranks from the newest checkpoint; engines and rollout actor stay.

        Rollouts in progress are collected, as long as engines answer, and discarded: their finished
        samples are in the journal. The ranks start meanwhile, unless engines hold the memory of
        their GPUs. Raises the errors of `launch`.

        Args:
            version: weight version of the engines; the next push gets the next number.
        Returns:
            The rollout to continue with, and what the checkpoint holds besides the weights.
        """
        config = config_for_resume(self.config)
        slots = require_launched(self._slots)
        require_launched(self._trainers).close(0.0)
        remove_stale()
        self._watches = [self._engines.watch()] if self._engines is not None else []
        if half_pushed := self._weights is not None and self._weights.is_pushing:
            # paused engines would never finish the rollouts in progress
            require_launched(self._engines).continue_generation()
        pushed = version if half_pushed else None
        shares_memory = self._gpu_memory is not None and self._gpu_memory.is_shared
        if shares_memory:
            self._drain_rollouts(pushed)
        trainers = require_launched(self._make_trainers(slots, config))
        if shares_memory:
            require_launched(self._gpu_memory).release_for_launch()
        setting_up = trainers.begin_setup(self._should_stop)
        if not shares_memory:
            self._drain_rollouts(pushed)
        on_poll = partial(raise_failed, setting_up, "while the trainer restarted")
        starts = wait_for(setting_up, "setting up again", *self._limits, on_poll)
        start = trainers.agreed_start(starts)
        self._load_source(config, start, is_again=True)
        self._connect_trainers(version)
        return start

    def _drain_rollouts(self, pushed: int | None) -> None:
        """Collect and discard the rollouts in progress, as long as engines answer.

        Args:
            pushed: the last complete version if a push was interrupted, else None. Groups with a
                newer version number are dropped: no such weights exist.
        """
        self._trainers_are_lost = True
        try:
            for generating in list(self._generating.values()):
                try:
                    self.collect(generating)
                except NoEngineLeft:
                    del self._generating[generating.rollout_id]
                    require_launched(self._rollout).give_up(generating.rollout_id)
                if pushed is not None:
                    require_launched(self._rollout).forget_newer(generating.rollout_id, pushed)
        finally:
            self._trainers_are_lost = False

    def _make_engines(self, slots: GpuSlots) -> Engines | None:
        if not self.plan.has_engines:
            return None
        threads = threads_per_process(self.plan.num_engines, self.is_sequential)
        self._engines = Engines(
            self.config, self.plan, slots, self.run_path, threads, *self._limits
        )
        return self._engines

    def _make_trainers(self, slots: GpuSlots, config: Config) -> Trainers | None:
        if not self.plan.num_train:
            return None
        flags = config.cluster
        threads = threads_per_process(
            min(self.plan.num_train, flags.actor_num_gpus_per_node)
            + min(self.plan.num_critic, config.critic.critic_num_gpus_per_node),
            self.is_sequential,
        )
        trainers = self._trainers = Trainers(
            config, self.plan, slots, self.run_path, threads, self._poll
        )
        if self._engines is not None:
            shares = flags.colocate and (
                slots.on_gpu or engine_of(self.config).releases_without_gpu
            )
            memory = EngineMemory(
                self._engines.table, self._engines.fleet_of, self._engines.explain_failures
            )
            self._gpu_memory = GpuMemoryOwner(
                memory.release,
                memory.resume,
                trainers.sleep,
                trainers.wake,
                offload_train=shares and flags.offload_train,
                offload_rollout=shares and flags.offload_rollout,
                offload_weights=flags.offload_rollout_weights,
            )
            self._engines.restarts_immediately = not self._gpu_memory.is_shared
        return trainers

    def close(self, *, politely: bool = True) -> None:
        """Stop engines and routers, end actors, release the slots, and stop a Ray started here.

        Args:
            politely: give the processes time to shut down; false after a failure, when some may
                hang because they wait for others that have died.
        """
        if not ray.is_initialized():
            return
        end = time.monotonic() + (
            deadlines.RUN_CLUSTER_EXIT if politely else deadlines.RUN_CLUSTER_EXIT_AFTER_FAILURE
        )
        for group in (self._rollout, self._trainers, self._engines):
            if group is not None:
                group.close(max(0.0, end - time.monotonic()))
        if self._slots is not None:
            self._slots.release()
        self._rollout = self._trainers = self._engines = self._slots = None
        if self._started_ray:
            ray.shutdown()
        remove_stale()  # shared memory of trainers that were killed

    # -- the steps of the loop ---------------------------------------------------------------------

    @property
    def has_engines(self) -> bool:
        return self._engines is not None

    @property
    def has_trainers(self) -> bool:
        return self._trainers is not None

    def start_generating(
        self, rollout_id: int, versions: VersionWindow = ANY_VERSION
    ) -> Generating:
        """Start a rollout with samples of these weight versions; `collect` it later."""
        if self._weights is not None:
            self._weights.wake_engines()
        layout = self._trainers.layout if self._trainers is not None else TrainLayout()
        ref = require_launched(self._rollout).begin_rollout(rollout_id, layout, versions)
        generating = self._generating[rollout_id] = Generating(rollout_id, ref)
        return generating

    def collect(self, generating: Generating) -> RolloutResult:
        """Wait for a rollout; a second call returns at once."""
        result: RolloutResult = self._wait_rollout(generating.ref, "generating", self._should_stop)
        self._generating.pop(generating.rollout_id, None)
        if self._engines is not None:
            self._engines.reset_death_counts()
        return result

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Train on a rollout, then mark its prompts as consumed."""
        rollout = require_launched(self._rollout)
        if self._trainers is None:
            return rollout.mark_consumed(batch.rollout_id)
        with self._trainer_onloaded(), self._forget_batch_on_failure(batch):
            metrics, tokens = self._trainers.train(batch.shards, batch.critic_shards)
        return metrics | rollout.mark_consumed(batch.rollout_id, tokens)

    @contextlib.contextmanager
    def _forget_batch_on_failure(self, batch: RolloutResult) -> Iterator[None]:
        """Remove the batch from the journal if training on it raises, unless ranks were lost.

        A resume would fail on it again.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, StopRequested) and not self.is_loss_of_trainers(error):
                with contextlib.suppress(UserError):  # the first error is the one to report
                    require_launched(self._rollout).forget(batch.rollout_id)
            raise

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics of memory hand-overs and engine restarts since the last call."""
        found = self._gpu_memory.metrics() if self._gpu_memory is not None else {}
        return found | (self._engines.metrics() if self._engines is not None else {})

    def start_profile(self, folder: Path) -> None:
        """Make trainer ranks and engines profile their work, into files in ``folder``, which all
        hosts must see. Engines that cannot do this are named and skipped."""
        if self._trainers is not None:
            self._trainers.start_profile(folder)
        self._ask_profilers(
            "/start_profile", lambda number: {"output_dir": str(folder / f"engine-{number}")}
        )

    def stop_profile(self) -> None:
        """Write the profiles recorded since `start_profile`."""
        if self._trainers is not None:
            self._trainers.stop_profile()
        self._ask_profilers("/stop_profile", lambda number: {})

    def _ask_profilers(self, path: str, body: Callable[[int], dict[str, str]]) -> None:
        if self._engines is None:
            return
        try:
            self._engines.fleet.post(path, body, deadlines.RUN_CLUSTER_PROFILE)
        except EngineError as error:
            logger.warning("engines are not profiled: %s", error)

    def failed_step(self) -> list[FailedStep]:
        """Return each trainer rank's record of a step that just failed with NaN or Inf."""
        return self._trainers.failed_step() if self._trainers is not None else []

    def set_run_length(self, num_rollout: int) -> None:
        """Tell the trainers the number of rollouts, once it is known."""
        if self._trainers is not None:
            self._trainers.set_run_length(num_rollout)

    def update_weights(self) -> dict[str, float]:
        """Push the trainer's weights to the engines (`WeightPush.push`)."""
        return self._weights.push() if self._weights is not None else {}

    def evaluate_preferences(self) -> dict[str, float]:
        """Score the pairs of --eval-preference-data with the trainer's weights; return their
        metrics ``eval/preferences/…``, {} without such pairs."""
        if self._trainers is None or not self.config.preference.eval_preference_data:
            return {}
        rollout = require_launched(self._rollout)
        shards = rollout.held_out(self._trainers.layout)
        with self._trainer_onloaded():
            metrics, tokens = self._trainers.evaluate(shards)
        rollout.keep_references(tokens)
        return metrics

    def begin_evaluation(self, rollout_id: int, *, is_first: bool) -> Generating | None:
        """Start an evaluation of the engines' weights; None if there is nothing to evaluate.

        Args:
            is_first: it comes before any training, not after that on ``rollout_id``.
        """
        if self._engines is None or not has_evaluation(self.config):
            return None
        require_launched(self._weights).wake_engines()
        rollout = require_launched(self._rollout)
        return Generating(rollout_id, rollout.begin_evaluation(rollout_id, is_first))

    def collect_evaluation(self, evaluating: Generating) -> dict[str, float]:
        """Wait for an evaluation and return its metrics ``eval/…``.

        A SIGTERM does not end the wait if the evaluation has already finished.
        """
        should_stop = (lambda: False) if evaluating.ends_within(0.0) else self._should_stop
        return self._wait_rollout(evaluating.ref, "evaluating", should_stop)

    def save(
        self, rollout_id: int, pushed: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write a checkpoint after training on ``rollout_id``.

        It holds the data position, ``pushed`` (see `Saving.save`), and the rollout's metrics, which
        are logged later.
        """
        state = {
            "source": require_launched(self._rollout).save_source(rollout_id),
            "rollout_id": rollout_id,
            **pushed,
        }
        state |= {"weight_version": max(pushed["pushes"], default=0), "metrics": dict(metrics)}
        if self._trainers is not None:
            with self._trainer_onloaded():
                self._trainers.save(rollout_id, state)

    def is_loss_of_trainers(self, error: Exception) -> bool:
        """Return whether the error means that trainer ranks died, hang, or lost contact."""
        ranks = self._trainers.names if self._trainers is not None else set()
        return isinstance(error, ConnectionBroken) or (
            isinstance(error, ActorLost) and bool(ranks & set(error.names))
        )

    def export(self, directory: Path) -> None:
        """Write the trainer's weights as a Hugging Face directory."""
        if self._trainers is not None:
            with self._trainer_onloaded():
                self._trainers.export(directory)

    def describe_unresponsive(self) -> str:
        """Name the processes that could not take part in a save; "" if there are none."""
        stopped = ", ".join(stopped_parts().values())
        if stopped and self._gpu_memory is not None and self._gpu_memory.is_shared:
            return f"{stopped}, which would have to release its memory"
        asked = self._trainers.ping() if self._trainers is not None else {}
        if self._rollout is not None:
            asked[self._rollout.worker] = self._rollout.ping()
        silent = describe_unanswered(asked)
        return silent + (f"; stopped: {stopped}" if silent and stopped else "")

    def finish_saving(self) -> None:
        """Wait for the checkpoint that --async-save may still be writing."""
        if self._trainers is not None:
            with self._explain_failures():
                self._trainers.finish_saving()

    def wait_for_async_save(self, is_saved: Callable[[], bool], seconds: float) -> None:
        """Wait until --async-save has written its checkpoint, for a SIGTERM, or for ``seconds``."""
        end = time.monotonic() + seconds
        if self._trainers is not None:
            self._trainers.wait_for_async_save(
                lambda: is_saved() or self._should_stop() or time.monotonic() > end
            )

    # -- memory and dead engines -------------------------------------------------------------------

    def _trainer_onloaded(self) -> contextlib.AbstractContextManager[None]:
        """Give the trainers their memory; the context explains failures of engines."""
        if self._weights is not None:
            self._weights.onload_trainer()
        return self._explain_failures()

    def _handle_dead_engines(self, engines: Engines) -> None:
        """Restart dead or hanging engines while a rollout is waited for."""
        engines.kill_hanging()
        if self._trainers_are_lost:  # engines come back only with a push
            if not engines.table.in_state(State.SERVING):
                raise NoEngineLeft
        elif self._trainers is None:  # nothing is pushed: restarted engines have the weights
            require_launched(self._weights).rejoin_restarted()
            engines.admit()
        elif not engines.table.policy:
            metrics = self.update_weights()
            self._on_push(int(metrics["perf/weight_version"]))

    # -- waiting -----------------------------------------------------------------------------------

    def _wait_rollout(self, ref: ray.ObjectRef, what: str, should_stop: Callable[[], bool]) -> Any:
        # an outer deadline; the rollout loop has more precise ones
        engines = self._engines
        if engines is not None:
            engines.begin_health_checks()

        def poll() -> None:
            self._poll()
            if engines is not None and self.config.fault_tolerance.use_fault_tolerance:
                self._handle_dead_engines(engines)
            if self._progress is not None:
                self._progress.poll()

        rollout = require_launched(self._rollout)
        limit = self.config.rollout.rollout_timeout
        rollout.shows_evaluation = what == "evaluating"
        with self._explain_failures():
            return wait_for(
                {rollout.worker: ref},
                what,
                limit,
                should_stop,
                poll,
                progress=lambda: rollout.counters,
                details=lambda: rollout.waits,
            )[0]

    def _poll(self) -> None:
        """Raise if a process has died, or, after a SIGTERM, if one is stopped (SIGSTOP)."""
        for watch in self._watches:
            watch.poll()
        if self._engines is not None:
            self._engines.poll()
            if self._generating and self._weights is not None and self._weights.can_generate:
                self._engines.kill_hanging()
        if self._should_stop() and stopped_parts():
            raise StopRequested("while parts of it are stopped")

    def _explain_failures(self) -> contextlib.AbstractContextManager[None]:
        if self._engines is not None:
            return self._engines.explain_failures()
        return contextlib.nullcontext()
