"""Where metrics go: console, ``metrics.jsonl``, TensorBoard, W&B. The driver holds one `Sinks` per run.

Example (what a driver does):
    run = RunFolder.create(config, resuming)
    with Sinks(config, run) as sinks:
        sinks.rewind(first_step)                   # after loading a checkpoint
        for step in range(first_step, num_steps):
            with sinks.phase("rollout"):
                metrics = generate(step)
            with sinks.phase("train"):
                metrics |= train(step)
            sinks.log(step, metrics)               # once per step; adds perf/{rollout,train,step}_time
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from slime.observe.chrome_trace import add_phases
from slime.observe.console import ConsoleSink
from slime.observe.jsonl_sink import JsonlSink
from slime.observe.phases import PhaseTimer, now
from slime.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from slime.config import Config


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def rewind(self, next_step: int) -> None:
        """The run goes on at `next_step`; what an earlier process logged from there on is void."""

    def close(self) -> None: ...


class Sinks:
    """All sinks of a run, the driver's phases, and the lock on the run folder.

    Args:
        total_steps: for progress and ETA; by default ``--num-rollout`` (0 when that is unknown).
        console: for tests; by default stderr.
    """

    def __init__(
        self, config: Config, run: RunFolder, total_steps: int | None = None, console: Console | None = None
    ) -> None:
        self._run = run
        self._lock = run.lock()
        self._tracing = config.observe.trace
        steps = total_steps if total_steps is not None else config.rollout.num_rollout or 0
        self.console = ConsoleSink(run.stage or "", steps, console)
        self._sinks: list[Sink] = [self.console, JsonlSink(run)]
        if config.observe.use_tensorboard:
            from slime.observe.tensorboard_sink import TensorBoardSink

            names = (config.observe.tb_project_name, config.observe.tb_experiment_name)
            self._sinks.append(TensorBoardSink(run.tensorboard.joinpath(*filter(None, names))))
        if config.observe.use_wandb:
            from slime.observe.wandb_sink import WandbSink

            self._sinks.append(WandbSink(config, run))
        self._timer = PhaseTimer(on_change=self._phase_changed)
        self._open_phase: str | None = None
        self._step_start = now()

    def _phase_changed(self, name: str | None) -> None:
        self._open_phase = name
        self.console.phase_changed(name)

    @property
    def open_phase(self) -> str | None:
        """What the driver is doing now; for messages and crash reports."""
        return self._open_phase

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step: ``perf/{name}_time``, the driver's lane in the trace, the live display."""
        return self._timer.phase(name)

    def progress(self, done: int, target: int) -> None:
        """How far the open phase is (samples done of a rollout); for the live display only."""
        self.console.progress(done, target)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics everywhere, with the times of the phases since the last call.

        ``perf/step_time`` is the wall-clock time since the last call, added to rows that hold a rollout or a
        training step (not to evaluations logged on their own). Values given in `metrics` win.
        """
        end = now()
        is_step = any(name.startswith(("rollout/", "train/")) for name in metrics)
        merged: dict[str, float] = dict(self._timer.pop_metrics())
        if is_step:
            merged["perf/step_time"] = end - self._step_start
        merged.update(metrics)
        self._step_start = end
        for sink in self._sinks:
            sink.log(step, merged)
        if self._tracing and is_step:  # the file of a step is there (or ours to make) once its rollout has ended
            add_phases(self._run.trace / f"rollout_{step:06d}.json", self._timer.pop_events())

    def rewind(self, next_step: int) -> None:
        """Call when a run continues from a checkpoint: rows of this stage from `next_step` on are dropped."""
        for sink in self._sinks:
            sink.rewind(next_step)
        self._step_start = now()

    def close(self, state: str = "finished") -> None:
        """Flush and close everything, note `state` ("finished", "stopped" or "failed") in ``run.json``. Idempotent."""
        if not self._sinks:
            return
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        self._run.set_state(state)
        os.close(self._lock)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else "failed")
