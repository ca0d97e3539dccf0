"""Several runs on one page: each metric of the report with a line per run, and the settings in which they differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import orjson

from slime.files import without_secrets
from slime.observe.console import duration, eval_scores
from slime.observe.report.catalog import charts_of
from slime.observe.report.charts import Chart, Series, number, smooth
from slime.observe.report.data import RunData, Stage, elapsed, flags_with_origins
from slime.observe.report.page import Figures, document, state_html
from slime.observe.report.samples import escape

#: Settings that say where a run is, not what it does.
_PLACES = ("run_name", "output_dir", "save", "load", "save_hf", "wandb_group", "wandb_run_id")
#: Colours of the page, and points from which a line is a moving average.
_COLORS, _MANY = 8, 30


def render_comparison(runs: Sequence[RunData]) -> str:
    """The page. Of a run with several stages the newest is compared."""
    stages = {_name(run, runs): run.stages[-1] for run in runs}
    figures = Figures()
    sections = []
    for section, charts in comparison_charts(stages).items():
        drawn = "".join(figures.figure(chart) for chart in charts)
        sections.append(f'<section><h3>{section}</h3><div class="charts">{drawn}</div></section>')
    title = " vs ".join(stages)
    body = [f'<header class="top"><h1>{escape(title)}</h1></header>', _summary_html(stages), *sections]
    return document(
        title, "".join([*body, _differences_html(stages)]), figures, ", ".join(str(run.path) for run in runs)
    )


def _name(run: RunData, runs: Sequence[RunData]) -> str:
    return run.name if sum(other.name == run.name for other in runs) == 1 else str(run.path)


def comparison_charts(stages: dict[str, Stage]) -> dict[str, list[Chart]]:
    """Section → charts with a line per run, of every metric that a report has a chart of in one of them."""
    sections: dict[str, dict[str, tuple[Chart, list[Series]]]] = {}
    for position, (name, stage) in enumerate(stages.items()):
        for section, charts in charts_of(stage).items():
            for chart in charts:
                for title, series in _lines(chart, stage):
                    many = len(series.points) > _MANY and not chart.exact
                    points = smooth(series.points) if many else series.points
                    _, lines = sections.setdefault(section, {}).setdefault(title, (chart, []))
                    lines.append(Series(name, points, position % _COLORS + 1))
    return {
        section: [Chart(title, lines, c.note, c.unit, key=c.key, exact=True) for title, (c, lines) in charts.items()]
        for section, charts in sections.items()
    }


def _lines(chart: Chart, stage: Stage) -> list[tuple[str, Series]]:
    """(title, line) of what a report has in one chart: each line of several is a chart of its own, a stack its sum."""
    if chart.stacked:
        return [(chart.title, Series(chart.title, stage.series(chart.key)))]
    if chart.exact or len(chart.series) > 1:
        return [(f"{chart.title}: {series.name}", series) for series in chart.series]
    return [(chart.title, series) for series in chart.series]


def _summary_html(stages: dict[str, Stage]) -> str:
    rows = []
    for name, stage in stages.items():
        reward = _last(stage, "rollout/raw_reward")
        scores = {key: _last(stage, f"eval/{key}") for row in stage.rows for key in eval_scores(row)}
        times = [y for _, y in stage.series("perf/step_time") if y is not None]
        seconds = elapsed(stage)
        cells = (
            str(int(stage.rows[-1]["step"])) if stage.rows else "0",
            reward,
            ", ".join(f"{key} {value}" for key, value in scores.items()),
            duration(statistics.median(times)) if times else "",
            duration(seconds) if seconds is not None else "",
        )
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{escape(name)} {state_html(str(stage.summary.get('state', '')))}</th>{shown}</tr>")
    titles = ("run", "steps", "last reward", "last evaluation", "time per step", "duration")
    head = "<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"
    return f'<section><h3>Runs</h3><table class="metrics">{head}{"".join(rows)}</table></section>'


def _last(stage: Stage, key: str) -> str:
    return next((number(y) for _, y in reversed(stage.series(key)) if y is not None), "")


def settings_that_differ(stages: dict[str, Stage]) -> dict[str, list[str]]:
    """Flag → its value in each of the runs as text, of the flags that are not the same in all; where a run is does not
    count."""
    settings = {name: {flag: value for flag, value, _ in flags_with_origins(s.config)} for name, s in stages.items()}
    flags = dict.fromkeys(flag for values in settings.values() for flag in values)
    shown = {flag: [_text(flag, values.get(flag)) for values in settings.values()] for flag in flags}
    return {flag: texts for flag, texts in shown.items() if flag not in _PLACES and len(set(texts)) > 1}


def _differences_html(stages: dict[str, Stage]) -> str:
    rows = [
        f"<tr><th>{escape(flag)}</th>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
        for flag, texts in settings_that_differ(stages).items()
    ]
    if not rows:
        return '<p class="none">The settings are the same.</p>'
    head = "<tr><th>setting</th>" + "".join(f"<th>{escape(name)}</th>" for name in stages) + "</tr>"
    return f'<section><h3>Settings that differ</h3><table class="config">{head}{"".join(rows)}</table></section>'


def _text(flag: str, value: object) -> str:
    shown = without_secrets(flag, value)
    return shown if isinstance(shown, str) else orjson.dumps(shown, default=repr).decode()
