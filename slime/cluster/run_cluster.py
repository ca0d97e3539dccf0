"""Everything of a run that lives in Ray, as plain blocking verbs for the drivers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime import deadlines
from slime.checkpoints.load_plan import going_on
from slime.cluster.engine_table import State
from slime.cluster.engines import Engines
from slime.cluster.gpu_memory import EngineMemory, GpuMemoryOwner
from slime.cluster.launch import Generating, LapTimer, Launch, connect, require_launched
from slime.cluster.placement import GpuSlots
from slime.cluster.ray_session import reserve, start_ray
from slime.cluster.rollout_actor import RolloutHandle, RolloutResult
from slime.cluster.slow_waits import stopped_parts
from slime.cluster.trainer_group import Trainers, TrainerStart, threads_per_process
from slime.cluster.waiting import (
    ActorLost,
    ConnectionBroken,
    NamedActor,
    NoEngineLeft,
    StartupProgress,
    StopRequested,
    Watch,
    raise_failed,
    wait_for,
    who_does_not_answer,
)
from slime.cluster.weight_push import WeightPush
from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.engines.wire.shared_memory import remove_stale
from slime.errors import UserError
from slime.log import get_logger
from slime.memory.check import check_memory_of_cluster
from slime.placement import PlacementPlan, has_evaluation
from slime.samples.batch import TrainLayout
from slime.samples.types import ANY_VERSION, VersionWindow
from slime.weights.canary import Canary

if TYPE_CHECKING:
    from slime.trainer.non_finite import FailedStep

logger = get_logger(__name__)


class Cluster:
    """Owns Ray, the rollout actor, the trainer ranks, the engines and the router; `close` leaves
    nothing behind.

    Who waits for whom: the driver, here, for everybody, with a deadline, while it looks about twice
    a second whether somebody died; the trainer's rank 0 for engines in a push; the rollout actor
    for engines and rewards. An actor waits for no other actor.

    Args:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        on_progress: called with the rollout's counters while a rollout is waited for.
        on_push: called with the version of weights that were pushed unasked, as all engines had
            died in a rollout.
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
        is_sft = config.algorithm.loss_type == "sft_loss"  # its engines, if any, evaluate
        self.take_turns = is_sft or config.sync.async_buffer_size == 0  # each may use all CPU cores
        self._started_ray = False
        self._slots: GpuSlots | None = None
        self._rollout: RolloutHandle | None = None
        self._trainers: Trainers | None = None
        self._lacks_trainers = False  # they are lost, and not started again yet
        self._engines: Engines | None = None
        self._turns: GpuMemoryOwner | None = None
        self._weights: WeightPush | None = None  # where there are engines
        self._canary: Canary | None = None
        self._generating: dict[int, Generating] = {}
        """Begun and not collected, by rollout."""
        self._source_at_launch: dict[str, Any] = {}
        self._watches: list[Watch] = []
        self._progress: Watch | None = None
        engine_seconds = engine_of(config).startup_seconds if self.plan.num_engines else 0.0
        self._limits = (
            max(config.cluster.distributed_timeout_minutes * 60.0, engine_seconds),
            should_stop,
        )

    # -- life
    # ------------------------------------------------------------------------------------------

    def launch(self) -> Launch:
        """Start everything; data, trainer ranks and engines come up side by side.

        Raises:
            UserError: bad data, a model that does not load, too few GPUs, an engine that does not
                start.
        """
        config = self.config
        clock = LapTimer()
        self._started_ray = start_ray(config, self.plan.total, self._should_stop)
        clock.lap("ray")
        slots = self._slots = reserve(
            self.plan, config.cluster.placement_timeout, self._should_stop
        )
        if not self._started_ray:  # on a Ray of its own the launch has looked at this host already
            check_memory_of_cluster(config, slots.gpu_memory, on_gpu=slots.on_gpu)
        clock.lap("placement")
        rollout = self._rollout = RolloutHandle(config, self.run_path)
        data = {rollout.worker: rollout.begin_setup()}
        coming_up = dict(data)
        news = StartupProgress(coming_up, self.run_path / "logs")

        def wait(asked: Mapping[NamedActor, ray.ObjectRef], what: str) -> list[Any]:
            """For these; but whoever fails first ends it."""

            def look() -> None:
                raise_failed(coming_up, "while the run came up")
                news.look()

            # the news of the start say more than a silence would
            return wait_for(asked, what, *self._limits, look, breaks_silence=False)

        engines = self._make_engines(slots)
        trainers = self._make_trainers(slots, config)
        starting = engines.begin_start() if engines is not None else {}
        coming_up.update(starting)
        if engines is not None and self._turns is not None and self._turns.taken:
            # engines first, alone on the GPUs: they measure how much memory there is for their
            # caches
            engines.put_routers_in_front(wait(starting, "starting"))
            self._turns.before_trainer()
            clock.lap("engines")
        setting_up = trainers.begin_setup(self._should_stop) if trainers is not None else {}
        coming_up.update(setting_up)

        num_prompts = rollout.set_up(*wait(data, "reading the data")[0])
        clock.lap("data")
        start = TrainerStart(config.rollout.start_rollout_id or 0)
        if trainers is not None:
            start = trainers.agreed_start(wait(setting_up, "setting up"))
        clock.lap("trainer")
        if engines is not None:
            if not engines.routers.urls:
                engines.put_routers_in_front(wait(starting, "starting"))
                clock.lap("engines")
            tell = rollout.connect
            front = engines.routers
            tolerant = config.fault_tolerance.use_fault_tolerance
            connect(
                lambda: tell(front.url, front.urls, engines.keys),
                engines.explained,
                tolerant=tolerant,
            )
        self._load_source(config, start)
        if config.fault_tolerance.max_restarts:
            self._source_at_launch = rollout.source_state()
        # a version in the journal may be of other weights than those that are pushed now
        self._introduce(max(start.extra_state.get("weight_version", 0), rollout.newest_version()))
        self._progress = rollout.watch_progress(self._on_progress)
        clock.lap("connect")
        return start.launch(num_prompts, clock.seconds)

    def _load_source(self, config: Config, start: TrainerStart, *, is_again: bool = False) -> None:
        """Set the data to where the checkpoint says; without one to where the launch began."""
        if start.saved_for is not None or is_again:
            state = start.extra_state.get("source", self._source_at_launch)
            require_launched(self._rollout).load_source(
                config, start.saved_for, state, is_again=is_again
            )

    def _introduce(self, version: int) -> None:
        """Trainer and engines to each other, and both to the driver.

        Args:
            version: of the weights that the engines have.
        """
        engines = self._engines
        trainers = self._trainers
        if engines is not None:
            checks = (
                trainers is not None and self.config.debug.check_canary and engines.answers_alone
            )
            tolerant = self.config.fault_tolerance.use_fault_tolerance
            if checks and self._canary is None:
                with engines.explained("asking the engines what they serve"):
                    self._canary = Canary(self.config, engines.fleet)
            if tolerant:
                engines.poll_for_deaths()  # who has died while the trainers came up
            self._weights = WeightPush(
                engines, trainers, self._turns, self._canary, tolerant=tolerant
            )
            self._weights.connect(version)
        self._watches = [group.watch() for group in (trainers, engines) if group is not None]

    def restart_trainers(self, version: int) -> TrainerStart:
        """Start all trainer ranks again from the newest checkpoint; engines and rollout actor stay.
        What is being generated is waited for, while engines answer, and thrown away: what was
        finished is in the journal. The ranks come up meanwhile, unless engines have their GPUs'
        memory then. Raises as `launch`.

        Args: version: of the engines' weights, so that the numbers of pushes go on.
        Returns: the rollout to go on with, and what its checkpoint has besides the weights.
        """
        config = going_on(self.config)
        slots = require_launched(self._slots)
        require_launched(self._trainers).close(0.0)
        remove_stale()
        self._watches = [self._engines.watch()] if self._engines is not None else []
        if half_pushed := self._weights is not None and self._weights.is_pushing:
            require_launched(
                self._engines
            ).continue_generation()  # or what is under way would wait for ever
        pushed = version if half_pushed else None
        takes_turns = self._turns is not None and self._turns.taken
        if takes_turns:
            self._end_rollouts(pushed)
        trainers = require_launched(self._make_trainers(slots, config))
        if takes_turns:
            require_launched(self._turns).before_trainer()
        setting_up = trainers.begin_setup(self._should_stop)
        if not takes_turns:
            self._end_rollouts(pushed)
        look = partial(raise_failed, setting_up, "as the trainer came up again")
        start = trainers.agreed_start(wait_for(setting_up, "setting up again", *self._limits, look))
        self._load_source(config, start, is_again=True)
        self._introduce(version)
        return start

    def _end_rollouts(self, pushed: int | None) -> None:
        """Without trainers, as long as engines answer. What is called newer than what was
        ``pushed`` last, since a push was under way that will not come to its end, is of no weights
        that ever were, and is forgotten."""
        self._lacks_trainers = True
        try:
            for generating in list(self._generating.values()):
                try:
                    self.collect(generating)
                except NoEngineLeft:
                    require_launched(self._rollout).give_up(
                        self._generating.pop(generating.rollout_id).rollout_id
                    )
                if pushed is not None:
                    require_launched(self._rollout).forget_newer(generating.rollout_id, pushed)
        finally:
            self._lacks_trainers = False

    def _make_engines(self, slots: GpuSlots) -> Engines | None:
        if not self.plan.has_engines:
            return None
        threads = threads_per_process(self.plan.num_engines, self.take_turns)
        self._engines = Engines(
            self.config, self.plan, slots, self.run_path, threads, *self._limits
        )
        return self._engines

    def _make_trainers(self, slots: GpuSlots, config: Config) -> Trainers | None:
        """And whose turn it is, where engines share the GPUs."""
        if not self.plan.num_train:
            return None
        flags = config.cluster
        threads = threads_per_process(
            min(self.plan.num_train, flags.actor_num_gpus_per_node), self.take_turns
        )
        trainers = self._trainers = Trainers(
            config, self.plan, slots, self.run_path, threads, self._look
        )
        if self._engines is not None:
            shares = flags.colocate and (
                slots.on_gpu or engine_of(self.config).releases_without_gpu
            )
            memory = EngineMemory(
                self._engines.table, self._engines.fleet_of, self._engines.explained
            )
            train = shares and flags.offload_train
            rollout = shares and flags.offload_rollout
            sides = memory.release, memory.resume, trainers.sleep, trainers.wake
            self._turns = GpuMemoryOwner(*sides, offload_train=train, offload_rollout=rollout)
            self._engines.restarts_at_once = not self._turns.taken
        return trainers

    def close(self, *, politely: bool = True) -> None:
        """Stop engines and router, end actors, give the slots back, stop a Ray that was started
        here.

        Args:
            politely: let the processes finish what they do at their end; false after a failure,
                when some of them may hang, waiting for others that are gone.
        """
        if not ray.is_initialized():
            return
        end = time.monotonic() + (
            deadlines.RUN_CLUSTER_POLITE if politely else deadlines.RUN_CLUSTER_HASTY
        )
        for group in (self._rollout, self._trainers, self._engines):
            if group is not None:
                group.close(max(0.0, end - time.monotonic()))
        if self._slots is not None:
            self._slots.release()
        self._rollout = self._trainers = self._engines = self._slots = None
        if self._started_ray:
            ray.shutdown()
        remove_stale()  # of trainers that were killed

    # -- the verbs of the loop
    # -----------------------------------------------------------------------------

    @property
    def has_engines(self) -> bool:
        return self._engines is not None

    @property
    def has_trainers(self) -> bool:
        return self._trainers is not None

    def start_generating(
        self, rollout_id: int, versions: VersionWindow = ANY_VERSION
    ) -> Generating:
        """Begin a rollout with samples of these weights; collect it with `collect`."""
        if self._weights is not None:
            self._weights.wake_engines()
        layout = self._trainers.layout if self._trainers is not None else TrainLayout()
        begun = Generating(
            rollout_id, require_launched(self._rollout).begin_rollout(rollout_id, layout, versions)
        )
        self._generating[rollout_id] = begun
        return begun

    def collect(self, generating: Generating) -> RolloutResult:
        """Wait for a rollout; asked again, it is there."""
        result: RolloutResult = self._wait_rollout(generating.ref, "generating", self._should_stop)
        self._generating.pop(generating.rollout_id, None)
        if self._engines is not None:
            self._engines.reset_death_counts()
        return result

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Train on a rollout; afterwards its prompts count as consumed."""
        rollout = require_launched(self._rollout)
        if self._trainers is None:
            return rollout.mark_consumed(batch.rollout_id)
        with self._trainers_turn(), self._forgotten_on_failure(batch):
            metrics, tokens = self._trainers.train(batch.shards)
        return metrics | rollout.mark_consumed(batch.rollout_id, tokens)

    @contextlib.contextmanager
    def _forgotten_on_failure(self, batch: RolloutResult) -> Iterator[None]:
        """A batch that training fails of would be trained on for ever by those who go on; a loss of
        ranks says nothing of it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, StopRequested) and not self.lost_trainers(error):
                with contextlib.suppress(UserError):  # the error at hand is the one to tell
                    require_launched(self._rollout).forget(batch.rollout_id)
            raise

    def turns(self) -> dict[str, float]:
        """What happened besides since the last call: memory handed over (``perf/sleep_time``, …),
        engines restarted."""
        found = self._turns.metrics() if self._turns is not None else {}
        return found | (self._engines.metrics() if self._engines is not None else {})

    def failed_step(self) -> list[FailedStep]:
        """What each trainer rank kept of a step with NaN or Inf; to be asked for right after that
        failure."""
        return self._trainers.failed_step() if self._trainers is not None else []

    def set_run_length(self, num_rollout: int) -> None:
        """Tell the trainers how many rollouts there will be, once that is known."""
        if self._trainers is not None:
            self._trainers.set_run_length(num_rollout)

    def update_weights(self) -> dict[str, float]:
        """Push the trainer's weights to the engines; those that were restarted come back with it
        (`WeightPush`)."""
        return self._weights.push() if self._weights is not None else {}

    def begin_evaluation(self, rollout_id: int) -> Generating | None:
        """With the weights that the engines hold now; None when there is nothing to evaluate."""
        if self._engines is None or not has_evaluation(self.config):
            return None
        require_launched(self._weights).wake_engines()
        return Generating(rollout_id, require_launched(self._rollout).begin_evaluation(rollout_id))

    def collect_evaluation(self, evaluating: Generating) -> dict[str, float]:
        """Wait for an evaluation: metrics ``eval/…``. One that has ended is there, also after a
        SIGTERM."""
        should_stop = (lambda: False) if evaluating.ends_within(0.0) else self._should_stop
        found: dict[str, float] = self._wait_rollout(evaluating.ref, "evaluating", should_stop)
        return found

    def save(
        self, rollout_id: int, pushed: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Checkpoint after training ``rollout_id``, with the data position that training has
        reached, what was ``pushed`` (see `Saving.save`), and the rollout's metrics, which are
        logged later."""
        state = {
            "source": require_launched(self._rollout).save_source(rollout_id),
            "rollout_id": rollout_id,
            **pushed,
        }
        state |= {"weight_version": max(pushed["pushes"], default=0), "metrics": dict(metrics)}
        if self._trainers is not None:
            with self._trainers_turn():
                self._trainers.save(rollout_id, state)

    def lost_trainers(self, error: Exception) -> bool:
        """Whether it tells that trainer ranks died, do not answer, or lost each other."""
        ranks = self._trainers.names if self._trainers is not None else set()
        return isinstance(error, ConnectionBroken) or (
            isinstance(error, ActorLost) and bool(ranks & set(error.names))
        )

    def export(self, directory: Path) -> None:
        """The trainer's weights as a Hugging Face directory."""
        if self._trainers is not None:
            with self._trainers_turn():
                self._trainers.export(directory)

    def who_is_silent(self) -> str:
        """Who could not take part in a save, "" for nobody: asked before one that must not take for
        ever."""
        stopped = ", ".join(stopped_parts().values())
        if stopped and self._turns is not None and self._turns.taken:
            return f"{stopped}, which would have to give its memory up"
        asked = self._trainers.ping() if self._trainers is not None else {}
        if self._rollout is not None:
            asked[self._rollout.worker] = self._rollout.ping()
        silent = who_does_not_answer(asked)
        return silent + (f"; stopped: {stopped}" if silent and stopped else "")

    def finish_saving(self) -> None:
        """Wait for the checkpoint that --async-save may still be writing."""
        if self._trainers is not None:
            with self._explained():
                self._trainers.finish_saving()

    def settle_save(self, is_saved: Callable[[], bool], seconds: float) -> None:
        """`Trainers.settle_save` until what --async-save writes ``is_saved``, a SIGTERM, or so many
        seconds later."""
        end = time.monotonic() + seconds
        if self._trainers is not None:
            self._trainers.settle_save(
                lambda: is_saved() or self._should_stop() or time.monotonic() > end
            )

    # -- turns and care
    # --------------------------------------------------------------------------------------

    def _trainers_turn(self) -> contextlib.AbstractContextManager[None]:
        """The trainers have their memory from now on; in the context, errors are explained."""
        if self._weights is not None:
            self._weights.onload_trainer()
        return self._explained()

    def _care_for(self, engines: Engines) -> None:
        """While a rollout is waited for, with --use-fault-tolerance."""
        engines.kill_hanging()
        if self._lacks_trainers:  # without a push no engine comes back
            if not engines.table.those(State.SERVING):
                raise NoEngineLeft
        elif self._trainers is None:  # the weights that engines start with are right
            require_launched(self._weights).take_in()
            engines.admit()
        elif not engines.table.policy:
            metrics = self.update_weights()
            self._on_push(int(metrics["perf/weight_version"]))

    # -- waiting
    # ---------------------------------------------------------------------------------------------

    def _wait_rollout(self, ref: ray.ObjectRef, what: str, should_stop: Callable[[], bool]) -> Any:
        """The rollout loop has its own watchdog, which knows more than this outer deadline."""
        engines = self._engines
        if engines is not None:
            engines.begin_rollout()

        def poll() -> None:
            self._look()
            if engines is not None and self.config.fault_tolerance.use_fault_tolerance:
                self._care_for(engines)
            if self._progress is not None:
                self._progress.look()

        rollout = require_launched(self._rollout)
        limit = self.config.rollout.rollout_timeout
        rollout.shows_evaluation = what == "evaluating"
        signs = (lambda: rollout.counters), (lambda: rollout.waits)
        with self._explained():
            return wait_for({rollout.worker: ref}, what, limit, should_stop, poll, *signs)[0]

    def _look(self) -> None:
        """Whoever died ends the wait for the others; and where some part is stopped, so does a
        SIGTERM."""
        for watch in self._watches:
            watch.look()
        if self._engines is not None:
            self._engines.look()
            if (
                self._generating and self._weights is not None and self._weights.can_generate
            ):  # beside the trainer
                self._engines.kill_hanging()
        if self._should_stop() and stopped_parts():
            raise StopRequested("while parts of it are stopped")

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        return self._engines.explained() if self._engines is not None else contextlib.nullcontext()
