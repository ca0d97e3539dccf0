"""One run: the steps of the loop (`slime.loop`), its folder and metrics, and how it ends."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from slime import deadlines
from slime.checkpoints.directory import newest_whole
from slime.checkpoints.load_plan import loads_from_save
from slime.cluster.ray_session import dead_daemons, is_ray_starting
from slime.cluster.rollout_actor import Generating, RolloutResult, log_warnings
from slime.cluster.run_cluster import Cluster
from slime.cluster.slow_waits import own_actors, stopped_parts
from slime.cluster.stopped_processes import StoppedProcessMonitor
from slime.cluster.trainer_group import TrainerActor
from slime.cluster.waiting import DeadlinePassed, StopRequested
from slime.config.config import Config
from slime.diagnosis.doctor import at_start, preflight
from slime.errors import RunFailed, UserError
from slime.log import get_logger, setup_logging
from slime.memory.check import check_memory
from slime.memory.hardware import is_on_gpu
from slime.memory.measured import Measured
from slime.memory.micro_batches import packing_line, with_token_limit
from slime.memory.plan import MemoryPlan
from slime.observe.first_step import first_step_lines
from slime.observe.output import tolerant_output
from slime.observe.run_folder import FolderTaken, RunFolder
from slime.observe.sinks import Sinks
from slime.page.report import ReportSink, try_to_write_report
from slime.processes import stacks
from slime.processes.footprint import of_this_host
from slime.processes.host import slime_command
from slime.processes.owner import end_within
from slime.redact import remember
from slime.rollout.validate_rows import RemainingRows
from slime.run.ancestry import PushLog
from slime.run.changed_inputs import changes, fingerprints
from slime.run.preflight import from_the_hub, joins_cluster
from slime.run.profiling import Profiling
from slime.run.saving import Saving
from slime.run.schedule import Schedule, StalenessTracker
from slime.run.stopping import StopSignals
from slime.samples.types import ANY_VERSION

logger = get_logger(__name__)

#: Warnings in the last lines of a run; the report has all warnings.
_MAX_WARNINGS = 2


class _BackgroundEvaluation(NamedTuple):
    """An evaluation that runs during the next steps, with the step and weights that it scores."""

    step: int
    version: int
    evaluating: Generating


class Session:
    """One run of one driver; owns the run folder, the sinks and the cluster.

    ``step`` in all metrics is the number of rollouts trained on so far: an evaluation before
    training is step 0, and training on rollout k is step k + 1.
    """

    def __init__(self, config: Config, signals: StopSignals, *, resuming: bool) -> None:
        self.config = config
        self.signals = signals
        self._resuming = resuming
        self.run, self._locks = RunFolder.claim(config, resuming=resuming)
        try:
            self._set_up()
        except BaseException as error:  # nothing else would record how this run ended
            self.run.set_state("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
            self._locks.close()
            raise

    def _set_up(self) -> None:
        config = self.config
        flags = config.checkpoint
        is_rewound = flags.ckpt_step is not None and loads_from_save(config)
        if not self._resuming or is_rewound:  # the journal does not fit
            shutil.rmtree(self.run.journal, ignore_errors=True)
        setup_logging("driver", config.observe.log_level, self.run.path / "logs")
        now = fingerprints(config)
        newest = newest_whole(Path(flags.save)) if flags.save and self._resuming else None
        for line in changes(config, now, self.run.note_inputs(now), newest):
            logger.warning("%s", line)
        self.sinks = Sinks(config, self.run, more=[ReportSink(self.run)])
        self.cluster = Cluster(
            config,
            self.run.path,
            should_stop=self.signals.requested,
            on_progress=self.sinks.progress,
            on_push=self._pushed,
        )
        self.schedule = Schedule(config)
        self.saving = Saving(config, self.run, self.sinks, self.cluster, self.schedule)
        self.staleness = StalenessTracker(config)
        self._pushes = PushLog(self.run.journal, config)
        self.profiling = Profiling(config, self.run, self.cluster)
        self._memory = Measured(MemoryPlan.of(config)) if is_on_gpu(config) else None
        self._last_trained: int | None = None
        self._unlogged_metrics: dict[str, float] = {}
        self._background_evaluation: _BackgroundEvaluation | None = None
        self._num_restarts = 0
        self._is_restarting = False
        self._state = "failed"
        self._was_launched = False
        self._remaining_rows: RemainingRows | None = None
        self.signals.unsaved_work = lambda: self.saving.unsaved_work(self._last_trained)
        self.signals.what_blocks_exit = self._what_blocks_exit
        self.signals.before_forced_exit = self._give_up
        limit = config.cluster.distributed_timeout_minutes * 60.0
        self.stopped_monitor = StoppedProcessMonitor(
            limit, self.run.logs / "driver.log", self._report_forced_exit
        )

    # -- start and end -----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start everything, and push weights once: a broken push must fail before rollouts."""
        self.stop_if_asked()
        self.stopped_monitor.begin()
        with self.sinks.phase("launch"):
            launch = self.cluster.launch()
        self.run.set_state("launched")
        self._was_launched = True
        schedule = self.schedule
        self._begin_schedule(launch.start_rollout_id, launch.num_prompts)
        saved = launch.saved_metrics if self._resuming else {}
        total = sum(launch.seconds.values())
        self.sinks.begin(schedule.start_rollout_id, schedule.num_rollout, total, saved)
        phases = (f"{name} {seconds:.1f} s" for name, seconds in launch.seconds.items())
        logger.info("launched: %s", ", ".join(phases))
        logger.info("the output of your functions is in %s", self.run.logs / "rollout.log")
        self.staleness.remember(
            launch.pushes | {push.version: push.trained for push in self._pushes.earlier}
        )
        self._pushes.begin(self.step, launch.ancestries)
        self.update_weights()
        self.cluster.pop_metrics()  # metrics of the launch belong to no step
        behind = self.config.sync.staleness
        paced = self.config.sync.paced
        if self._tracks_staleness and (behind or paced):
            logger.info(
                "samples are trained on at most %d rollouts after the push of their weights%s",
                behind,
                paced,
            )
            logger.info(
                "samples of groups that an earlier rollout put back %s",
                self.staleness.put_back_policy,
            )
        self.saving.begin()
        self.profiling.step_begins(self.step)
        self._remaining_rows = RemainingRows(self.config, lambda line: logger.warning("%s", line))

    def _begin_schedule(self, start_rollout_id: int, num_prompts: int) -> None:
        self.schedule.begin(start_rollout_id, num_prompts)
        if self.config.rollout.num_rollout is None:  # the schedule derives it from the prompts
            self.cluster.set_run_length(self.schedule.num_rollout)

    def close(self) -> None:
        """End all processes, record how the run ended and write its report, within 15 seconds."""
        politely = self._state == "finished"
        if self._remaining_rows is not None:
            self._remaining_rows.close()
        try:
            if not end_within(
                deadlines.RUN_SESSION_CLOSE,
                lambda: self.cluster.close(politely=politely),
                self.signals.hurry,
            ):
                logger.error(
                    "Ray did not end in time: the run ends without it, its processes are killed"
                )
            self.saving.discard_unfinished()  # its writers have ended
            if self._state == "finished":
                shutil.rmtree(self.run.journal, ignore_errors=True)
        finally:
            self.sinks.close(self._state)
            try_to_write_report(self.run)
            self._locks.close()

    # -- steps -------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return (
            self.schedule.start_rollout_id if self._last_trained is None else self._last_trained + 1
        )

    @property
    def _has_trained(self) -> bool:
        """Whether this launch trained a step, even if a restart has dropped it."""
        return self._last_trained is not None or self._num_restarts > 0

    def log(self, metrics: dict[str, float]) -> None:
        """Log the metrics of the step that has ended, and an evaluation that has."""
        if metrics:
            metrics |= self.cluster.pop_metrics() | of_this_host()
            try:
                self._reclaim_folder()
                self.sinks.log(self.step, metrics)
            except FolderTaken:
                raise
            except UserError:  # the disk of the run folder is full; that of --save may have room
                self._save_before_failing()
                raise
        if self._last_trained is not None:
            is_over = self.step >= self.schedule.num_rollout
            self.profiling.step_begins(self.step, is_over=is_over)
        if self.step == 1:
            for line in first_step_lines(metrics, templated=self.config.data.apply_chat_template):
                logger.info("%s", line)
        for line in self._memory.compare(metrics) if self._memory is not None else ():
            logger.warning("%s", line)
        self._unlogged_metrics = {}
        background = self._background_evaluation
        if background is not None and background.evaluating.ends_within(0.0):
            self.finish_evaluation()

    def _reclaim_folder(self) -> None:
        if self.run.reclaim(self.config, self._locks):
            logger.warning(
                "%s was moved or removed during the run, and is made again; what it held so far "
                "is missing in it",
                self.run.path,
            )

    def _save_before_failing(self) -> None:
        last = self._last_trained
        if last is None or not self.saving.keeps or self.saving.last == last:
            return
        try:
            self.save(last)
        except UserError as problem:
            logger.error("rollout %d is lost: %s", last, problem)

    @property
    def _tracks_staleness(self) -> bool:
        """Whether samples come from pushed weights."""
        return self.cluster.has_trainers and self.cluster.has_engines

    def may_start(self, rollout_id: int) -> bool:
        """Return whether --max-staleness lets a rollout start before the next push."""
        return not self._tracks_staleness or self.staleness.may_start(rollout_id)

    def start_generating(self, rollout_id: int) -> Generating:
        """Start a rollout, which runs during training; `collect` it later."""
        versions = self.staleness.versions(rollout_id) if self._tracks_staleness else ANY_VERSION
        with self.sinks.phase("start_rollout"):
            return self.cluster.start_generating(rollout_id, versions)

    def collect(self, generating: Generating) -> RolloutResult:
        """Wait for a rollout, timed as ``perf/rollout_time`` (async: ``perf/train_wait_time``)."""
        with self.sinks.phase("train_wait" if self.config.sync.async_buffer_size else "rollout"):
            result = self.cluster.collect(generating)
        log_warnings(result.warnings)
        return result

    def wait_for(self, generating: Iterable[Generating]) -> None:
        """Wait until these rollouts are generated; they are collected afterwards."""
        if pending := list(generating):
            with self.sinks.phase("generation_wait"):
                for one in pending:
                    self.cluster.collect(one)

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Do all optimizer steps of a rollout; callers may extend the metrics until they are
        logged."""
        with self.sinks.phase("train"):
            metrics = dict(batch.metrics)
            if self._tracks_staleness:
                metrics |= self.staleness.metrics(batch.versions, self.step)
            metrics |= self.cluster.train(batch)
        self.note_trained(batch.rollout_id, metrics)
        return metrics

    def note_trained(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._last_trained = rollout_id
        self._unlogged_metrics = metrics

    def update_weights(self) -> dict[str, float]:
        with self.sinks.phase("update_weights"):
            metrics = self.cluster.update_weights()
        self._pushed(int(metrics.get("perf/weight_version", self.staleness.version)))
        return metrics

    def _pushed(self, version: int) -> None:
        is_new = version != self.staleness.version
        self.staleness.pushed(version, self.step)
        is_logged = self.config.fault_tolerance.journal or self._pushes.earlier
        if is_new and self._tracks_staleness and is_logged:
            self._pushes.note(version, self.step)
        self.staleness.unreachable = self._pushes.unreachable

    def save(self, rollout_id: int) -> None:
        lineages = self._pushes.recent_ancestries(self.step)
        pushed = {"pushes": self.staleness.recent_pushes(), "lineages": lineages}
        self.saving.save(rollout_id, pushed, self._unlogged_metrics)

    def may_restart_trainer(self, error: Exception) -> bool:
        """Return whether the error is a loss of trainer ranks and --max-restarts allows a restart.

        Each true result counts as one restart.
        """
        most = self.config.fault_tolerance.max_restarts
        if not self.cluster.is_loss_of_trainers(error) or self._num_restarts >= most:
            return False
        if dead := dead_daemons():
            logger.error(
                "Ray's %s has ended, without which no trainer can be started again",
                " and ".join(dead),
            )
            return False
        logger.error("%s", error)
        if self.signals.requested():  # the same signal may have killed the ranks
            raise StopRequested("a trainer died as the run was to stop") from error
        self._num_restarts += 1
        logger.warning(
            "the trainer is started again, %d of %d times (--max-restarts)",
            self._num_restarts,
            most,
        )
        return True

    def restart_trainer(self) -> None:
        """Restart lost trainer ranks from the newest checkpoint, and continue from there.

        Metrics of later steps are dropped, because these steps are trained and logged again.
        """
        began = time.monotonic()
        self._last_trained = None  # the lost ranks had these weights
        self._unlogged_metrics = {}
        self._is_restarting = True
        with self.sinks.phase("launch"):
            self.saving.wait_for_async_save()
            self.saving.discard_unfinished()
            start = self.cluster.restart_trainers(self.staleness.version)
        schedule = self.schedule
        first = start.start_rollout_id
        self._begin_schedule(first, schedule.num_prompts)
        self._pushes.begin(first, start.extra_state.get("lineages", {}))
        saved = start.extra_state.get("metrics")
        # an evaluation of a step that is repeated is dropped with its metrics
        self.finish_evaluation()
        self.sinks.begin(first, schedule.num_rollout, time.monotonic() - began, saved)
        self._is_restarting = False
        self.saving.begin()
        self.update_weights()
        self.cluster.pop_metrics()
        logger.warning("going on with rollout %d", first)

    @property
    def lacks_evaluation(self) -> bool:
        """Whether the step of the checkpoint that was loaded was to be evaluated, and the run ended
        before the evaluation did."""
        step = self.schedule.start_rollout_id
        return step > 0 and self.schedule.evaluates(step - 1) and self.sinks.lacks_evaluation(step)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the engines' weights; return metrics ``eval/…``.

        In asynchronous training return {}: the evaluation runs during the next steps and is logged
        when it has ended, at the latest by `finish_evaluation`.
        """
        if self.cluster.is_sequential or self.step >= self.schedule.num_rollout:
            with self.sinks.phase("evaluate"):
                metrics = self.cluster.evaluate_preferences()
                evaluating = self._begin_evaluation(rollout_id)
                if evaluating is not None:
                    metrics |= self.cluster.collect_evaluation(evaluating)
                return metrics
        evaluating = self._begin_evaluation(rollout_id)
        self._background_evaluation = None
        if evaluating is not None:
            version = self.staleness.version
            self._background_evaluation = _BackgroundEvaluation(self.step, version, evaluating)
        return {}

    def _begin_evaluation(self, rollout_id: int) -> Generating | None:
        is_first = self.step == 0 or self.schedule.num_rollout == 0
        return self.cluster.begin_evaluation(rollout_id, is_first=is_first)

    def finish_evaluation(self) -> None:
        """Wait for a background evaluation, and log it under the step whose weights it scored."""
        if self._background_evaluation is None:
            return
        step, version, evaluating = self._background_evaluation
        with self.sinks.phase("evaluation_wait"):
            metrics = self.cluster.collect_evaluation(evaluating)
        self._background_evaluation = None
        if version != self.staleness.version:
            logger.warning(
                "all engines died in the evaluation of step %d: the rest of it is of newer weights",
                step,
            )
        self.sinks.log_late(step, metrics)

    def finish(self) -> None:
        """Finish evaluation and checkpoints after the last step."""
        self.finish_evaluation()
        self.saving.finish()
        self._state = "finished"

    def leave(self) -> None:
        """Save the last step and finish an evaluation, after SIGTERM or a first Ctrl-C."""
        self.stopped_monitor.end()  # `StopSignals` detects what blocks this end
        self.signals.acknowledge()  # so that the wait for the save is not interrupted
        self._state = "stopped"
        self.log(self._unlogged_metrics)
        self._save_last()
        background = self._background_evaluation
        if background is not None:
            patience = 0.0 if stopped_parts() else deadlines.RUN_SESSION_EVALUATION
            if background.evaluating.ends_within(patience):
                self.finish_evaluation()
            else:
                logger.warning(
                    "the evaluation of step %d had not ended and is given up", background.step
                )

    def _save_last(self) -> None:
        if self._last_trained is None or not self.saving.keeps:
            return
        if silent := self.cluster.describe_unresponsive():
            lost = self.saving.unsaved_work(self._last_trained)
            logger.error(
                "%s: leaving without a save%s", silent, f", {lost} is lost" if lost else ""
            )
            return
        if self.saving.last != self._last_trained:
            self.save(self._last_trained)
            logger.info("saved rollout %d before leaving", self._last_trained)
        self.saving.finish()

    def _what_blocks_exit(self) -> str:
        """Name what blocks the end: stopped processes, or Ray while it starts.

        While a checkpoint is written, only stopped trainers count.
        """
        if is_ray_starting():
            return "Ray, which is starting,"
        stopped = list(stopped_parts().values())
        if self.sinks.open_phase == "save_model":
            stopped = [part for part in stopped if TrainerActor.__name__ in part]
        return ", ".join(stopped)

    def _give_up(self, who: str) -> None:
        logger.error(
            "%s does not answer: the run ends without it, and what is not saved is lost", who
        )
        self.run.set_state("stopped")

    def _report_forced_exit(self, error: BaseException) -> None:
        """Report how the run ends; the monitor thread calls this if the main thread is stuck in a
        call."""
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        where = f"details: {folder}; every process's log: {self.run.logs}"
        lines = [str(error), where, self._weights_note(), self.saving.resume_hint()]
        print("error: " + "\n".join(lines).rstrip(), file=sys.stderr, flush=True)

    def _weights_note(self) -> str:
        version = self.staleness.version
        last = f"version {version} was pushed last" if version else "none were pushed"
        trained = "" if self._is_restarting else f", {self.step} rollouts are trained on"
        return f"weights: {last}{trained}"

    def interrupted(self) -> None:
        """Leave after Ctrl-C, once a checkpoint that is being written is complete."""
        self.stopped_monitor.end()
        self._state = "stopped"
        if not self.signals.insists:
            self.saving.wait_for_async_save(self.signals)

    def failed(self, error: BaseException) -> None:
        """Write a crash folder, and add to the error where it is and how to resume."""
        self.stopped_monitor.leaving(error, waits_for_save=self.config.checkpoint.async_save)
        is_mistake = isinstance(error, UserError) and not isinstance(error, RunFailed)
        # at a deadline the stacks have been written; they do not explain a user's mistake
        if not is_mistake and not isinstance(error, DeadlinePassed):
            stacks.ask(own_actors(), wait=True)
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        was_imported = "slime.trainer.non_finite" in sys.modules  # else the error is another one
        if folder is not None and was_imported:
            from slime.trainer.non_finite import keep_failed_step

            keep_failed_step(error, folder, self.config, lambda: self.cluster.failed_step())
        self.saving.wait_for_async_save(self.signals)
        has_steps = self._has_trained or self.schedule.start_rollout_id > 0
        if has_steps and (resume_hint := self.saving.resume_hint()):
            error.add_note(resume_hint)
        where = f"details: {folder or 'not written, see above'}; report: {self.run.report_path}"
        error.add_note(f"{where}; every process's log: {self.run.logs}")
        if isinstance(error, RunFailed) and self._was_launched:
            error.add_note(self._weights_note())
        if not is_mistake:
            explain = f"{slime_command()} explain {self.run.path}"
            error.add_note(f"cause and remedies, as far as they are known: {explain}")

    def stop_if_asked(self) -> None:
        """Raise `StopRequested` after a SIGTERM."""
        if self.signals.requested():
            raise StopRequested("between steps")

    def print_summary(self) -> None:
        """Print what was made, where it is and what to do next, as the run's last lines."""
        if self._state == "failed":
            return  # the error says so
        name = f"{self.run.stage}: " if self.run.stage else ""
        length = self.schedule.num_rollout
        saving = self.saving
        flags = self.config.checkpoint
        progress = f", {self.step} of {length} steps" if length else ""
        if self._is_restarting:
            progress = ", as the trainer was started again"
        lines = [f"{name}{self._state}{progress}"]
        if (self._has_trained or saving.model) and not self.config.debug.debug_rollout_only:
            newest = saving.newest()
            lines += [f"  model: {saving.model}"] if saving.model else []
            lines += [f"  checkpoint: {newest}"] if newest else []
            if not (flags.save or flags.save_hf):
                lines.append("  model: not kept (--no-save)")
        lines += [f"  {line}" for line in self.sinks.closing_lines(_MAX_WARNINGS)]
        if self.run.report_path.exists():  # not if somebody removed the folder
            lines.append(f"  report: {self.run.report_path}")
        if self._state == "stopped" and saving.newest():
            lines.append(f"  next: {slime_command()} resume {self.run.path}")
        elif saving.model and self.config.algorithm.trains_reward_model:
            lines.append(f"  next: --rm-type reward_model --rm-path {saving.model} in another run")
        elif saving.model:
            lines.append(f"  next: {slime_command()} chat {self.run.path}")
        print("\n".join(lines), file=sys.stderr)


