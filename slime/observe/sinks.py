"""Send metrics to the console, ``metrics.jsonl``, TensorBoard and the trackers that flags choose.
The driver holds one `Sinks` per run.

``step`` is the number of rollouts trained on so far: an evaluation before training is step 0, and
rollout k with its training is step k + 1. Each step is logged once, and once more if an evaluation
of its weights ended during later steps.

Example (what a driver does):
    sinks = Sinks(config, run)
    sinks.begin(first_rollout, num_rollout)          # after loading a checkpoint
    for rollout_id in range(first_rollout, num_rollout):
        with sinks.phase("rollout"):
            metrics = generate(rollout_id)
        with sinks.phase("train"):
            metrics |= train(rollout_id)
        sinks.log(rollout_id + 1, metrics)           # adds perf/{rollout,train,step}_time
    sinks.close("finished")
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from slime.errors import UserError
from slime.log import get_logger
from slime.observe.alarms import AlarmWatch
from slime.observe.chrome_trace import add_phases
from slime.observe.console import ConsoleSink, phase_seconds
from slime.observe.jsonl_sink import JsonlSink, metrics_row
from slime.observe.phases import PhaseTimer, now
from slime.observe.run_data import read_metrics
from slime.observe.run_folder import RunFolder
from slime.observe.trackers import TRACKERS

if TYPE_CHECKING:
    from slime.config.config import Config

logger = get_logger(__name__)


#: Metrics: seconds of image preparation.
_IMAGES = ("perf/images/trainer_time", "perf/images/rollout_time")
#: Phases in which the trainer is idle.
_TRAINER_WAITS = ("rollout", "train_wait", "generation_wait", "evaluation_wait")


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def rewind(self, next_step: int) -> None:
        """Discard what an earlier process logged from `next_step` on; the run continues with that
        step."""

    def close(self) -> None: ...


def _is_step(metrics: Mapping[str, Any]) -> bool:
    """Tell whether the metrics include a rollout or training, not only an evaluation."""
    return any(name.startswith(("rollout/", "train/")) for name in metrics)


def _named_seconds(times: Mapping[str, float]) -> float:
    return sum(phase_seconds(times).values())


def _name(sink: Sink) -> str:
    """Name a sink for messages: "Wandb", "TensorBoard"."""
    return type(sink).__name__.removesuffix("Sink")


class Sinks:
    """All sinks of a run, and the driver's phases. The caller must hold the lock on the run
    folder.

    Args:
        console: where progress is shown; by default stderr.
        more: further sinks, called after the others, so that they may read what those wrote.

    Raises:
        UserError: a tracker that a flag chooses is not installed, or refuses the run.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        console: Console | None = None,
        more: Sequence[Sink] = (),
    ) -> None:
        self._run = run
        self._tracing = config.observe.trace
        self._console, self._sinks = _make_sinks(config, run, console)
        self._sinks += more
        self._timer = PhaseTimer(on_change=self._console.phase_changed)
        self._flags = vars(config.flat())
        self._alarms = AlarmWatch(flags=self._flags)
        self._step_start = now()
        self._failed_phase: str | None = None
        self._log_seconds = 0.0
        """Seconds spent on logging since the last step; they count for the current step."""

    # -- while the run goes on ---------------------------------------------------------------------

    def begin(
        self,
        first_step: int,
        total_steps: int,
        launch_seconds: float = 0.0,
        saved: dict[str, float] | None = None,
    ) -> None:
        """Begin the steps, when everything is up: `first_step` steps of `total_steps` are done (a
        checkpoint was loaded).

        Rows that an earlier process of this run logged beyond `first_step` are dropped, because
        those steps are repeated.

        Args:
            saved: metrics of `first_step` in its checkpoint; logged if the earlier process was
                killed before it logged them.
        """
        if not first_step:
            self._tell_of_a_new_start()
        self.rewind(first_step + 1 if first_step else 0)
        self._console.begin(first_step, total_steps, launch_seconds)
        logged = self._logged()
        if saved and not any(row["step"] == first_step and _is_step(row) for row in logged):
            self._send(first_step, saved)
            logged.append(metrics_row(first_step, saved, self._run.stage))
        self._alarms = AlarmWatch(logged, self._flags)
        self._timer.forget_all_but("launch")
        self._step_start = now()
        self._log_seconds = 0.0

    def _logged(self) -> list[dict[str, Any]]:
        rows = read_metrics(self._run.metrics_path)
        return [row for row in rows if row.get("stage") == self._run.stage]

    def lacks_evaluation(self, step: int) -> bool:
        """Tell whether a step is logged, and no evaluation of it."""
        rows = [row for row in self._logged() if row["step"] == step]
        return bool(rows) and not any(name.startswith("eval/") for row in rows for name in row)

    def _tell_of_a_new_start(self) -> None:
        """Say what of an earlier process of this run is lost, because no checkpoint has it."""
        done = [row for row in self._logged() if _is_step(row)]
        if done:
            were_saved = any("perf/save_model_time" in row for row in done)
            logger.warning(
                "the run starts over: it has no checkpoint%s, and trains steps 1 to %d again",
                " any more (the folder of --save may have been moved, or be on a disk that is not "
                "mounted)"
                if were_saved
                else " yet",
                done[-1]["step"],
            )

    def rewind(self, next_step: int) -> None:
        """Drop this stage's rows from `next_step` on; `begin` calls this."""
        for sink in self._sinks:
            with self._tolerated(f"repeated steps stay in {_name(sink)}"):
                sink.rewind(next_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block of the driver for ``perf/{name}_time``, the trace and the live
        display."""
        try:
            with self._timer.phase(name):
                yield
        except BaseException:
            self._failed_phase = self._failed_phase or name
            raise

    @property
    def open_phase(self) -> str | None:
        """The current phase of the driver, or the phase in which it failed; for error messages and
        crash reports."""
        return self._timer.open_phase or self._failed_phase

    def progress(self, counters: Mapping[str, float]) -> None:
        """Show the progress of the open phase on the console: ``done`` of ``target`` prompts,
        ``tokens``."""
        self._console.progress(counters)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics to all sinks, with the times of the phases since the last call.

        Rows with a rollout or a training step get ``perf/step_time``, the wall-clock seconds since
        the last call without evaluation; ``perf/trainer_wait_ratio``, the share of it in which the
        trainer waited; and ``perf/images/step_ratio``, the time of image preparation in trainer and
        rollout as a share of it. Values in `metrics` take precedence. New alarms are shown on the
        console once; all alarms are logged as ``alarm/<name>``.
        """
        is_step = _is_step(metrics)
        end = now()
        phase_times = self._timer.pop_metrics()
        if is_step:
            merged = self._timed_step(phase_times, metrics, end - self._step_start)
        else:
            merged = {**phase_times, **metrics}
        self._step_start = end
        alarms, alarm_metrics = self._alarms.look(metrics_row(step, merged, self._run.stage))
        merged |= alarm_metrics
        self._send(step, merged)
        for alarm in alarms:
            self._console.alarm(alarm)
        if is_step:
            phases = self._timer.pop_events()
            # the rollout has ended, so its trace is complete and can be extended (or created)
            if self._tracing:
                with self._tolerated(f"step {step} has no phases of the driver in its trace"):
                    add_phases(self._run.trace / f"rollout_{step - 1:06d}.json", phases)
        self._log_seconds += now() - end

    def _timed_step(
        self, phase_times: Mapping[str, float], metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """Return the metrics of a step with its times.

        Args:
            phase_times: ``perf/{phase}_time`` of the driver's phases.
            seconds: since the last call of `log`.
        """
        driver = {**phase_times, "perf/log_time": self._log_seconds}
        self._log_seconds = 0.0
        seconds -= driver.get("perf/evaluate_time", 0.0)
        driver["perf/step_time"] = seconds
        if seconds > 0:
            waited = sum(driver.get(f"perf/{phase}_time", 0.0) for phase in _TRAINER_WAITS)
            driver["perf/trainer_wait_ratio"] = waited / seconds
        merged = {**driver, **metrics}
        if seconds > 0 and any(name in merged for name in _IMAGES):
            prepared = sum(merged.get(name, 0.0) for name in _IMAGES)
            merged["perf/images/step_ratio"] = prepared / seconds
        # the driver's waiting time beyond the time that the other processes report as work
        merged["perf/handover_time"] = max(0.0, _named_seconds(driver) - _named_seconds(merged))
        return merged

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation of a step that has been logged already, as a row of its own; readers
        merge the rows of a step. It has no phase times, and its alarms are raised with the next
        step."""
        self._alarms.add(metrics_row(step, dict(metrics), self._run.stage))
        self._send(step, dict(metrics))

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self._sinks:
            with self._tolerated(f"step {step} is not in {_name(sink)}"):
                sink.log(step, metrics)

    @contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Log a failure in the block, which then does not end the run: a tracker whose service has
        died, a full disk. A failure of ``metrics.jsonl``, a `UserError`, does."""
        try:
            yield
        except UserError:
            raise
        except Exception as problem:
            logger.warning("%s: %s: %s", what, type(problem).__name__, problem)

    def closing_lines(self, most: int) -> list[str]:
        """Return at most ``most`` alarms of the ended run, most serious first, as the last lines on
        the console."""
        return self._console.closing_lines(self._alarms.at_the_end()[:most])

    # -- the end -----------------------------------------------------------------------------------

    def close(self, state: str = "stopped") -> None:
        """Close all sinks and write the final state to ``run.json``. A second call does
        nothing.

        Args:
            state: "finished" (reached its goal), "stopped" (can be resumed) or "failed".
        """
        if not self._sinks:
            return
        sinks = self._sinks
        self._sinks = []
        if self._run.state() != "failed":  # else `RunFolder.write_crash` has set it
            # first, because the process may be killed during W&B's long upload
            with self._tolerated("run.json does not say how the run ended"):
                self._run.set_state(state)
        for sink in sinks:
            with self._tolerated(f"{_name(sink)} was not closed properly"):
                sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("finished" if kind is None else "failed")


def _make_sinks(
    config: Config, run: RunFolder, console: Console | None
) -> tuple[ConsoleSink, list[Sink]]:
    """Create the sinks that flags choose. Returns the console sink, and all sinks."""
    supervised = config.algorithm.trains_on_data
    name = f"{run.path.name}/{run.stage}" if run.stage else run.path.name
    console_sink = ConsoleSink(name, config.rollout.num_rollout or 0, console, supervised)
    sinks: list[Sink] = [console_sink, JsonlSink(run)]
    if config.observe.use_tensorboard:
        from slime.observe.tensorboard_sink import TensorBoardSink

        names = (config.observe.tb_project_name, config.observe.tb_experiment_name)
        sinks.append(TensorBoardSink(run.tensorboard.joinpath(*filter(None, names))))
    sinks += [
        pkgutil.resolve_name(tracker.sink)(config, run)
        for tracker in TRACKERS.values()
        if tracker.is_chosen(config)
    ]
    return console_sink, sinks
