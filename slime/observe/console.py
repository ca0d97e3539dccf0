"""Progress on the terminal: a live display on a TTY, one plain line per step elsewhere (CI, Ray job logs).

grpo  step 12/60  reward 0.625  length 11.2  loss 0.0131  3.4 s (rollout 2.1, train 1.2)  1,240 tok/s  eta 2:43
"""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

#: Metrics shown in a step's line: title, keys in order of preference, format.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/raw_reward", "rollout/rewards"), ".3f"),
    ("length", ("rollout/response_len/mean", "rollout/response_lengths"), ",.1f"),
    ("loss", ("train/loss",), ".4f"),
    ("kl", ("train/kl_loss", "train/ppo_kl"), ".4f"),
    ("grad norm", ("train/grad_norm",), ".3f"),
    ("Δ log-prob", ("train/train_rollout_logprob_abs_diff",), ".4f"),
    ("tok/s", ("perf/tokens_per_gpu_per_sec", "perf/actor_train_tok_per_s"), ",.0f"),
)

#: Times that are not added up beside the times of which one is measured too: their parts, or the whole around them.
COUNTED_IN = {
    "train": ("actor_train",),
    "save": ("save_model",),
    "evaluate": ("eval",),
    "data_wait": ("rollout",),
    # with generation ahead of training, a step costs what it waits for a rollout, not what the rollout took
    "rollout": ("train_wait",),
    "data_preprocess": ("train_wait",),
    "record": ("train_wait",),
}

