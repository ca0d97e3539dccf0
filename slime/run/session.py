"""A run: the verbs of the loop (`slime.loop`), what is due when, its folder and metrics, and how it
ends."""

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
from slime.cluster.launch import Generating
from slime.cluster.ray_session import dead_daemons, is_starting
from slime.cluster.rollout_actor import RolloutResult, say
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
from slime.observe.run_folder import RunFolder
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
from slime.run.saving import Saving
from slime.run.schedule import Schedule, StalenessTracker
from slime.run.stopping import StopSignals
from slime.samples.types import ANY_VERSION

logger = get_logger(__name__)

#: What is wrong with a run as it ends: so much of it is in its last lines, the rest in the report.
_MOST_WARNINGS = 2


class _Beside(NamedTuple):
    """An evaluation that goes on beside training: of which step and weights."""

    step: int
    version: int
    evaluating: Generating


class Session:
    """One run of one driver: owns the run folder, the sinks and the cluster.

    ``step`` in all metrics is the number of rollouts trained on so far: what is evaluated before
    training is step 0, rollout k's training is step k + 1.
    """

    def __init__(self, config: Config, signals: StopSignals, *, resuming: bool) -> None:
        self.config = config
        self.signals = signals
        self._resuming = resuming
        self.run, self._locks = RunFolder.claim(config, resuming=resuming)
        try:
            self._set_up()
        except BaseException as error:  # nobody else would say how this run ended
            self.run.set_state("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
            self._locks.close()
            raise

    def _set_up(self) -> None:
        config = self.config
        if not self._resuming or goes_back(config):  # it begins elsewhere than where the run stood
            shutil.rmtree(self.run.journal, ignore_errors=True)
        setup_logging("driver", config.observe.log_level, self.run.path / "logs")
        now = fingerprints(config)
        for line in changes(config, now, self.run.note_inputs(now), self._goes_on_from()):
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
        self.ages, self._pushes = StalenessTracker(config), PushLog(self.run.journal, config)
        self._memory = Measured(MemoryPlan.of(config)) if is_on_gpu(config) else None
        self._last_trained: int | None = None
        self._not_logged: dict[str, float] = {}
        self._beside: _Beside | None = None
        self._restarts = 0
        self._begins_again = False
        self._state = "failed"
        self._was_launched = False
        self._remaining_rows: RemainingRows | None = None
        self.signals.would_lose = lambda: self.saving.would_lose(self._last_trained)
        self.signals.blocks = self._who_blocks_the_end
        self.signals.gives_up = self._give_up
        limit = config.cluster.distributed_timeout_minutes * 60.0
        self.watchman = StoppedProcessMonitor(
            limit, self.run.logs / "driver.log", self._end_without_hearing
        )

    def _goes_on_from(self) -> Path | None:
        """A checkpoint of its own."""
        flags = self.config.checkpoint
        return newest_whole(Path(flags.save)) if flags.save and self._resuming else None

    # -- start and end
    # ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Bring everything up and push the trainer's weights once, so that a broken push shows
        before any rollout."""
        self.stop_if_asked()
        self.watchman.begin()
        with self.sinks.phase("launch"):
            launch = self.cluster.launch()
        self.run.set_state("launched")
        self._was_launched = True
        schedule = self.schedule
        schedule.begin(launch.start_rollout_id, launch.num_prompts)
        if self.config.rollout.num_rollout is None:
            self.cluster.set_run_length(schedule.num_rollout)
        saved = launch.saved_metrics if self._resuming else {}
        self.sinks.begin(
            schedule.start_rollout_id, schedule.num_rollout, sum(launch.seconds.values()), saved
        )
        logger.info(
            "launched: %s", ", ".join(f"{name} {t:.1f} s" for name, t in launch.seconds.items())
        )
        logger.info("what your own functions print is in %s", self.run.logs / "rollout.log")
        self.ages.remember(
            launch.pushes | {push.version: push.trained for push in self._pushes.earlier}
        )
        self._pushes.begin(self.step, launch.lineages)
        self.update_weights()
        self.cluster.turns()  # those of the launch belong to no step
        behind = self.config.sync.staleness
        paced = self.config.sync.paced
        if self._has_ages and (behind or paced):
            logger.info(
                "samples are trained on at most %d rollouts after the weights that made them%s",
                behind,
                paced,
            )
            logger.info(
                "samples of groups that an earlier rollout put back %s", self.ages.of_put_back
            )
        self.saving.begin()
        self._remaining_rows = RemainingRows(self.config, lambda line: logger.warning("%s", line))

    def close(self) -> None:
        """Leave nothing running and a folder that says how the run ended, with its report, in a
        quarter of a minute."""
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
            self.saving.discard_unfinished()  # whoever wrote it is gone now
            if self._state == "finished":
                shutil.rmtree(self.run.journal, ignore_errors=True)
        finally:
            self.sinks.close(self._state)
            try_to_write_report(self.run)
            self._locks.close()

    # -- steps
    # -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return (
            self.schedule.start_rollout_id if self._last_trained is None else self._last_trained + 1
        )

    def log(self, metrics: dict[str, float]) -> None:
        if metrics:
            metrics |= self.cluster.turns() | of_this_host()
            self.sinks.log(self.step, metrics)
        for line in self._first_step_lines(metrics) if self.step == 1 else ():
            logger.info("%s", line)
        for line in self._memory.look(metrics) if self._memory is not None else ():
            logger.warning("%s", line)
        self._not_logged = {}
        if self._beside is not None and self._beside.evaluating.ends_within(0.0):
            self.finish_evaluation()

    def _first_step_lines(self, metrics: dict[str, float]) -> list[str]:
        return first_step_lines(metrics, templated=self.config.data.apply_chat_template)

    @property
    def _has_ages(self) -> bool:
        """Samples come from weights that are pushed."""
        return self.cluster.has_trainers and self.cluster.has_engines

    def may_start(self, rollout_id: int) -> bool:
        """Whether a rollout may begin before the next push: its samples would be young enough
        (--max-staleness)."""
        return not self._has_ages or self.ages.may_start(rollout_id)

    def start_generating(self, rollout_id: int) -> Generating:
        """Begin a rollout, which goes on beside the trainer; `collect` it."""
        versions = self.ages.versions(rollout_id) if self._has_ages else ANY_VERSION
        with self.sinks.phase("start_rollout"):
            return self.cluster.start_generating(rollout_id, versions)

    def collect(self, generating: Generating) -> RolloutResult:
        """Wait for a rollout. The seconds are ``perf/rollout_time`` in lock step, else
        ``perf/train_wait_time``."""
        with self.sinks.phase("train_wait" if self.config.sync.async_buffer_size else "rollout"):
            result = self.cluster.collect(generating)
        say(result.warnings)
        return result

    def wait_for(self, generating: Iterable[Generating]) -> None:
        """Until these are generated; they can be collected afterwards."""
        pending = list(generating)
        if pending:
            with self.sinks.phase("generation_wait"):
                for one in pending:
                    self.cluster.collect(one)

    def train(self, batch: RolloutResult) -> dict[str, float]:
        """Train on a rollout: all its optimizer steps. The metrics may grow until they are logged,
        or the run is left."""
        with self.sinks.phase("train"):
            ages = self.ages.metrics(batch.versions, self.step) if self._has_ages else {}
            metrics = batch.metrics | ages | self.cluster.train(batch)
        self.trained(batch.rollout_id, metrics)
        return metrics

    def trained(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self._last_trained = rollout_id
        self._not_logged = metrics

    def update_weights(self) -> dict[str, float]:
        with self.sinks.phase("update_weights"):
            metrics = self.cluster.update_weights()
        self._pushed(int(metrics.get("perf/weight_version", self.ages.version)))
        return metrics

    def _pushed(self, version: int) -> None:
        is_new = version != self.ages.version
        self.ages.pushed(version, self.step)
        if (
            is_new
            and self._has_ages
            and (self.config.fault_tolerance.journal or self._pushes.earlier)
        ):
            self._pushes.note(version, self.step)
        self.ages.unreachable = self._pushes.unreachable

    def save(self, rollout_id: int) -> None:
        pushed = {
            "pushes": self.ages.recent_pushes(),
            "lineages": self._pushes.recent_lineages(self.step),
        }
        self.saving.save(rollout_id, pushed, self._not_logged)

    def may_begin_again(self, error: Exception) -> bool:
        """Whether trainer ranks were lost, others can be started, and --max-restarts are not used
        up; counts them."""
        most = self.config.fault_tolerance.max_restarts
        if not self.cluster.lost_trainers(error) or self._restarts >= most:
            return False
        if dead := dead_daemons():
            logger.error(
                "Ray's %s has ended, without which no trainer can be started again",
                " and ".join(dead),
            )
            return False
        logger.error("%s", error)
        if self.signals.requested():  # whoever stops a run may have signalled its ranks, too
            raise StopRequested("a trainer died as the run was to stop") from error
        self._restarts += 1
        logger.warning(
            "the trainer is started again, %d of %d times (--max-restarts)", self._restarts, most
        )
        return True

    def restart_trainer(self) -> None:
        """Start lost trainer ranks from the newest checkpoint, and go on from there. The metrics of
        the steps since are dropped, as they will be logged again."""
        began = time.monotonic()
        self._last_trained = None  # no rank has these weights any more
        self._not_logged = {}
        self._begins_again = True
        with self.sinks.phase("launch"):
            self.saving.wait_for_async_save()
            self.saving.discard_unfinished()
            start = self.cluster.restart_trainers(self.ages.version)
        schedule = self.schedule
        first = start.start_rollout_id
        schedule.begin(first, schedule.num_prompts)
        self._pushes.begin(first, start.extra_state.get("lineages", {}))
        if self.config.rollout.num_rollout is None:
            self.cluster.set_run_length(schedule.num_rollout)
        saved = start.extra_state.get("metrics")
        # its row goes with those that are dropped, where its step is done again
        self.finish_evaluation()
        self.sinks.begin(first, schedule.num_rollout, time.monotonic() - began, saved)
        self._begins_again = False
        self.saving.begin()
        self.update_weights()
        self.cluster.turns()
        logger.warning("going on with rollout %d", first)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics ``eval/…`` with the weights that the engines hold now. In asynchronous training
        {}: it is begun, goes on beside the next steps, and is logged when it has ended, at the
        latest by `finish_evaluation`."""
        if self.cluster.take_turns or self.step >= self.schedule.num_rollout:
            with self.sinks.phase("evaluate"):
                begun = self.cluster.begin_evaluation(rollout_id)
                return self.cluster.collect_evaluation(begun) if begun is not None else {}
        begun = self.cluster.begin_evaluation(rollout_id)
        self._beside = _Beside(self.step, self.ages.version, begun) if begun is not None else None
        return {}

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that goes on beside training, if there is one, and log it under
        the step whose weights it scored."""
        if self._beside is None:
            return
        step, version, evaluating = self._beside
        with self.sinks.phase("evaluation_wait"):
            metrics = self.cluster.collect_evaluation(evaluating)
        self._beside = None
        if version != self.ages.version:
            logger.warning(
                "all engines died in the evaluation of step %d: the rest of it is of newer weights",
                step,
            )
        self.sinks.log_late(step, metrics)

    def finish(self) -> None:
        """All rollouts are trained on."""
        self.finish_evaluation()
        self.saving.finish()
        self._state = "finished"

    def leave(self) -> None:
        """After SIGTERM, or a first Ctrl-C: keep the last completed step, unless it is on disk
        already, and the evaluation that is nearly there."""
        self.watchman.end()  # `StopSignals` sees who blocks this end
        self.signals.taken_up()  # the save must be waited for
        self._state = "stopped"
        self.log(self._not_logged)
        self._save_last()
        if self._beside is not None:
            if self._beside.evaluating.ends_within(
                0.0 if stopped_parts() else deadlines.RUN_SESSION_EVALUATION
            ):
                self.finish_evaluation()
            else:
                logger.warning(
                    "the evaluation of step %d had not ended and is given up", self._beside.step
                )

    def _save_last(self) -> None:
        if self._last_trained is None or not self.saving.keeps:
            return
        if silent := self.cluster.who_is_silent():
            lost = self.saving.would_lose(self._last_trained)
            logger.error(
                "%s: leaving without a save%s", silent, f", {lost} is lost" if lost else ""
            )
            return
        if self.saving.last != self._last_trained:
            self.save(self._last_trained)
            logger.info("saved rollout %d before leaving", self._last_trained)
        self.saving.finish()

    def _who_blocks_the_end(self) -> str:
        """Parts that are stopped; while a checkpoint is being written, only those that write it.
        Ray, while it starts, where nothing can be lost."""
        if is_starting():
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

    def _end_without_hearing(self, error: BaseException) -> None:
        """By the watchman, over a main thread that is in a call that does not come back."""
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        lines = [
            str(error),
            f"details: {folder}; every process's log: {self.run.logs}",
            self._weights_then(),
        ]
        print(
            "error: " + "\n".join([*lines, self.saving.to_go_on()]).rstrip(),
            file=sys.stderr,
            flush=True,
        )

    def _weights_then(self) -> str:
        last = (
            f"version {version} was pushed last"
            if (version := self.ages.version)
            else "none were pushed"
        )
        return f"weights: {last}" + (
            f", {self.step} rollouts are trained on" if not self._begins_again else ""
        )

    def interrupted(self) -> None:
        """After Ctrl-C: leave, but not without a checkpoint that is nearly there."""
        self.watchman.end()
        self._state = "stopped"
        if not self.signals.insists:
            self.saving.wait_for_async_save(self.signals)

    def failed(self, error: BaseException) -> None:
        """Keep what explains the failure, and say in the error where it is."""
        self.watchman.leaving(error, settles=self.config.checkpoint.async_save)
        is_mistake = isinstance(error, UserError) and not isinstance(
            error, RunFailed
        )  # its words are all there is to say
        if not is_mistake and not isinstance(
            error, DeadlinePassed
        ):  # which has asked those who are waited for
            stacks.ask(own_actors(), wait=True)
        folder = self.run.write_crash(error, note=f"phase: {self.sinks.open_phase}")
        was_imported = (
            "slime.trainer.non_finite" in sys.modules
        )  # by such an error, which brings torch with it
        if folder is not None and was_imported:
            from slime.trainer.non_finite import keep_failed_step

            keep_failed_step(error, folder, self.config, lambda: self.cluster.failed_step())
        self.saving.wait_for_async_save(self.signals)
        has_steps = (
            self._last_trained is not None
            or self.schedule.start_rollout_id > 0
            or self._restarts > 0
        )
        if has_steps and (to_go_on := self.saving.to_go_on()):
            error.add_note(to_go_on)
        where = f"details: {folder or 'not written, see above'}; report: {self.run.report_path}"
        error.add_note(f"{where}; every process's log: {self.run.logs}")
        if isinstance(error, RunFailed) and self._was_launched:
            error.add_note(self._weights_then())
        if not is_mistake:
            error.add_note(
                f"cause and remedies, as far as they are known: {slime_command()} explain "
                f"{self.run.path}"
            )

    def stop_if_asked(self) -> None:
        """Raise `StopRequested` after a SIGTERM."""
        if self.signals.requested():
            raise StopRequested("between steps")

    def say_how_it_ended(self) -> None:
        """The last lines on the terminal: what was made, where it is, what to do next. A failure's
        error says so."""
        if self._state == "failed":
            return
        name = f"{self.run.stage}: " if self.run.stage else ""
        length = self.schedule.num_rollout
        saving = self.saving
        flags = self.config.checkpoint
        stands = f", {self.step} of {length} steps" if length else ""
        lines = [
            f"{name}{self._state}"
            + (", as the trainer was started again" if self._begins_again else stands)
        ]
        has_trained = self._last_trained is not None or self._restarts > 0
        if (has_trained or saving.model) and not self.config.debug.debug_rollout_only:
            newest = saving.newest()
            lines += [f"  model: {saving.model}"] if saving.model else []
            lines += [f"  checkpoint: {newest}"] if newest else []
            if not (flags.save or flags.save_hf):
                lines.append("  model: not kept (--no-save)")
        lines += [f"  {line}" for line in self.sinks.closing_lines(_MOST_WARNINGS)]
        lines.append(f"  report: {self.run.report_path}")
        if self._state == "stopped" and saving.newest():
            lines.append(f"  next: {slime_command()} resume {self.run.path}")
        elif saving.model:
            lines.append(f"  next: {slime_command()} chat {self.run.path}")
        print("\n".join(lines), file=sys.stderr)


@contextmanager
def open_session(config: Config, *, resuming: bool = False) -> Iterator[Session]:
    """A launched `Session`; on the way out the engines, actors and sinks are closed whatever
    happened.

    `StopSignals` says what ends the loop from outside; after SIGTERM the process exits with status
    0. Any failure leaves a ``crash/`` folder and propagates.

    Args:
        resuming: the run folder is there, whether or not there is a checkpoint.
    """
    remember(*config.for_hiding())
    setup_logging("driver", config.observe.log_level)
    try:
        config = from_the_hub(config)
    except UserError as error:
        preflight(config, [error])
    plan = preflight(
        config
    )  # before anything starts: most mistakes are refused here, and leave nothing behind
    if plan.is_foreign:
        logger.warning(
            "%s was written by another program: without a manifest its contents are not checked",
            plan.path,
        )
    config = with_token_limit(config)
    logger.info("%s", packing_line(config))
    if not joins_cluster(config):
        check_memory(
            config
        )  # the nodes of a cluster tell how large their GPUs are once it is joined
    for finding in at_start(config):
        logger.warning("%s; try %s (slime doctor tells more)", finding.detail, finding.advice[0])
    with tolerant_output(), StopSignals() as signals:
        session = Session(
            config, signals, resuming=resuming or plan.is_resume or _saves_where_it_loads(config)
        )
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
            told = (
                error.__cause__ if isinstance(error, SystemError) else None
            )  # Ray's, of what a handler has raised
            if isinstance(told, DeadlinePassed):
                session.failed(told)
                raise told from error
            session.failed(error)
            raise
        finally:
            session.watchman.end()
            signals.ending()
            session.close()
            session.say_how_it_ended()
        signals.end_if_asked()


def goes_back(config: Config) -> bool:
    """The run is to stand at an earlier one of its own checkpoints. That of another run, with which
    this one began, is where it stands before its first own."""
    return config.checkpoint.ckpt_step is not None and _saves_where_it_loads(config)


def _saves_where_it_loads(config: Config) -> bool:
    """--load is --save: the same command is repeated until the run is done, also when nothing was
    saved yet."""
    flags = config.checkpoint
    return (
        flags.load is not None
        and flags.save is not None
        and Path(flags.load).resolve() == Path(flags.save).resolve()
    )
