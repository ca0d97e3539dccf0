"""Everything of a run that lives in Ray, as plain blocking verbs for the drivers.

cluster = Cluster(config, run_path)
start = cluster.launch()
batch = cluster.collect(cluster.start_generating(rollout_id))
metrics = cluster.train(batch)
cluster.update_weights()
cluster.close()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from slime.cluster.engine_group import EngineGroup
from slime.cluster.engine_repair import EngineRepair, HealthChecks
from slime.cluster.engine_weights import EngineWeights
from slime.cluster.hand_over import HandOver
from slime.cluster.placement import Slots, reserve
from slime.cluster.ray_session import start_ray
from slime.cluster.rollout_actor import RolloutActor, RolloutResult
from slime.cluster.start_news import StartNews
from slime.cluster.trainer_group import TrainerGroup, TrainerStart, threads_per_process
from slime.cluster.waiting import ActorDied, DeadlinePassed, StopRequested, Watch, raise_failed, wait_for
from slime.config import Config
from slime.engines.kinds import engine_of
from slime.engines.wire.shared_memory import remove_stale
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.memory.check import check_memory_of_cluster
from slime.placement import PlacementPlan, has_evaluation
from slime.samples.batch import TrainLayout

logger = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What the drivers must know once everything runs.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_prompts: prompts per epoch, for --num-epoch; 0 when unknown (streaming) or not needed.
        seconds: time by part of the launch.
    """

    start_rollout_id: int
    num_prompts: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Generating:
    """A rollout that was started and not yet collected."""

    rollout_id: int
    ref: ray.ObjectRef


