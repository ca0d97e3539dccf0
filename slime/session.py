"""A run: the verbs of the loop (`slime.loop`), what is due when, its folder and metrics, and how it ends."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.checkpoints.directory import discard_partial, is_saved, iteration_name, newest_whole
from slime.cluster.rollout_actor import RolloutResult
from slime.cluster.run_cluster import Cluster, Generating, Launch
from slime.cluster.waiting import StopRequested
from slime.config.config import Config
from slime.errors import UserError
from slime.host import slime_command
from slime.log import get_logger, setup_logging
from slime.memory.check import check_memory
from slime.memory.hardware import is_on_gpu
from slime.memory.measured import Measured
from slime.memory.plan import MemoryPlan
from slime.observe.report import write_report
from slime.observe.run_folder import RunFolder
from slime.observe.sinks import Sinks
from slime.placement import has_evaluation
from slime.preflight import from_the_hub, joins_cluster, preflight
from slime.processes import end_within
from slime.stopping import StopSignals

logger = get_logger(__name__)

#: How long a run that failed waits for the checkpoint that is being written; the processes may be in any state.
_SAVE_SECONDS = 600.0
#: Without --save-interval: a step may take minutes, and a tenth of the run half a day.
_SAVE_AGAIN_SECONDS = 1800.0
#: Of all processes together, and of Ray; kill signals of schedulers come half a minute after SIGTERM.
_CLOSE_SECONDS = 9.0


class Session:
    """One run of one driver: owns the run folder, the sinks and the cluster.

    ``step`` in all metrics is the number of rollouts trained on so far: what is evaluated before training is step
    0, rollout k's training is step k + 1.
    """

    def __init__(self, config: Config, signals: StopSignals, *, resuming: bool) -> None:
        self.config, self.signals = config, signals
        self.run = RunFolder.create(config, resuming=resuming)
        setup_logging("driver", config.observe.log_level, self.run.path / "logs")
        self.sinks = Sinks(config, self.run)
        self.cluster = Cluster(
            config,
            self.run.path,
            should_stop=signals.requested,
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
        self._saved_at = time.monotonic()
        self._model: Path | None = None
        self._state = "failed"
        signals.would_lose = self._unsaved

    # -- start and end ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Bring everything up and push the trainer's weights once, so that a broken push shows before any rollout."""
        self.stop_if_asked()
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
        logger.info("what your own functions print is in %s", self.run.logs / "rollout.log")
        self.update_weights()
        self.cluster.turns()  # those of the launch belong to no step
        self._saved_at = time.monotonic()
        if self.config.checkpoint.save and self.cluster.has_trainers and self.num_rollout:
            logger.info("checkpoints: %s", self._when_saved())

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
        """Leave nothing running and a folder that says how the run ended, with its report, in a quarter of a minute."""
        politely, flags = self._state == "finished", self.config.checkpoint
        try:
            if not end_within(_CLOSE_SECONDS, lambda: self.cluster.close(politely=politely), self.signals.hurry):
                logger.error("Ray did not end in time: the run ends without it, its processes are killed")
            if flags.save is not None and self._save_begun is not None:  # whoever wrote it is gone now
                final = Path(flags.save) / iteration_name(self._save_begun)
                if discard_partial(final):
                    logger.warning("%s was not finished; what there was of it is removed", final)
        finally:
            self.sinks.close(self._state)
            _write_report(self.run)

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
        """Every --eval-interval rollouts, or else after the last: whoever gives evaluation data wants to know what
        training has brought."""
        return has_evaluation(self.config) and self._is_due(
            rollout_id, self.config.eval.eval_interval or self.num_rollout
        )

    @property
    def _saves(self) -> bool:
        flags = self.config.checkpoint
        return self.cluster.has_trainers and bool(flags.save or flags.save_hf)

    @property
    def _save_interval(self) -> int | None:
        """Rollouts between two checkpoints; None: there is one after the last alone."""
        flags = self.config.checkpoint
        return flags.save_interval or (math.ceil(self.num_rollout / 10) if flags.save else None)

    @property
    def _saves_by_time(self) -> bool:
        flags = self.config.checkpoint
        return flags.save is not None and flags.save_interval is None

    def _when_saved(self) -> str:
        """For people."""
        flags, interval = self.config.checkpoint, self._save_interval
        often = "after every rollout" if interval == 1 else f"every {interval} rollouts"
        timed = f" or {_SAVE_AGAIN_SECONDS / 60:.0f} minutes" if self._saves_by_time and interval != 1 else ""
        kept = f"the newest {flags.save_retain} are kept" if flags.save_retain else "all are kept"
        return f"{often}{timed}, in {flags.save}; {kept}"

    def should_save(self, rollout_id: int) -> bool:
        if not self._saves or self._last_saved == rollout_id:
            return False
        interval = self._save_interval
        if rollout_id + 1 == self.num_rollout or (interval is not None and self._is_due(rollout_id, interval)):
            return True
        return self._saves_by_time and time.monotonic() - self._saved_at > _SAVE_AGAIN_SECONDS

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
        self._last_saved, self._saved_at = rollout_id, time.monotonic()
        if self.config.checkpoint.save_hf:
            self._model = Path(self.config.checkpoint.save_hf.format(rollout_id=rollout_id))

    def finish_saving(self) -> None:
        """Wait for the last checkpoint, which --async-save writes behind training."""
        if self._last_saved is not None and self.config.checkpoint.async_save:
            with self.sinks.phase("save_model"):
                self.cluster.finish_saving()

    def _unsaved(self) -> str:
        """What a run that ended now would lose, for `StopSignals`."""
        trained = self._last_trained
        if trained is None or not self._saves:
            return ""
        root = self.config.checkpoint.save
        on_disk = self._last_saved == trained and (root is None or is_saved(Path(root), trained))
        return "" if on_disk else f"rollout {trained}"

    def _export(self) -> None:
        """Write the model as it is now for people, where no --save-hf has done so."""
        flags = self.config.checkpoint
        if flags.save and flags.export_model and not flags.save_hf and self._last_saved is not None:
            with self.sinks.phase("save_model"):
                self.cluster.export(self.run.model)
            self._model = self.run.model

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
        self.signals.taken_up()
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
        if newest is None:
            return f"there is no whole checkpoint in {root} yet"
        return f"newest whole checkpoint: {newest}; to go on from it: the same command with --load {root}"

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        with self.sinks.phase("evaluate"):
            return self.cluster.evaluate(rollout_id)

    def finish(self) -> None:
        """All rollouts are trained on."""
        self.finish_saving()
        self._export()
        self._state = "finished"

    def leave(self) -> None:
        """After SIGTERM, or a first Ctrl-C: keep the last completed step, unless it is on disk already."""
        self.signals.taken_up()  # the save must be waited for
        self._state = "stopped"
        self.log(self._not_logged)
        if self._last_trained is not None and self._last_saved != self._last_trained and self._saves:
            self.save(self._last_trained)
            logger.info("saved rollout %d before leaving", self._last_trained)
        self.finish_saving()
        self._export()

    def interrupted(self) -> None:
        """After Ctrl-C: leave, but not without a checkpoint that is nearly there."""
        self._state = "stopped"
        if not self.signals.insists:
            self.settle_save()

    def failed(self, error: BaseException) -> None:
        """Keep what explains the failure, and say in the error where it is."""
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        was_imported = "slime.trainer.non_finite" in sys.modules  # by such an error, which brings torch with it
        if folder is not None and was_imported:
            from slime.trainer.non_finite import keep_failed_step

            keep_failed_step(error, folder, self.config, lambda: self.cluster.failed_step())
        self.settle_save()
        if newest := self._newest_checkpoint():
            error.add_note(newest)
        where = f"details: {folder or 'not written, see above'}; report: {self.run.report_path}"
        error.add_note(f"{where}; every process's log: {self.run.logs}")

    def stop_if_asked(self) -> None:
        """Raise `StopRequested` after a SIGTERM."""
        if self.signals.requested():
            raise StopRequested("between steps")

    def say_how_it_ended(self) -> None:
        """The last lines on the terminal: what was made, where it is, what to do next. A failure's error says so."""
        if self._state == "failed":
            return
        name = f"{self.run.stage}: " if self.run.stage else ""
        lines = [f"{name}{self._state}" + (f", {self.step} of {self.num_rollout} steps" if self.num_rollout else "")]
        flags = self.config.checkpoint
        if self._last_trained is not None and not self.config.debug.debug_rollout_only:
            newest = newest_whole(Path(flags.save)) if flags.save else None
            lines += [f"  model: {self._model}"] if self._model else []
            lines += [f"  checkpoint: {newest}"] if newest else []
            if not (flags.save or flags.save_hf):
                lines.append("  model: not kept, as neither --save nor --save-hf is given")
        lines.append(f"  report: {self.run.report_path}")
        if self._state == "stopped" and flags.save and self._last_saved is not None:
            again = "" if flags.load == flags.save else f" with --load {flags.save}"
            lines.append(f"  next: the same command{again} goes on from there")
        elif self._model:
            lines.append(f"  next: {slime_command()} chat {self.run.path}")
        print("\n".join(lines), file=sys.stderr)


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """A launched `Session`; on the way out the engines, actors and sinks are closed whatever happened.

    `StopSignals` says what ends the loop from outside; after SIGTERM the process exits with status 0. Any failure
    leaves a ``crash/`` folder and propagates.
    """
    setup_logging("driver", config.observe.log_level)
    config = from_the_hub(config)
    plan = preflight(config)  # before anything starts: most mistakes are refused here, and leave nothing behind
    if not joins_cluster(config):
        check_memory(config)  # the nodes of a cluster tell how large their GPUs are once it is joined
    with StopSignals() as signals:
        session = Session(config, signals, resuming=plan.is_resume or _saves_where_it_loads(config))
        try:
            try:
                session.launch()
                yield session
                session.finish()
            except StopRequested:
                session.leave()
                signals.end_program()
        except KeyboardInterrupt:
            session.interrupted()
            raise
        except SystemExit:
            raise
        except BaseException as error:
            session.failed(error)
            raise
        finally:
            signals.ending()
            session.close()
            session.say_how_it_ended()
        signals.end_if_asked()


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
