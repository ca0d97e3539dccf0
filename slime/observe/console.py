"""Progress on the terminal: a live table on a TTY, one plain line per step elsewhere (CI, Ray job
logs).

sums  step 12/60  reward 0.625 ↑  entropy 0.912  length 11.2  Δ log-prob 3e-07  1,240 tok/s  …
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slime.observe.alarms import Alarm
from slime.observe.notebook import can_move_cursor

#: Columns of a step: title, metrics in order of preference, format. Metrics that are 0 by
#: construction are left out: the policy-gradient loss, and its KL to the unchanged policy.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/raw_reward", "rollout/rewards"), ".3f"),
    ("entropy", ("train/entropy_loss", "rollout/entropy"), ".3f"),
    ("KL to ref", ("train/kl_loss",), ".4f"),
    ("length", ("rollout/response_len/mean", "rollout/response_lengths"), ",.1f"),
    ("Δ log-prob", ("train/train_rollout_logprob_abs_diff",), ".4f"),
    ("tok/s", ("perf/tokens_per_gpu_per_sec", "perf/actor_train_tok_per_s"), ",.0f"),
)
#: Columns of a stage without generation and rewards, such as supervised training.
SUPERVISED_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("train/loss",), ".4f"),
    ("grad norm", ("train/grad_norm",), ".3f"),
    ("length", ("rollout/response_lengths",), ",.1f"),
    ("tok/s", ("perf/actor_train_tok_per_s",), ",.0f"),
)

#: Phase → phases that overlap it. A step's sum leaves the phase out if one of them is measured,
#: too.
COUNTED_IN = {
    "train": ("actor_train",),
    "save": ("save_model",),
    "data_wait": ("rollout",),
    # if generation runs ahead of training, a step's cost is its wait for a rollout, not the
    # rollout's duration
    "rollout": ("train_wait",),
    "data_preprocess": ("train_wait",),
    "record": ("train_wait",),
}
#: Times that are not phases of a step: the step itself, the launch, and evaluations.
BESIDE_STEPS = ("step", "launch", "evaluate", "eval")

#: Phase → its name as a part of a step, and while it is in progress.
_WORDS = {
    "launch": ("launch", "launching"),
    "rollout": ("generate", "generating"),
    "train_wait": ("wait for samples", "waiting for samples"),
    "generation_wait": ("wait for generation", "waiting for generation"),
    "evaluation_wait": ("wait for evaluation", "waiting for the evaluation"),
    "data_preprocess": ("pack", "packing"),
    "record": ("record", "recording"),
    "start_rollout": ("begin", "beginning a rollout"),
    "log": ("log", "logging"),
    "handover": ("hand over", "handing over"),
    "train": ("train", "training"),
    "actor_train": ("train", "training"),
    "log_probs": ("log-probs", "scoring"),
    "ref_log_probs": ("reference", "scoring"),
    "update_weights": ("push", "pushing weights"),
    "save_model": ("save", "saving"),
    "evaluate": ("evaluate", "evaluating"),
}
#: Characters of the bar of a step's phases, and the colours of its parts.
_BAR_WIDTH = 20
_PHASE_STYLES = ("blue", "dark_orange", "green")
_SPARKS = "▁▂▃▄▅▆▇█"
#: Seconds until a plain log first reports the progress of a phase, and the longest interval between
#: the lines that follow.
_FIRST_NEWS = 30.0
_LONGEST_SILENCE = 300.0
_SHOWN_ROWS = 8
_SHOWN_ALARMS = 3

_EVAL_SCORE = re.compile(r"eval/(?!.*-(?:pass@\d+|truncated_ratio)$)([^/]+)")


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return dataset → mean reward of an evaluation: ``eval/<name>`` without other statistics."""
    return {
        match[1]: value for name, value in metrics.items() if (match := _EVAL_SCORE.fullmatch(name))
    }


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return seconds per phase of one step, longest first. Their sum is at most
    ``perf/step_time``."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): value
        for name, value in metrics.items()
        if name.startswith("perf/")
        and name.endswith("_time")
        and "/" not in name.removeprefix("perf/")
    }
    parts = {
        name: value
        for name, value in times.items()
        if name not in BESIDE_STEPS
        and not any(other in times for other in COUNTED_IN.get(name, ()))
    }
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def column_values(metrics: Mapping[str, float], supervised: bool = False) -> dict[str, str]:
    """Return title → formatted value of the columns that this step has."""
    values = {}
    for title, keys, spec in SUPERVISED_COLUMNS if supervised else COLUMNS:
        key = next((key for key in keys if key in metrics), None)
        if key is not None:
            value = float(metrics[key])
            values[title] = format(
                value, ".0e" if spec == ".4f" and 0 < abs(value) < 5e-4 else spec
            )
    return values