def _repeats(config: Config) -> bool:
    """Tell whether the command of a run is repeated before anything was saved: its folder may exist
    then, but not that of a run which saves elsewhere."""
    if not loads_from_save(config):
        return False
    observe = config.observe
    run = RunFolder(Path(observe.output_dir) / observe.run_name, observe.stage or None)
    try:
        saved = run.config().checkpoint.save
    except UserError:  # no config, or one that cannot be read
        return True
    ours = str(config.checkpoint.save)
    return saved is not None and Path(saved).resolve() == Path(ours).resolve()


@contextmanager
def open_session(config: Config, *, resuming: bool = False) -> Iterator[Session]:
    """Yield a launched `Session`; close engines, actors and sinks at the end, whatever happens.

    `StopSignals` handles signals; after SIGTERM the process exits with status 0. Any failure leaves
    a ``crash/`` folder and propagates.

    Args:
        resuming: the run folder exists, with or without a checkpoint.
    """
    remember(*config.for_hiding())
    setup_logging("driver", config.observe.log_level)
    try:
        config = from_the_hub(config)
    except UserError as error:
        preflight(config, [error])
    plan = preflight(config)  # refuses most mistakes before anything starts
    if plan.is_foreign:
        logger.warning(
            "%s was written by another program: without a manifest its contents are not checked",
            plan.path,
        )
    config = with_token_limit(config)
    logger.info("%s", packing_line(config))
    if not joins_cluster(config):
        check_memory(config)  # the GPUs of a cluster are known only once it is joined
    for finding in at_start(config):
        logger.warning("%s; try %s (slime doctor tells more)", finding.detail, finding.advice[0])
    with tolerant_output(), StopSignals() as signals:
        session = Session(config, signals, resuming=resuming or plan.is_resume or _repeats(config))
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
            # Ray wraps what a signal handler raises within its calls in a SystemError
            cause = error.__cause__ if isinstance(error, SystemError) else None
            if isinstance(cause, DeadlinePassed):
                session.failed(cause)
                raise cause from error
            session.failed(error)
            raise
        finally:
            session.stopped_monitor.end()
            signals.ending()
            session.close()
            session.print_summary()
        signals.end_if_asked()
