"""A run: the verbs of the loop (`slime.loop`), what is due when, its folder and metrics, signals, and how it ends."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slime.checkpoints.directory import discard_partial, is_saved, iteration_name, newest_whole
from slime.cluster.rollout_actor import RolloutResult
from slime.cluster.run_cluster import Cluster, Generating, Launch
from slime.cluster.waiting import StopRequested
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger, setup_logging
from slime.memory.check import check_memory
from slime.memory.hardware import is_on_gpu
from slime.memory.measured import Measured
from slime.memory.plan import MemoryPlan
from slime.observe.report import write_report
from slime.observe.run_folder import RunFolder
from slime.observe.sinks import Sinks
from slime.preflight import joins_cluster, preflight

logger = get_logger(__name__)

#: How long a run that failed waits for the checkpoint that is being written; the processes may be in any state.
_SAVE_SECONDS = 600.0


class Session:
    """One run of one driver: owns the run folder, the sinks and the cluster, and turns SIGTERM into a clean end.

    ``step`` in all metrics is the number of rollouts trained on so far: what is evaluated before training is step
    0, rollout k's training is step k + 1.
    """

    def __init__(self, config: Config, *, resuming: bool) -> None:
        self.config = config
        self.run = RunFolder.create(config, resuming=resuming)
        setup_logging("driver", config.observe.log_level, self.run.path / "logs")
        self.sinks = Sinks(config, self.run)
        self._stop = threading.Event()
        self.cluster = Cluster(
            config,
            self.run.path,
            should_stop=self._stop.is_set,
            on_progress=self.sinks.progress,
            on_push=self._pushed,
        )
        self.start_rollout_id = 0
        self.num_rollout = 0
        self.num_prompts = 0
        self.weight_version = 0
        self._trained_at_push: dict[int, int] = {}
        """Weight version → rollouts that had been trained on when it was pushed."""
        self._memory = Measured(MemoryPlan.of(config)) if is_on_gpu(config) else None
        self._last_trained: int | None = None
        self._not_logged: dict[str, float] = {}
        self._save_begun: int | None = None
        self._last_saved: int | None = None
        """Handed over to be written; with --async-save not yet written."""
        self._state = "failed"

    # -- start and end ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Bring everything up and push the trainer's weights once, so that a broken push shows before any rollout."""
        with self.sinks.phase("launch"):
            launch = self.cluster.launch()
        self.run.set_state("launched")
        self.start_rollout_id = launch.start_rollout_id
        self.num_prompts = launch.num_prompts
        self.num_rollout = self._count_rollouts(launch)
        if self.config.rollout.num_rollout is None:
            self.cluster.set_run_length(self.num_rollout)
        self.sinks.begin(self.start_rollout_id, self.num_rollout, sum(launch.seconds.values()))
        logger.info("launched: %s", ", ".join(f"{name} {t:.1f} s" for name, t in launch.seconds.items()))
        self.update_weights()
        self.cluster.turns()  # those of the launch belong to no step

    def _count_rollouts(self, launch: Launch) -> int:
        rollout = self.config.rollout
        if rollout.num_rollout is not None:
            return rollout.num_rollout
        if not launch.num_prompts:
            raise UserError(
                "--num-epoch needs the number of prompts, which a streamed data set does not tell",
                fix="pass --num-rollout, or leave --streaming-data out",
            )
        assert self.config.data.num_epoch is not None
        per_epoch = launch.num_prompts // rollout.rollout_batch_size
        if per_epoch == 0:
            raise UserError(
                f"the data has {launch.num_prompts} prompts, less than one --rollout-batch-size"
                f" of {rollout.rollout_batch_size}",
                fix="lower --rollout-batch-size, or pass --num-rollout (prompts are then used again in a new epoch)",
            )
        return per_epoch * self.config.data.num_epoch

    def close(self) -> None:
        """Leave nothing running. A second Ctrl-C meanwhile ends the driver at once; what it owns goes with it."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.cluster.close(politely=self._state == "finished")
        flags = self.config.checkpoint
        if flags.save is not None and self._save_begun is not None:  # whoever wrote it is gone now
            final = Path(flags.save) / iteration_name(self._save_begun)
            if discard_partial(final):
                logger.warning("%s was not finished; what there was of it is removed", final)
        self.sinks.close(self._state)

    # -- steps -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.start_rollout_id if self._last_trained is None else self._last_trained + 1

    def log(self, metrics: dict[str, float]) -> None:
        if metrics:
            metrics |= self.cluster.turns()
            self.sinks.log(self.step, metrics)
        for line in self._memory.look(metrics) if self._memory is not None else ():
            logger.warning("%s", line)
        self._not_logged = {}

    @property
    def rollout_ids(self) -> range:
        """Of this launch; training on a rollout is a step of the run."""
        return range(self.start_rollout_id, self.num_rollout)

    def start_generating(self, rollout_id: int) -> Generating:
        """Begin a rollout, which goes on beside the trainer; `collect` it."""
        return self.cluster.start_generating(rollout_id)

    def collect(self, generating: Generating) -> RolloutResult:
        """Wait for a rollout. The seconds are ``perf/rollout_time`` in lock step, else ``perf/train_wait_time``."""
        with self.sinks.phase("train_wait" if self.config.sync.async_buffer_size else "rollout"):
            return self.cluster.collect(generating)

    def wait_for(self, generating: Iterable[Generating]) -> None:
        """Until these are generated; they can be collected afterwards."""
        pending = list(generating)
        if pending:
            with self.sinks.phase("generation_wait"):
                for one in pending:
                    self.cluster.collect(one)

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Train on a rollout: all its optimizer steps. The metrics may grow until they are logged, or the run is
        left."""
        with self.sinks.phase("train"):
            metrics = batch.metrics | self.staleness(batch.versions) | self.cluster.train(batch)
        self.trained(batch.rollout_id, metrics)
        return metrics

    def trained(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._last_trained, self._not_logged = rollout_id, metrics

    def update_weights(self) -> dict[str, float]:
        with self.sinks.phase("update_weights"):
            metrics = self.cluster.update_weights()
        self._pushed(int(metrics.get("perf/weight_version", self.weight_version)))
        return metrics

    def _pushed(self, version: int) -> None:
        self.weight_version = version
        self._trained_at_push[version] = self.step

    def staleness(self, versions: dict[int, int]) -> dict[str, float]:
        """How far the trainer has moved on since the weights that generated a batch, in rollouts trained on.

        Args:
            versions: weight version → samples that it generated (`RolloutResult.versions`).
        """
        if not versions or not self.cluster.has_trainers:
            return {}
        behind = {version: self.step - self._trained_when(version) for version in versions}
        mean = sum(behind[version] * count for version, count in versions.items()) / sum(versions.values())
        return {"rollout/staleness/mean": mean, "rollout/staleness/max": float(max(behind.values()))}

    def _trained_when(self, version: int) -> int:
        """Rollouts that had been trained on when ``version`` was pushed; before this launch, by the interval."""
        if version in self._trained_at_push:
            return self._trained_at_push[version]
        first = min(self._trained_at_push)
        return self._trained_at_push[first] - (first - version) * self.config.sync.update_weights_interval

    @property
    def evaluates_first(self) -> bool:
        """Evaluate before training: on a fresh start unless switched off, and always when nothing is trained."""
        if self.num_rollout == 0:
            return True
        return self.start_rollout_id == 0 and not self.config.eval.skip_eval_before_train

    def should_push(self, rollout_id: int) -> bool:
        """Every --update-weights-interval rollouts, and before every evaluation."""
        due = (rollout_id + 1) % self.config.sync.update_weights_interval == 0
        return self.cluster.has_engines and (due or self.should_evaluate(rollout_id))

    def should_evaluate(self, rollout_id: int) -> bool:
        interval = self.config.eval.eval_interval
        return interval is not None and self._is_due(rollout_id, interval)

    @property
    def _saves(self) -> bool:
        flags = self.config.checkpoint
        return self.cluster.has_trainers and bool(flags.save or flags.save_hf)

    def should_save(self, rollout_id: int) -> bool:
        if not self._saves or self._last_saved == rollout_id:
            return False
        interval = self.config.checkpoint.save_interval
        last = rollout_id + 1 == self.num_rollout
        return last or (interval is not None and self._is_due(rollout_id, interval))

    def _is_due(self, rollout_id: int, interval: int) -> bool:
        """Every ``interval`` rollouts, at the end of each epoch, and after the last."""
        number = rollout_id + 1
        per_epoch = self.num_prompts // self.config.rollout.rollout_batch_size if self.num_prompts else 0
        epoch_end = bool(per_epoch) and number % per_epoch == 0 and self.config.data.num_epoch is not None
        return number == self.num_rollout or epoch_end or number % interval == 0

    def save(self, rollout_id: int) -> None:
        self._save_begun = rollout_id
        with self.sinks.phase("save_model"):
            self.cluster.save(rollout_id, self.weight_version)
        self._last_saved = rollout_id

    def finish_saving(self) -> None:
        """Wait for the last checkpoint, which --async-save writes behind training."""
        if self._last_saved is not None and self.config.checkpoint.async_save:
            with self.sinks.phase("save_model"):
                self.cluster.finish_saving()

    def settle_save(self) -> None:
        """The run ends early: give the checkpoint that --async-save is writing time to become whole."""
        flags, rollout_id = self.config.checkpoint, self._last_saved
        if not (flags.async_save and flags.save) or rollout_id is None or is_saved(Path(flags.save), rollout_id):
            return
        root = Path(flags.save)
        logger.warning(
            "the checkpoint of rollout %d is still being written: waiting for it, %.0f s at most; Ctrl-C gives it up",
            rollout_id, _SAVE_SECONDS,
        )  # fmt: skip
        self._stop.clear()
        try:
            self.cluster.settle_save(lambda: is_saved(root, rollout_id), _SAVE_SECONDS)
        except KeyboardInterrupt:
            logger.warning("the checkpoint of rollout %d is given up", rollout_id)
        except UserError as problem:
            logger.error("the checkpoint of rollout %d is lost: %s", rollout_id, problem)

    def _newest_checkpoint(self) -> str | None:
        """For people: where the run can go on from. None for a run that has not trained, or saves nothing."""
        root = self.config.checkpoint.save
        if root is None or self._last_trained is None or not self.cluster.has_trainers:
            return None
        newest = newest_whole(Path(root))
        return f"newest whole checkpoint: {newest}" if newest else f"there is no whole checkpoint in {root} yet"

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        with self.sinks.phase("evaluate"):
            return self.cluster.evaluate(rollout_id)

    def ended(self, state: str) -> None:
        self._state = state

    def leave(self) -> None:
        """After SIGTERM: keep the last completed step, unless it is on disk already."""
        self._stop.clear()  # the save must be waited for
        self._state = "stopped"
        self.log(self._not_logged)
        if self._last_trained is not None and self._last_saved != self._last_trained and self._saves:
            self.save(self._last_trained)
            logger.info("saved rollout %d before leaving", self._last_trained)
        self.finish_saving()

    def interrupted(self) -> None:
        """After Ctrl-C: leave, but not without a checkpoint that is nearly there."""
        self._state = "stopped"
        self.settle_save()
        if newest := self._newest_checkpoint():
            logger.info("%s", newest)

    def failed(self, error: BaseException) -> None:
        """Keep what explains the failure, and say in the error where it is."""
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        if folder is not None and "slime.train.non_finite" in sys.modules:  # imported by nothing here but such an error
            self._keep_failed_step(error, folder)
        self.settle_save()
        if newest := self._newest_checkpoint():
            error.add_note(newest)
        error.add_note(f"details: {folder or 'not written, see above'}; every process's log: {self.run.logs}")

    def _keep_failed_step(self, error: BaseException, folder: Path) -> None:
        """Write the samples and tensors of a step with NaN or Inf, and name the files in the error."""
        from slime.prompts.tokenizer import load_tokenizer
        from slime.train.non_finite import NonFiniteTraining, write_failed_step

        if not isinstance(error, NonFiniteTraining):
            return
        try:
            assert self.config.checkpoint.hf_checkpoint is not None
            tokenizer = load_tokenizer(self.config.checkpoint.hf_checkpoint)
            files = write_failed_step(folder, self.cluster.failed_step(), tokenizer)
        except (OSError, UserError) as problem:  # the failure itself is what must be seen
            logger.error("could not write the failed step to %s: %s", folder, problem)
            return
        error.add_note(f"the step's samples: {files[0]}; losses and gradients: {files[1]}; tensors: {files[2]}")

    # -- signals ---------------------------------------------------------------------------------------

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        logger.warning("SIGTERM: finishing up; the next one ends the run at once")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stop.set()

    def stop_if_asked(self) -> None:
        """Between two steps: raises `StopRequested` after a SIGTERM."""
        if self._stop.is_set():
            raise StopRequested("between steps")


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """A launched `Session`; on the way out the engines, actors and sinks are closed whatever happened.

    SIGTERM ends the loop: the step under way is abandoned (generation) or finished (training), the last completed
    one saved, and the process exits with status 0. Any other failure leaves a ``crash/`` folder and propagates.
    """
    setup_logging("driver", config.observe.log_level)
    plan = preflight(config)  # before anything starts: most mistakes are refused here, and leave nothing behind
    if not joins_cluster(config):
        check_memory(config)  # the nodes of a cluster tell how large their GPUs are once it is joined
    session = Session(config, resuming=plan.is_resume or _saves_where_it_loads(config))
    on_sigterm = signal.signal(signal.SIGTERM, session.on_sigterm)
    on_sigint = signal.getsignal(signal.SIGINT)
    launched = False
    try:
        try:
            session.launch()
            launched = True
            yield session
            session.finish_saving()
            session.ended("finished")
        except StopRequested:
            session.leave()
            if not launched:  # the caller's block has nothing to run on; a context manager cannot skip it otherwise
                raise SystemExit(0) from None
    except KeyboardInterrupt:
        session.interrupted()
        raise
    except SystemExit:
        raise
    except BaseException as error:
        session.failed(error)
        raise
    finally:
        session.close()
        _write_report(session.run)
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGINT, on_sigint)


def _write_report(run: RunFolder) -> None:
    try:
        write_report(run.path)
    except OSError as problem:  # the run's own end is what must be seen
        logger.error("could not write %s: %s", run.report_path, problem)


def _saves_where_it_loads(config: Config) -> bool:
    """--load is --save: the same command is repeated until the run is done, also when nothing was saved yet."""
    flags = config.checkpoint
    return (
        flags.load is not None and flags.save is not None and Path(flags.load).resolve() == Path(flags.save).resolve()
    )
