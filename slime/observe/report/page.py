"""Puts the report together: one HTML file, no network, no external script, safe against hostile text."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import time
from typing import Any

import orjson

from slime import __version__
from slime.files import without_secrets
from slime.observe.alarms import engine_loads, find_alarms
from slime.observe.console import duration, eval_scores
from slime.observe.report.catalog import charts_of
from slime.observe.report.charts import Chart, number, points_json, sparkline, svg
from slime.observe.report.data import RunData, Stage, config_value, elapsed, flags_with_origins, is_supervised
from slime.observe.report.samples import escape, samples_html

_STATES = {
    "running": "running",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    "interrupted": "killed",
}


def _asset(name: str) -> str:
    return importlib.resources.files("slime.observe.report").joinpath(name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON for a ``<script>`` element: no character in it can end the element or begin a comment."""
    text = orjson.dumps(value).decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


class Figures:
    """Hands out an id per chart and keeps their points for the script."""

    def __init__(self) -> None:
        self.points: dict[str, dict[str, object]] = {}

    def figure(self, chart: Chart) -> str:
        chart_id = f"c{len(self.points)}"
        self.points[chart_id] = points_json(chart)
        final = next((y for _, y in reversed(chart.series[0].points) if y is not None), None)
        value = ""
        if len(chart.series) == 1 and final is not None:
            value = f'<b class="last">{number(final)}{" " + escape(chart.unit) if chart.unit else ""}</b>'
        legend = ""
        if len(chart.series) > 1:
            items = [f'<li><i class="b{s.color}"></i>{escape(s.name)}</li>' for s in chart.series]
            legend = f'<ul class="legend">{"".join(items)}</ul>'
        key = f'<code title="name in metrics.jsonl">{escape(chart.key)}</code>' if chart.key else ""
        return (
            f'<figure data-chart="{chart_id}"><figcaption><h4>{escape(chart.title)}{value}</h4>'
            f"<p>{escape(chart.note)} {key}</p></figcaption>{svg(chart)}{legend}</figure>"
        )


def _first_last(stage: Stage, key: str) -> tuple[float, float] | None:
    values = [y for _, y in stage.series(key) if y is not None]
    return (values[0], values[-1]) if values else None


def _tile(label: str, value: str, detail: str = "") -> str:
    return f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(detail)}</small></div>'


def _change_tile(stage: Stage, key: str, label: str) -> str:
    ends = _first_last(stage, key)
    if ends is None:
        return ""
    first, final = ends
    single = len(stage.series(key)) < 2
    return _tile(label, number(final), "" if single else f"from {number(first)}  ({final - first:+.3g})")