def duration(seconds: float) -> str:
    """Format seconds as 0.12 s, 12.3 s, 2:43 or 1:02:43."""
    if seconds < 60:
        return f"{seconds:.{2 if 0 < seconds < 0.95 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def trend(values: Sequence[float]) -> str:
    """Return the direction of the last ten values: "↑", "↓", or "→" if the change is within their
    scatter; "" for fewer than four.

    Example:
        >>> trend([0.1, 0.2, 0.3, 0.4]), trend([0.1, 0.4, 0.1, 0.4])
        ('↑', '→')
    """
    last = list(values)[-10:]
    if len(last) < 4:
        return ""
    before = last[: len(last) // 2]
    after = last[len(last) // 2 :]
    change = statistics.fmean(after) - statistics.fmean(before)
    scatter = (
        statistics.pvariance(before) / len(before) + statistics.pvariance(after) / len(after)
    ) ** 0.5
    return "→" if abs(change) <= max(scatter, 1e-9) else "↑" if change > 0 else "↓"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw the values as at most ``width`` bars; each bar is a mean of consecutive values.

    Example:
        >>> sparkline([0.0, 0.5, 1.0, 0.5])
        '▁▅█▅'
    """
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


class ConsoleSink:
    """Shows the state of the run, its scores, the time per step, and the time left.

    Args:
        name: name of the run, with its stage.
        total_steps: steps of the whole run; 0 when unknown.
        console: where to write; a terminal gets the live table.
        supervised: this stage has no rewards; the loss is shown instead.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        console: Console | None = None,
        supervised: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervised = supervised
        self._clock = clock
        self._console = console or Console(stderr=True, force_terminal=can_move_cursor(sys.stderr))
        self._name = name
        self._total = total_steps
        self._done = 0
        self._phase: str | None = None
        self._phase_start = self._next_news = clock()
        self._counters: Mapping[str, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=10)
        self._eval_seconds: list[float] = []
        """Seconds of each step's evaluation; 0 for a step without one."""
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=_SHOWN_ROWS)
        self._watched: list[float] = []
        """The reward of every step, or the loss."""
        self._times: dict[str, float] = {}
        self._first_eval: dict[str, float] = {}
        self._last_eval: dict[str, float] = {}
        self._alarms: dict[str, tuple[int, Alarm]] = {}
        self._trains = False
        """Whether training of the next step has begun; an evaluation then belongs to that
        step."""
        self._shows_alarms = True
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.render,
                refresh_per_second=4,
                redirect_stdout=True,
            )
            self._live.start()

    # -- input -------------------------------------------------------------------------------------

    def phase_changed(self, name: str | None) -> None:
        self._phase = name
        self._phase_start = self._clock()
        self._counters = {}
        self._next_news = self._phase_start + _FIRST_NEWS
        self._trains |= name == "train"

    def progress(self, counters: Mapping[str, float]) -> None:
        """Update the progress of the open phase: ``done`` of ``target`` prompts, and ``tokens`` so
        far."""
        self._counters = counters
        now = self._clock()
        if self._live is None and now >= self._next_news and counters.get("target"):
            self._next_news = now + min(_LONGEST_SILENCE, now - self._phase_start)
            evaluates_last = self._phase == "evaluate" and not self._trains
            self._print(f"{self._where(self._done + (not evaluates_last))}  {self._now()}")

    def begin(self, first_step: int, total_steps: int, launch_seconds: float) -> None:
        self._done = first_step
        self._total = total_steps
        if self._live is None:
            self._print(
                f"{self._name}  ready after {duration(launch_seconds)}, step {first_step} of "
                f"{total_steps}"
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        scores = eval_scores(metrics)
        self._first_eval = {**scores, **self._first_eval}
        self._last_eval = {**self._last_eval, **scores}
        for name in [name for name in self._alarms if metrics.get(f"alarm/{name}") == 0]:
            del self._alarms[name]
        columns = column_values(metrics, self._supervised)
        is_step = bool(columns) or not scores
        if is_step:
            self._add_step(step, columns, scores, metrics)
        elif any(at == step for at, _ in self._rows):  # the evaluation ended during later steps
            rows = [
                (at, {**shown, **_held_out(scores)} if at == step else shown)
                for at, shown in self._rows
            ]
            self._rows = deque(rows, maxlen=_SHOWN_ROWS)
        if self._live is None and is_step:
            self._print(self._line(step, columns, metrics))
        if self._live is None and scores:
            shown = ", ".join(self._score(name) for name in scores)
            seconds = metrics.get("perf/evaluate_time", metrics.get("perf/eval_time"))
            self._print(
                f"{self._where(step)}  held-out: {shown}"
                + (f"  {duration(seconds)}" if seconds else "")
            )

    def _add_step(
        self,
        step: int,
        columns: dict[str, str],
        scores: Mapping[str, float],
        metrics: Mapping[str, float],
    ) -> None:
        self._done = step
        self._trains = False
        seconds = metrics.get("perf/step_time")
        took = {"time": duration(seconds)} if seconds is not None else {}
        self._rows.append((step, {**columns, **_held_out(scores), **took}))
        _, keys, _ = SUPERVISED_COLUMNS[0] if self._supervised else COLUMNS[0]
        key = next((key for key in keys if key in metrics), None)
        if key is not None:
            self._watched.append(float(metrics[key]))
        times = phase_seconds(metrics)
        if seconds is not None:
            times["other"] = max(0.0, seconds - sum(times.values()))
            self._eval_seconds.append(metrics.get("perf/evaluate_time", 0.0))
            self._step_seconds.append(seconds)
        self._times = times

    def alarm(self, alarm: Alarm) -> None:
        """Print an alarm once, and show it below the live table until a step logs
        ``alarm/<name>`` = 0."""
        self._alarms[alarm.name] = (self._done, alarm)
        self._console.print(
            _alarm_text(self._where(self._done), alarm), soft_wrap=True, highlight=False
        )

    def rewind(self, next_step: int) -> None:
        """Do nothing, because printed lines cannot be withdrawn."""

    def closing_lines(self, alarms: Sequence[Alarm]) -> list[str]:
        """Return warnings for the end of the run. An alarm that was shown before gets no second
        explanation."""
        lines = []
        for alarm in alarms:
            step, shown = self._alarms.get(alarm.name, (0, None))
            if shown is not None:
                lines.append(f"warning since step {step}: {alarm.title} (explained above)")
                continue
            lines.append(f"warning: {alarm.title}: {alarm.detail}")
            lines += [f"  try: {alarm.fix}"] if alarm.fix else []
        return lines

    def close(self) -> None:
        self._phase = None
        # the final table stays on the terminal above the closing lines, which repeat the alarms
        self._shows_alarms = False
        if self._live is not None:
            self._live.stop()

    # -- output ------------------------------------------------------------------------------------

    def eta(self) -> float | None:
        """Estimate the seconds until the last step ends: the median of the last ten steps plus the
        mean evaluation, per remaining step. None if unknown."""
        if not self._step_seconds or not self._total:
            return None
        each = statistics.median(self._step_seconds) + statistics.fmean(self._eval_seconds)
        return each * max(0, self._total - self._done)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _where(self, step: int) -> str:
        return f"{self._name}  step {self._counted(step)}"

    def _counted(self, step: int) -> str:
        return f"{step}/{self._total}" if self._total else str(step)

    def _score(self, name: str) -> str:
        first = self._first_eval[name]
        last = self._last_eval[name]
        return f"{name} {last:.3f}" + (f" (first {first:.3f})" if first != last else "")

    def _line(self, step: int, columns: dict[str, str], metrics: Mapping[str, float]) -> str:
        parts = [self._where(step)]
        for title, value in columns.items():
            arrow = f" {trend(self._watched)}".rstrip() if title == self._watched_title else ""
            parts.append(f"{value} tok/s" if title == "tok/s" else f"{title} {value}{arrow}")
        if columns and "perf/step_time" in metrics:
            seconds = metrics["perf/step_time"]
            name, longest = next(iter(self._times.items()))
            share = ""
            if name != "other" and seconds:
                share = f", {100 * longest / seconds:.0f} % {phase_word(name)}"
            parts.append(duration(seconds) + share)
        return "  ".join(filter(None, [*parts, self._eta_text() if columns else ""]))

    def _eta_text(self) -> str:
        remaining = self.eta()
        if not remaining:
            return ""
        return f"eta {duration(remaining)}" if remaining >= 60 else f"eta {remaining:.0f} s"

    @property
    def _watched_title(self) -> str:
        return "loss" if self._supervised else "reward"

    def render(self) -> RenderableType:
        """Draw the live table. The refresh thread calls this too, so it iterates only over copies
        of what `log` changes."""
        parts: list[RenderableType] = [self._header(), ""]
        if self._rows:
            parts += [self._table(), ""]
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim")
        if len(self._watched) > 1:
            watched = list(self._watched)
            shown = Text(sparkline(watched), style="green")
            shown.append(
                f"  {watched[0]:.3f} → {watched[-1]:.3f} {trend(watched)}", style="default"
            )
            facts.add_row(self._watched_title, shown)
        if self._last_eval:
            facts.add_row(
                "held-out", Text(", ".join(map(self._score, list(self._last_eval))), style="green")
            )
        if self._step_seconds:
            facts.add_row("step", _phase_bar(self._times))
        if self._phase is not None:
            facts.add_row("now", Text(self._now(), style="yellow"))
        parts.append(Padding(facts, (0, 1)))
        for step, alarm in (
            list(self._alarms.values())[-_SHOWN_ALARMS:] if self._shows_alarms else ()
        ):
            parts += ["", Padding(_alarm_text(f"step {step}", alarm), (0, 1))]
        return Group(*parts)

    def _header(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=self._total or None,
            completed=self._done,
            width=30,
            pulse=not self._total,
            complete_style="magenta",
            finished_style="green",
        )
        grid.add_row(
            Text(self._name, style="bold magenta"),
            Text(f"step {self._counted(self._done)}"),
            bar,
            Text(self._eta_text(), style="cyan"),
        )
        return Padding(grid, (0, 1))

    def _now(self) -> str:
        """Describe the open phase, its progress and its time: "generating 17/64 prompts, 2,000
        tokens, 4.1 s"."""
        phase = self._phase or ""
        under_way = _WORDS.get(phase, ("", phase))[1]
        if self._counters.get("target"):
            under_way += (
                f" {self._counters.get('done', 0):.0f}/{self._counters['target']:.0f} prompts"
            )
        tokens = [f"{self._counters['tokens']:,.0f} tokens"] if self._counters.get("tokens") else []
        return ", ".join([under_way, *tokens, duration(self._clock() - self._phase_start)])

    def _table(self) -> Table:
        rows = list(self._rows)
        there = {title for _, columns in rows for title in columns}
        columns = [title for title, _, _ in (SUPERVISED_COLUMNS if self._supervised else COLUMNS)]
        titles = [
            title for title in (columns[0], "held-out", *columns[1:], "time") if title in there
        ]
        table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
        for title in ("step", *titles):
            table.add_column(title, justify="right", no_wrap=True)
        for step, values in rows:
            style = "bold" if step == rows[-1][0] else "dim"
            table.add_row(str(step), *(values.get(title, "") for title in titles), style=style)
        return table


def _held_out(scores: Mapping[str, float]) -> dict[str, str]:
    """Return the "held-out" column of a row: the score of the first evaluation data set."""
    return {"held-out": f"{next(iter(scores.values())):.3f}"} if scores else {}


def phase_word(phase: str) -> str:
    """Return the short name of a phase as a part of a step: "actor_train" → "train"."""
    return _WORDS.get(phase, (phase.replace("_", " "), ""))[0]


def _phase_bar(times: Mapping[str, float]) -> Text:
    """Draw the longest phases of a step as a bar and as numbers; "other" is the rest."""
    total = sum(times.values()) or 1.0
    phases = [
        (name, part)
        for name, part in times.items()
        if name != "other" and part / total >= 0.5 / _BAR_WIDTH
    ]
    shown = dict(phases[: len(_PHASE_STYLES)])
    bar = Text()
    words = Text("  ")
    for (name, part), style in zip(shown.items(), _PHASE_STYLES, strict=False):
        bar.append("━" * max(1, round(_BAR_WIDTH * part / total)), style=style)
        words.append(f"{phase_word(name)} ", style=style).append(
            f"{duration(part)}  ", style="default"
        )
    bar.append("━" * (_BAR_WIDTH - len(bar)), style="bright_black")
    rest = total - sum(shown.values())
    if rest / total >= 0.5 / _BAR_WIDTH:
        words.append("other ", style="bright_black").append(duration(rest), style="default")
    return bar + words


def _alarm_text(where: str, alarm: Alarm) -> Text:
    text = (
        Text(f"{where}  ")
        .append("warning: ", style="bold red")
        .append(f"{alarm.title}: ", style="bold")
    )
    text.append(alarm.detail)
    if alarm.fix:
        text.append("\n    try: ", style="dim").append(alarm.fix, style="yellow")
    return text