_EVAL_SCORE = re.compile(r"eval/(?!.*-(?:pass@\d+|truncated_ratio)$)([^/]+)")


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mean rewards of an evaluation: ``eval/<name>`` keys without the statistics beside and below them."""
    return {match[1]: value for name, value in metrics.items() if (match := _EVAL_SCORE.fullmatch(name))}


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds per phase of one step, the longest first, without totals."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): value
        for name, value in metrics.items()
        if name.startswith("perf/") and name.endswith("_time") and "/" not in name.removeprefix("perf/")
    }
    parts = {
        name: value
        for name, value in times.items()
        if name != "step" and not any(other in times for other in COUNTED_IN.get(name, ()))
    }
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def column_values(metrics: Mapping[str, float]) -> dict[str, str]:
    """Title → formatted value of the columns this step has."""
    values = {}
    for title, keys, spec in COLUMNS:
        key = next((key for key in keys if key in metrics), None)
        if key is not None:
            values[title] = format(float(metrics[key]), spec)
    return values


def duration(seconds: float) -> str:
    """12.3 s, 2:43 or 1:02:43."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ConsoleSink:
    """Shows where the run is, what it scores, what a step costs and when it will end.

    Args:
        stage: name of this stage, "" for none.
        total_steps: steps of the whole run; 0 when unknown.
        console: where to write; a terminal gets the live display.
        supervised: this stage has no rewards; leave their column out.
    """

    def __init__(self, stage: str, total_steps: int, console: Console | None = None, supervised: bool = False) -> None:
        self._hidden = ("reward",) if supervised else ()
        self._console = console or Console(stderr=True)
        self._stage, self._total = stage or "run", total_steps
        self._done = 0
        self._phase: str | None = None
        self._phase_start = time.monotonic()
        self._counters: Mapping[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=10)
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=8)
        self._times: dict[str, float] = {}
        self._first_eval: dict[str, float] = {}
        self._last_eval: dict[str, float] = {}
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self.render, refresh_per_second=4, redirect_stdout=True
            )
            self._live.start()

    # -- input ---------------------------------------------------------------------------------------

    def phase_changed(self, name: str | None) -> None:
        self._phase, self._phase_start, self._counters = name, time.monotonic(), {}

    def progress(self, counters: Mapping[str, float]) -> None:
        """How far the open phase is: ``done`` of ``target`` groups, ``tokens`` so far."""
        self._counters = counters

    def begin(self, first_step: int, total_steps: int, launch_seconds: float) -> None:
        self._done, self._total = first_step, total_steps
        if self._live is None:
            line = f"{self._stage}  ready after {duration(launch_seconds)}, step {first_step} of {total_steps}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        scores = eval_scores(metrics)
        self._first_eval = {**scores, **self._first_eval}
        self._last_eval = {**self._last_eval, **scores}
        columns = {title: value for title, value in column_values(metrics).items() if title not in self._hidden}
        if columns or not scores:
            self._done = step
            self._rows.append((step, columns))
            self._times = phase_seconds(metrics)
            if "perf/step_time" in metrics:
                self._step_seconds.append(metrics["perf/step_time"])
        if self._live is None:
            self._console.print(self._line(step, columns, scores, metrics), highlight=False, soft_wrap=True)

    def rewind(self, next_step: int) -> None:
        """Nothing to take back: what was shown, was shown."""

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    # -- output --------------------------------------------------------------------------------------

    def eta(self) -> float | None:
        """Seconds until the last step ends, by the median of the last ten; None when unknown."""
        if not self._step_seconds or not self._total:
            return None
        return statistics.median(self._step_seconds) * max(0, self._total - self._done)

    def _line(self, step: int, columns: dict[str, str], scores: dict[str, float], metrics: Mapping[str, float]) -> Text:
        parts = [self._stage, f"step {step}/{self._total}" if self._total else f"step {step}"]
        parts += [f"{title} {value}" for title, value in columns.items()]
        parts += [f"eval/{name} {score:.3f}" for name, score in scores.items()]
        if columns and "perf/step_time" in metrics:
            split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in list(self._times.items())[:4])
            parts.append(f"{duration(metrics['perf/step_time'])}" + (f" ({split})" if split else ""))
        remaining = self.eta()
        if columns and remaining is not None:
            parts.append(f"eta {duration(remaining)}")
        return Text("  ".join(parts))

    def render(self) -> RenderableType:
        """The live display."""
        parts: list[RenderableType] = [self._header()]
        if self._rows:
            parts.append(self._table())
        if self._times:
            split = Text("  time per step  ", style="dim")
            for name, seconds in list(self._times.items())[:6]:
                split.append(f"{name} ", style="dim").append(f"{seconds:.2f} s  ")
            parts.append(split)
        if self._last_eval:
            line = Text("  evaluation     ", style="dim")
            for name, score in self._last_eval.items():
                line.append(f"{name} ", style="dim").append(f"{score:.3f}", style="bold green")
                line.append(f" (first {self._first_eval[name]:.3f})  ", style="dim")
            parts.append(line)
        return Group(*parts)

    def _header(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        counter = Text(f"step {self._done}/{self._total}" if self._total else f"step {self._done}")
        bar = ProgressBar(total=self._total or None, completed=self._done, width=30, pulse=not self._total)
        remaining = self.eta()
        status = Text(f"eta {duration(remaining)}" if remaining is not None else "", style="cyan")
        if self._phase is not None:
            status.append(f"  {self._phase} {duration(time.monotonic() - self._phase_start)}", style="yellow")
        if self._counters.get("target"):
            status.append(
                f"  {self._counters.get('done', 0):.0f}/{self._counters['target']:.0f} groups", style="yellow"
            )
        if self._counters.get("tokens"):
            status.append(f"  {self._counters['tokens']:,.0f} tokens", style="yellow")
        grid.add_row(Text(self._stage, style="bold magenta"), counter, bar, status)
        return grid

    def _table(self) -> Table:
        titles = [title for title, _, _ in COLUMNS if any(title in columns for _, columns in self._rows)]
        table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=True)
        for title in ("step", *titles):
            table.add_column(title, justify="right", no_wrap=True)
        for step, columns in self._rows:
            style = "bold" if step == self._rows[-1][0] else "dim"
            table.add_row(str(step), *(columns.get(title, "") for title in titles), style=style)
        return table