def _median_tile(stage: Stage, key: str, label: str, unit: str) -> str:
    values = sorted(y for _, y in stage.series(key) if y is not None)
    if not values:
        return ""
    text = duration(values[len(values) // 2]) if unit == "s" else f"{number(values[len(values) // 2])} {unit}"
    return _tile(label, text, "median")


def tiles_html(stage: Stage) -> str:
    """The numbers that say at a glance how the stage went."""
    names = list(dict.fromkeys(name for row in stage.rows for name in eval_scores(row)))
    tiles = [_change_tile(stage, f"eval/{name}", f"Evaluation: {name}") for name in names[:3]]
    if is_supervised(stage):
        tiles.append(_change_tile(stage, "train/loss", "Loss"))
    else:
        reward = "rollout/raw_reward" if stage.series("rollout/raw_reward") else "rollout/rewards"
        tiles.append(_change_tile(stage, reward, "Reward"))
    tiles.append(_change_tile(stage, "train/train_rollout_logprob_abs_diff", "Train–rollout difference"))
    tiles.append(_median_tile(stage, "perf/step_time", "Time per step", "s"))
    tiles.append(_median_tile(stage, "perf/tokens_per_gpu_per_sec", "Generation", "tok/s"))
    seconds = elapsed(stage)
    if seconds is not None:
        launch = sum(y or 0.0 for _, y in stage.series("perf/launch_time"))
        detail = f"{len(stage.rows)} steps logged" + (f", launch {duration(launch)}" if launch else "")
        tiles.append(_tile("Duration", duration(seconds), detail))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def alarms_html(stage: Stage) -> str:
    alarms = find_alarms(stage.rows, ended=stage.summary.get("ended") is not None)
    items = [
        f"<li><b>{escape(a.title)}.</b> {escape(a.detail)}{f'. <i>Try:</i> {escape(a.fix)}' if a.fix else ''}</li>"
        for a in alarms
    ]
    return f'<ul class="alarms">{"".join(items)}</ul>' if items else ""


def engines_html(stage: Stage) -> str:
    """Load of each engine as bars."""
    loads = engine_loads(stage.rows)
    if not loads:
        return ""
    most = max(loads.values()) or 1.0
    bars = [
        f"<li><span>engine {escape(name)}</span>"
        f'<i style="width:{100 * value / most:.1f}%"></i><b>{number(value)}</b></li>'
        for name, value in sorted(loads.items(), key=lambda item: int(item[0]))
    ]
    hint = '<p class="hint">requests in flight, mean over the run</p>'
    return f'<section><h3>Engines</h3>{hint}<ul class="bars">{"".join(bars)}</ul></section>'


def _fold(title: str, table_class: str, rows: list[str], is_open: bool = False) -> str:
    summary = f"<summary>{escape(title)}</summary>"
    table = f'<table class="{table_class}">{"".join(rows)}</table>'
    return f'<details class="fold"{" open" if is_open else ""}>{summary}{table}</details>'


def metrics_table_html(stage: Stage) -> str:
    """Every metric there is, one line each."""
    rows = []
    for key in sorted(stage.keys()):
        points = stage.series(key)
        values = [y for _, y in points if y is not None]
        if not values:
            continue
        cells = "".join(f"<td>{number(v)}</td>" for v in (values[0], values[-1], min(values), max(values)))
        rows.append(f"<tr><th>{escape(key)}</th><td>{sparkline(points)}</td>{cells}</tr>")
    if not rows:
        return ""
    head = "<tr><th>metric</th><th></th><th>first</th><th>last</th><th>least</th><th>greatest</th></tr>"
    return _fold(f"All {len(rows)} metrics", "metrics", [head, *rows])


def config_html(stage: Stage) -> str:
    """Settings: what the user set first, then what followed from it, then the defaults."""
    rows: dict[str, list[str]] = {"Set by the user": [], "Derived": [], "Defaults": []}
    for name, value, origin in flags_with_origins(stage.config):
        shown = without_secrets(name, value)
        text = shown if isinstance(shown, str) else orjson.dumps(shown, default=repr).decode()
        kind = origin.split(":")[0].split(" ")[0]
        title = "Derived" if kind == "derived" else "Defaults" if kind in ("default", "") else "Set by the user"
        rows[title].append(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td><td>{escape(origin)}</td></tr>")
    folds = [
        _fold(f"{title} ({len(part)})", "config", part, is_open=title == "Set by the user")
        for title, part in rows.items()
        if part
    ]
    return f"<section><h3>Configuration</h3>{''.join(folds)}</section>" if folds else ""


def state_html(state: str) -> str:
    return f'<span class="state {escape(state)}">{escape(_STATES.get(state, state))}</span>' if state else ""


def _stage_html(stage: Stage, charts: Figures, titled: bool) -> str:
    title = f"<h2>{escape(stage.name or 'run')} {state_html(str(stage.summary.get('state', '')))}</h2>"
    figures = []
    for section, specs in charts_of(stage).items():
        drawn = "".join(charts.figure(chart) for chart in specs)
        figures.append(f'<section><h3>{section}</h3><div class="charts">{drawn}</div></section>')
    empty = "" if stage.rows else '<p class="none">No step has been logged.</p>'
    return "".join(
        [
            f'<div class="stage" id="stage-{escape(stage.name or "run")}">',
            title if titled else "",
            alarms_html(stage),
            tiles_html(stage),
            empty,
            *figures,
            engines_html(stage),
            samples_html(stage, config_value(stage.config, "reward_key")),
            metrics_table_html(stage),
            config_html(stage),
            "</div>",
        ]
    )


def _facts(stage: Stage) -> list[str]:
    """Model, method and batch in a few words."""
    model = str(config_value(stage.config, "hf_checkpoint") or "").rstrip("/").rsplit("/", 1)[-1]
    loss = config_value(stage.config, "loss_type")
    method = config_value(stage.config, "advantage_estimator") if loss in (None, "policy_loss") else loss
    prompts, samples = (config_value(stage.config, name) for name in ("rollout_batch_size", "n_samples_per_prompt"))
    batch = f"{prompts} prompts × {samples} samples" if prompts and samples else ""
    return [text for text in (model, str(method or "").upper().replace("_", " "), batch) if text]


def _header_html(run: RunData) -> str:
    final = run.stages[-1]
    state = str(final.summary.get("state", ""))
    facts = _facts(final)
    if final.summary.get("started"):
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(final.summary["started"])))
    if final.summary.get("host"):
        facts.append(str(final.summary["host"]))
    nav = ""
    if len(run.stages) > 1:
        links = [f'<a href="#stage-{escape(s.name or "run")}">{escape(s.name or "run")}</a>' for s in run.stages]
        nav = f"<nav>{''.join(links)}</nav>"
    title = f"<h1>{escape(run.name)} {state_html(state)}</h1>"
    crash = _crash_html(run.crashes[-1]) if run.crashes and state == "failed" else ""
    return f'<header class="top">{title}<p>{escape(" · ".join(facts))}</p>{nav}</header>{crash}'


def _crash_html(crash: dict[str, Any]) -> str:
    lines = [f"{crash.get('error', 'Error')}: {crash.get('message', '')}", *crash.get("notes", ())]
    text = "\n  ".join(lines)
    note = f" ({escape(crash['note'])})" if crash.get("note") else ""
    more = f"<p>More in <code>{escape(crash['folder'])}</code></p>"
    return f'<div class="crash"><b>The run failed{note}.</b> <pre>{escape(text)}</pre>{more}</div>'


def render(run: RunData) -> str:
    """The page of a run."""
    charts = Figures()
    # the newest stage comes first: it is what one opens the report for
    body = "".join(_stage_html(stage, charts, titled=len(run.stages) > 1) for stage in reversed(run.stages))
    is_live = run.stages[-1].summary.get("state") == "running"
    return document(run.name, _header_html(run) + body, charts, str(run.path), is_live=is_live)


def document(title: str, body: str, charts: Figures, origin: str, *, is_live: bool = False) -> str:
    """A page that needs nothing else.

    Args:
        body: HTML, with the figures of ``charts`` in it.
        origin: what it was written from.
        is_live: the file will be written anew, and the page loads itself again.
    """
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f'<!doctype html>\n<html lang="en"{" data-live" if is_live else ""}><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · slime</title><style>{_asset('page.css')}</style></head><body><main>{body}"
        f"<footer>slime {escape(__version__)} · written {written} from {escape(origin)}</footer>"
        f'</main><div id="tip" hidden></div>'
        f'<script type="application/json" id="points">{script_json(charts.points)}</script>'
        f"<script>{script}</script></body></html>\n"
    )