class Cluster:
    """Owns Ray, the rollout actor, the trainer ranks, the engines and the router; `close` leaves nothing behind.

    Args:
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        on_progress: called with the rollout's counters while a rollout is waited for.
        on_push: called with the version of weights that were pushed although nobody asked for it, since all engines
            had died in the middle of a rollout.
    """

    def __init__(
        self,
        config: Config,
        run_path: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[dict[str, float]], None] | None = None,
        on_push: Callable[[int], None] = lambda version: None,
    ) -> None:
        self.config, self.run_path = config, run_path
        self.plan = PlacementPlan.of(config)
        self._should_stop = should_stop
        self._take_turns = config.sync.async_buffer_size == 0  # each may use all CPU cores
        self._on_progress, self._on_push = on_progress, on_push
        self._started_ray = False
        self._slots: Slots | None = None
        self._rollout: Any = None
        self._trainers: TrainerGroup | None = None
        self._engines: EngineGroup | None = None
        self._hand_over: HandOver | None = None
        self._weights: EngineWeights | None = None
        self._repair: EngineRepair | None = None
        self._watches: list[Watch] = []
        self._progress: Watch | None = None
        self._seconds_limit = config.cluster.distributed_timeout_minutes * 60.0

    # -- life ------------------------------------------------------------------------------------------

    def launch(self) -> Launch:
        """Start everything; data, trainer ranks and engines come up side by side.

        Raises:
            UserError: bad data, a model that does not load, too few GPUs, an engine that does not start.
        """
        config, clock = self.config, _Clock()
        self._started_ray = start_ray(config, num_local_slots=self.plan.total)
        clock.lap("ray")
        self._slots = reserve(self.plan, config.cluster.placement_timeout, self._should_stop)
        if not self._started_ray:  # on a Ray of its own the launch has looked at this host already
            check_memory_of_cluster(config, self._slots.gpu_memory, on_gpu=self._slots.on_gpu)
        clock.lap("placement")
        self._rollout = ray.remote(RolloutActor).options(num_cpus=0, max_concurrency=16).remote(config, self.run_path)
        coming_up = {_ROLLOUT: self._rollout.setup.remote()}
        news = StartNews(coming_up, self.run_path / "logs")
        if self.plan.num_engines:
            threads = threads_per_process(self.plan.num_engines, self._take_turns)
            self._engines = EngineGroup(config, self.plan, self._slots, self.run_path, threads)
            coming_up |= self._engines.begin_start(str(config.checkpoint.hf_checkpoint))

        def wait(names: Sequence[str], what: str) -> list[Any]:
            """For these; but whoever fails first ends it."""
            refs = [coming_up[name] for name in names]

            def look() -> None:
                raise_failed(coming_up, "while the run came up")
                news.look()

            return wait_for(refs, what, self._start_limit(), self._should_stop, look, names)

        if self._engines is not None and self._takes_memory_turns(self._slots):
            # engines first, alone on the GPUs: they measure how much memory there is for their caches
            self._engines.put_routers_in_front(wait(self._engines.names, "starting"), self._should_stop)
            self._hand_over = self._new_hand_over(self._engines)
            self._hand_over.before_trainer()
            clock.lap("engines")
        if self.plan.num_train:
            threads = threads_per_process(self._trainers_per_node(), self._take_turns)
            self._trainers = TrainerGroup(config, self.plan, self._slots, self.run_path, threads)
            coming_up |= self._trainers.start_setup(self._should_stop)

        [num_prompts] = wait([_ROLLOUT], "reading the data")
        clock.lap("data")
        start = TrainerStart(config.rollout.start_rollout_id or 0)
        if self._trainers is not None:
            start = self._trainers.agreed_start(wait(self._trainers.names, "setting up"))
        clock.lap("trainer")
        if self._engines is not None:
            if self._hand_over is None:
                self._engines.put_routers_in_front(wait(self._engines.names, "starting"), self._should_stop)
                clock.lap("engines")
            urls = (self._engines.router_url, self._engines.router_urls)
            self._call_rollout("connect", *urls, what="connecting to the router")
        self._restore(start)
        self._begin_watching()
        clock.lap("connect")
        return Launch(start.start_rollout_id, num_prompts, clock.seconds)

    def _restore(self, start: TrainerStart) -> None:
        if "source" in start.extra_state:
            saved_for = start.extra_state.get("rollout_id", start.start_rollout_id - 1)
            self._call_rollout(
                "load_source", saved_for, start.extra_state["source"], what="restoring the data position"
            )
        if self._engines is not None and self.config.fault_tolerance.use_fault_tolerance:
            limit, stop = self._start_limit(), self._should_stop
            self._repair = EngineRepair(self._engines, self._hand_over, HealthChecks.of(self.config), limit, stop)
        if self._trainers is not None and self._engines is not None:
            self._weights = EngineWeights(
                self.config, self._engines, self._trainers, self._call_trainers, self._hand_over, self._repair
            )
            self._weights.connect(int(start.extra_state.get("weight_version", 0)))

    def close(self, *, politely: bool = True) -> None:
        """Stop engines and router, end actors, give the slots back, stop a Ray that was started here.

        Args:
            politely: let the processes finish what they do at their end; false after a failure, when some of them
                may hang, waiting for others that are gone.
        """
        if not ray.is_initialized():
            return
        patience = 10.0 if politely else 1.0
        if self._rollout is not None:
            ray.wait([self._rollout.close.remote()], timeout=patience)
            ray.kill(self._rollout, no_restart=True)
        if self._trainers is not None:
            self._trainers.close(patience)
        if self._engines is not None:
            self._engines.close(patience)
        if self._slots is not None:
            self._slots.release()
        self._rollout = self._trainers = self._engines = self._slots = None
        if self._started_ray:
            ray.shutdown()
        remove_stale()  # of trainers that were killed

    # -- the verbs of the loop -----------------------------------------------------------------------------

    @property
    def has_engines(self) -> bool:
        return self._engines is not None

    @property
    def has_trainers(self) -> bool:
        return self._trainers is not None

    def start_generating(self, rollout_id: int) -> Generating:
        """Begin a rollout; collect it with `collect`."""
        self._wake_engines()
        method = "load_dump" if self.config.debug.load_debug_rollout_data else "generate"
        layout = self._trainers.layout if self._trainers is not None else TrainLayout()
        return Generating(rollout_id, getattr(self._rollout, method).remote(rollout_id, layout))

    def collect(self, generating: Generating) -> RolloutResult:
        # the rollout loop has its own watchdog, which knows more than this outer deadline
        limit = self.config.rollout.rollout_timeout
        result: RolloutResult = self._wait_rollout(generating.ref, "generating", limit)
        if self._repair is not None:
            self._repair.rollout_completed()
        return result

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Train on a rollout; afterwards its prompts count as consumed."""
        self._give_trainers_memory()
        metrics = self._call_trainers("train", batch.shards, what="training")
        self._call_rollout("mark_consumed", batch.rollout_id, what="noting consumed prompts")
        return metrics[self._trainers.reporting_rank] if self._trainers is not None else {}

    def turns(self) -> dict[str, float]:
        """What happened besides since the last call: handing memory over between trainer and engines
        (``perf/sleep_time``, …), restarts of engines."""
        found = self._hand_over.metrics() if self._hand_over is not None else {}
        return found | (self._repair.metrics() if self._repair is not None else {})

    def failed_step(self) -> list[Any]:
        """What each trainer rank kept of a step with NaN or Inf; to be asked for right after that failure."""
        if self._trainers is None:
            return []
        found = self._trainers.call("failed_step", what="asking for the step that failed", timeout=_ANSWER_SECONDS)
        return [part for part in found if part is not None]

    def set_run_length(self, num_rollout: int) -> None:
        """Tell the trainers how many rollouts there will be, once that is known."""
        self._call_trainers("set_run_length", num_rollout, what="setting the length of the run")

    def update_weights(self) -> dict[str, float]:
        """Push the trainer's weights to the engines, those that were restarted among them."""
        if self._weights is None:
            return {}
        with self._blaming_engines():
            return self._weights.update()

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics ``eval/…``; {} when there is nothing to evaluate."""
        if self._engines is None or not has_evaluation(self.config):
            return {}
        self._wake_engines()
        ref = self._rollout.evaluate.remote(rollout_id)
        limit = self.config.rollout.rollout_timeout
        return self._wait_rollout(ref, "evaluating", limit)

    def save(self, rollout_id: int, weight_version: int) -> None:
        """Checkpoint after training ``rollout_id``, with the data position that training has reached."""
        source = self._call_rollout("save_source", rollout_id, what="asking for the data position")
        state = {"source": source, "rollout_id": rollout_id, "weight_version": weight_version}
        self._give_trainers_memory()
        self._call_trainers("save", rollout_id, state, what="saving a checkpoint")

    def finish_saving(self) -> None:
        """Wait for the checkpoint that --async-save may still be writing."""
        self._call_trainers("finish_saving", what="finishing the checkpoint")

    def settle_save(self, is_saved: Callable[[], bool], seconds: float) -> None:
        """After a failure: let the ranks finish the checkpoint that --async-save is writing.

        Their writers are threads, which go on also where a rank waits in vain for another one that failed in
        training. So the ranks' answers are waited for, or for ``is_saved``, or for the deadline.

        Raises:
            UserError: the save failed. ActorDied: a rank is gone.
        """
        if self._trainers is None:
            return
        refs = self._trainers.begin("finish_saving")
        pending, end = list(refs.values()), time.monotonic() + seconds
        while pending and not is_saved() and not self._should_stop() and time.monotonic() < end:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_SECONDS)
        raise_failed(refs, "finishing the checkpoint")

    # -- inside --------------------------------------------------------------------------------------------

    def _takes_memory_turns(self, slots: Slots) -> bool:
        """Whether trainer and engines hand GPU memory to each other. Without GPUs not every engine has any to give."""
        cluster = self.config.cluster
        shares = cluster.colocate and (cluster.offload_train or cluster.offload_rollout) and self.plan.num_train > 0
        return shares and (slots.on_gpu or engine_of(self.config).releases_without_gpu)

    def _new_hand_over(self, engines: EngineGroup) -> HandOver:
        cluster = self.config.cluster
        return HandOver(
            engines,
            self._call_trainers,
            offload_train=cluster.offload_train,
            offload_rollout=cluster.offload_rollout,
        )

    def _wake_engines(self) -> None:
        """Before they are asked anything. Those that were asleep must still compute what the trainer computed."""
        if self._repair is not None and not self._repair.any_serves():
            return  # whoever waits for the rollout brings them back
        woke = self._hand_over is not None and self._turn(self._hand_over.to_engines)
        if woke and self._weights is not None:
            with self._blaming_engines():
                self._weights.check_canary("taking its memory back")

    def _care_for_engines(self) -> None:
        """While a rollout is waited for."""
        assert self._repair is not None
        self._repair.kill_hanging()
        if self._weights is None:  # there is no trainer: the weights that engines start with are right
            self._repair.bring_back()
            self._repair.admit()
        elif not self._repair.engines.serving:
            metrics = self._weights.update()
            self._on_push(int(metrics["perf/weight_version"]))

    def _give_trainers_memory(self) -> None:
        if self._hand_over is not None:
            if self._repair is not None:
                self._repair.before_release()
            self._turn(self._hand_over.to_trainer)

    def _turn(self, verb: Callable[[], T]) -> T:
        """A verb of the hand-over, once more without the engines that died of it."""
        while True:
            lost = self._repair.num_lost if self._repair is not None else 0
            try:
                return verb()
            except UserError as error:
                if self._repair is None or not self._repair.has_lost_more_than(lost):
                    raise
                logger.warning("an engine died while memory was handed over, which is repeated: %s", error.what)

    def _start_limit(self) -> float:
        """Seconds for everything to come up: engines may compile and capture graphs for minutes."""
        return max(self._seconds_limit, engine_of(self.config).startup_seconds if self._engines is not None else 0.0)

    def _trainers_per_node(self) -> int:
        return min(self.plan.num_train, self.config.cluster.actor_num_gpus_per_node)

    def _call_rollout(self, method: str, *args: Any, what: str) -> Any:
        ref = getattr(self._rollout, method).remote(*args)
        return wait_for([ref], what, self._seconds_limit, names=[_ROLLOUT])[0]

    def _wait_rollout(self, ref: ray.ObjectRef, what: str, limit: float) -> Any:
        if self._repair is not None:
            self._repair.begin_rollout()

        def poll() -> None:
            self._look()
            if self._repair is not None:
                self._care_for_engines()
            if self._progress is not None:
                self._progress.look()

        with self._blaming_engines():
            return wait_for([ref], what, limit, self._should_stop, poll, names=[_ROLLOUT])[0]

    def _call_trainers(self, method: str, *args: Any, what: str) -> list[Any]:
        if self._trainers is None:
            return [{}]
        with self._blaming_engines():
            return self._trainers.call(method, *args, what=what, timeout=self._train_limit(), on_poll=self._look)

    def _train_limit(self) -> float:
        # collectives inside have the process group's time-out; this outer one only catches what that cannot see
        return max(3600.0, 4 * self._seconds_limit)

    def _begin_watching(self) -> None:
        """From now on whoever dies ends the wait for the others."""
        if self._trainers is not None:
            self._watches.append(self._trainers.watch())
        if self._repair is not None:
            self._watches.append(self._repair.watch())
        elif self._engines is not None:
            self._watches.append(self._engines.watch())
        show = self._on_progress
        if show is not None:
            self._progress = Watch({_ROLLOUT: self._rollout}, "progress", lambda name, counters: show(counters))

    def _look(self) -> None:
        for watch in self._watches:
            watch.look()
        if self._repair is not None:
            self._repair.look()

    @contextmanager
    def _blaming_engines(self) -> Iterator[None]:
        """When the block fails and an engine or the router is dead, that is the reason."""
        try:
            yield
        except (ActorDied, StopRequested):
            raise
        except Exception as error:
            if self._engines is not None and not isinstance(error, RunFailed):
                with contextlib.suppress(ActorDied, DeadlinePassed):  # the error at hand says more
                    if self._repair is not None:
                        self._repair.ask()
                    else:
                        self._engines.raise_if_dead(patience=_DEATH_SECONDS)
            raise


_ROLLOUT = "rollout"
_ANSWER_SECONDS = 120.0  # for what a process has at hand
_POLL_SECONDS = 0.5
_DEATH_SECONDS = 1.0  # connections may break before the process is gone


class _Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
