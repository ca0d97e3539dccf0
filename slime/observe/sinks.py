"""Send metrics to console, ``metrics.jsonl``, TensorBoard and the trackers of the flags. The driver
holds one `Sinks` per run.

``step`` is the number of rollouts trained on so far: an evaluation before training is step 0, and
rollout k with its training is step k + 1. Each step is logged once, and once more where an
evaluation of its weights went on beside later ones.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from slime.files import read_lines
from slime.log import get_logger
from slime.observe.alarms import AlarmWatch
from slime.observe.chrome_trace import add_phases
from slime.observe.console import ConsoleSink, phase_seconds
from slime.observe.jsonl_sink import JsonlSink, metrics_row
from slime.observe.phases import PhaseTimer, now
from slime.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from slime.config.config import Config

logger = get_logger(__name__)


#: Seconds in which images are prepared.
_IMAGES = ("perf/images/trainer_time", "perf/images/rollout_time")
#: Phases in which the trainer has nothing to do.
_TRAINER_WAITS = ("rollout", "train_wait", "generation_wait", "evaluation_wait")


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def rewind(self, next_step: int) -> None:
        """The run goes on with `next_step`; what an earlier process logged from there on is
        void."""

    def close(self) -> None: ...


def _is_step(metrics: Mapping[str, Any]) -> bool:
    """Whether they are of a rollout or of training, not of an evaluation alone."""
    return any(name.startswith(("rollout/", "train/")) for name in metrics)


def _named_seconds(times: Mapping[str, float]) -> float:
    return sum(phase_seconds(times).values())


class Sinks:
    """All sinks of a run, and the driver's phases. Whoever makes them holds the lock on the run
    folder.

    Args:
        console: where progress is shown; by default stderr.
        more: sinks of the caller's own, called after the others: they may read what those wrote.

    Raises:
        UserError: a tracker is asked for and not installed, or lets no run begin.
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
        self._console, self._sinks = _make(config, run, console)
        self._sinks += more
        self._timer = PhaseTimer(on_change=self._console.phase_changed)
        self._flags = vars(config.flat())
        self._alarms = AlarmWatch(flags=self._flags)
        self._step_start = now()
        self._failed_phase: str | None = None
        self._log_seconds = 0.0
        """That went into logging since the last step: a part of the one under way."""

    # -- while the run goes on ---------------------------------------------------------------------

    def begin(
        self,
        first_step: int,
        total_steps: int,
        launch_seconds: float = 0.0,
        saved: dict[str, float] | None = None,
    ) -> None:
        """Everything is up: `first_step` steps are done already (a checkpoint was loaded),
        `total_steps` is the goal.

        What an earlier process of this run logged beyond `first_step` is dropped: it will be logged
        again.

        Args:
            saved: of `first_step`, by its checkpoint; logged where that process was killed before
                it could.
        """
        self.rewind(first_step + 1 if first_step else 0)
        self._console.begin(first_step, total_steps, launch_seconds)
        logged = [
            row for row in read_lines(self._run.metrics_path) if row.get("stage") == self._run.stage
        ]
        if saved and not any(row["step"] == first_step and _is_step(row) for row in logged):
            for sink in self._sinks:
                sink.log(first_step, saved)
            logged.append(metrics_row(first_step, saved, self._run.stage))
        self._alarms = AlarmWatch(logged, self._flags)
        self._timer.forget_all_but("launch")
        self._step_start = now()
        self._log_seconds = 0.0

    def rewind(self, next_step: int) -> None:
        """Drop this stage's rows from `next_step` on; `begin` does it."""
        for sink in self._sinks:
            sink.rewind(next_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver does in this block: ``perf/{name}_time``, its lane in the trace, the
        live display."""
        try:
            with self._timer.phase(name):
                yield
        except BaseException:
            self._failed_phase = self._failed_phase or name
            raise

    @property
    def open_phase(self) -> str | None:
        """The phase that the driver is in, or was in when it failed; for messages and crash
        reports."""
        return self._timer.open_phase or self._failed_phase

    def progress(self, counters: Mapping[str, float]) -> None:
        """How far the open phase is: ``done`` of ``target`` prompts, ``tokens``; for the console
        only."""
        self._console.progress(counters)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics everywhere, with the times of the phases since the last call.

        ``perf/step_time`` is the wall-clock time since the last call without evaluation, added to
        rows that hold a rollout or a training step; ``perf/trainer_wait_ratio`` is the part of it
        that the trainer spent waiting; ``perf/images/step_ratio`` what trainer and rollout took to
        prepare images, as a share of it. Values given in `metrics` win. What is wrong with the run
        is said on the console, once, and logged as ``alarm/<name>``.
        """
        is_step = _is_step(metrics)
        end = now()
        merged = waited_for = self._timer.pop_metrics()
        if is_step:
            merged["perf/log_time"] = self._log_seconds
            self._log_seconds = 0.0
            seconds = merged["perf/step_time"] = (
                end - self._step_start - merged.get("perf/evaluate_time", 0.0)
            )
            waited = sum(merged.get(f"perf/{phase}_time", 0.0) for phase in _TRAINER_WAITS)
            merged |= {"perf/trainer_wait_ratio": waited / seconds} if seconds > 0 else {}
        merged = {**waited_for, **metrics}
        if is_step and any(name in merged for name in _IMAGES) and seconds > 0:
            merged["perf/images/step_ratio"] = (
                sum(merged.get(name, 0.0) for name in _IMAGES) / seconds
            )
        # what the driver waited for a part of the run beyond what that part says it has worked
        if is_step:
            merged["perf/handover_time"] = max(
                0.0, _named_seconds(waited_for) - _named_seconds(merged)
            )
        self._step_start = end
        alarms, on = self._alarms.look(metrics_row(step, merged, self._run.stage))
        merged |= on
        for sink in self._sinks:
            sink.log(step, merged)
        for alarm in alarms:
            self._console.alarm(alarm)
        if is_step:
            phases = self._timer.pop_events()
            # the rollout has ended, so the file of its samples is there (or ours to make)
            if self._tracing:
                add_phases(self._run.trace / f"rollout_{step - 1:06d}.json", phases)
        self._log_seconds += now() - end

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation that went on beside steps that have been logged: a row of its own, which
        readers add to that of its step. It has no phases, and what is wrong with it is said with
        the next step."""
        self._alarms.add(metrics_row(step, dict(metrics), self._run.stage))
        for sink in self._sinks:
            sink.log(step, dict(metrics))

    def closing_lines(self, most: int) -> list[str]:
        """Return the alarms of the run if it ends here, the gravest first, as its last lines on the
        console."""
        return self._console.closing_lines(self._alarms.at_the_end()[:most])

    # -- the end -----------------------------------------------------------------------------------

    def close(self, state: str = "stopped") -> None:
        """Flush and close everything and note in ``run.json`` how the run ended. A second call does
        nothing.

        Args:
            state: "finished" (reached its goal), "stopped" (can be resumed) or "failed".
        """
        if not self._sinks:
            return
        sinks = self._sinks
        self._sinks = []
        ends: list[Callable[[], None]] = [sink.close for sink in sinks]
        if self._run.state() != "failed":  # `RunFolder.write_crash` has said so already
            # W&B may upload for long, and be killed over it
            ends.insert(0, lambda: self._run.set_state(state))
        for end in ends:
            try:
                end()
            # a full disk, of which the run may be dying: that error must come through
            except OSError as problem:
                logger.error("could not finish the run folder: %s", problem)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("finished" if kind is None else "failed")


def _make(
    config: Config, run: RunFolder, console: Console | None
) -> tuple[ConsoleSink, list[Sink]]:
    """The console's, and all of them."""
    supervised = config.algorithm.trains_on_data
    name = f"{run.path.name}/{run.stage}" if run.stage else run.path.name
    first = ConsoleSink(name, config.rollout.num_rollout or 0, console, supervised)
    sinks: list[Sink] = [first, JsonlSink(run)]
    if config.observe.use_tensorboard:
        from slime.observe.tensorboard_sink import TensorBoardSink

        names = (config.observe.tb_project_name, config.observe.tb_experiment_name)
        sinks.append(TensorBoardSink(run.tensorboard.joinpath(*filter(None, names))))
    if config.observe.use_wandb:
        from slime.observe.wandb_sink import WandbSink

        sinks.append(WandbSink(config, run))
    if config.observe.use_mlflow:
        from slime.observe.mlflow_sink import MlflowSink

        sinks.append(MlflowSink(config, run))
    if config.observe.use_trackio:
        from slime.observe.trackio_sink import TrackioSink

        sinks.append(TrackioSink(config, run))
    if config.observe.use_swanlab:
        from slime.observe.swanlab_sink import SwanlabSink

        sinks.append(SwanlabSink(config, run))
    return first, sinks
