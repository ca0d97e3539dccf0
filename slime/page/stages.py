"""Everything that the live page and the report show about a stage, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from slime import __version__
from slime.files import read_object
from slime.observe.alarms import engine_loads, find_alarms
from slime.observe.catalog import SECTIONS
from slime.observe.run_data import Stage, config_value, elapsed, flags_with_origins, is_supervised
from slime.page.files import is_inside
from slime.page.rows import SORTS
from slime.redact import redact_text, redacted

#: Settings of a run's location, which do not count as differences.
_PLACES = ("run_name", "output_dir", "save", "load", "save_hf", "wandb_group", "wandb_run_id")
_ENGINES = (
    "rollout/engine_load/", "rollout/prefix_cache", "rollout/avg_cached", "rollout/spec_",
    "perf/engines_idle",
)  # fmt: skip


def all_runs(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of stages, the newest first, and the charts to draw.

    Args:
        described: results of `describe`; runs with equal names are shown by their paths.

    Returns:
        ``{"runs", "catalog": [{"section", "charts": [the fields of a ChartSpec]}], "sorts",
        "version"}``.
    """
    names = [run["name"] for run in described]
    told = [
        {**run, "name": run["path"] if names.count(run["name"]) > 1 else run["name"]}
        for run in described
    ]
    told.sort(key=lambda run: -(run["started"] or 0.0))
    catalog = [
        {"section": name, "charts": [dataclasses.asdict(spec) for spec in specs]}
        for name, specs in SECTIONS.items()
    ]
    return {"runs": told, "catalog": catalog, "sorts": list(SORTS), "version": __version__}


def describe(
    run: Path, stage: Stage, key: str, alarms: list[dict[str, str]], index: dict[str, int]
) -> dict[str, Any]:
    """Return the entry of a stage in the list of runs.

    Args:
        key: the stage's id on the page.
        index: result of `SampleIndex.progress`.
    """
    last = stage.rows[-1] if stage.rows else {}
    state = str(stage.summary.get("state") or "")
    return {
        "id": key,
        "name": run.name + (f"/{stage.name}" if stage.name else ""),
        "path": str(run) + (f" ({stage.name})" if stage.name else ""),
        "stage": stage.name,
        "state": state,
        "started": stage.summary.get("started") or last.get("time"),
        "elapsed": elapsed(stage),
        "step": last.get("step"),
        "length": config_value(stage.config, "num_rollout"),
        "supervised": is_supervised(stage),
        "facts": facts(stage),
        "alarms": alarms,
        "crash": crash(run) if state == "failed" else None,
        "index": index,
    }


def alarms_of(stage: Stage) -> list[dict[str, str]]:
    """Return the alarms of a stage, most severe first: ``{"name", "title", "detail", "fix"}``."""
    flags = {flag: value for flag, value, _ in flags_with_origins(stage.config)}
    found = find_alarms(stage.rows, ended=stage.summary.get("ended") is not None, flags=flags)
    return [{"name": a.name, "title": a.title, "detail": a.detail, "fix": a.fix} for a in found]


def crash(run: Path) -> dict[str, Any] | None:
    """Return the newest crash: ``{"error", "message", "notes", "note", "folder"}``."""
    files = [path for path in sorted(run.glob("crash/*/crash.json")) if is_inside(path, run)]
    if not files:
        return None
    details = read_object(files[-1])
    kept = {name: details.get(name) for name in ("error", "message", "notes", "note")}
    kept = {
        name: redact_text(text) if isinstance(text, str) else redacted(text)
        for name, text in kept.items()
    }
    return {**kept, "folder": str(files[-1].parent.relative_to(run))}


def facts(stage: Stage) -> list[str]:
    """Return model, method, batch and host in a few words."""
    model = str(config_value(stage.config, "hf_checkpoint") or "").rstrip("/").rsplit("/", 1)[-1]
    loss = config_value(stage.config, "loss_type")
    method = (
        config_value(stage.config, "advantage_estimator") if loss in (None, "policy_loss") else loss
    )
    prompts, samples = (
        config_value(stage.config, name) for name in ("rollout_batch_size", "n_samples_per_prompt")
    )
    batch = f"{prompts} prompts × {samples} samples" if prompts and samples else ""
    told = (
        model,
        str(method or "").upper().replace("_", " "),
        batch,
        str(stage.summary.get("host") or ""),
    )
    return [text for text in told if text]


def settings(stage: Stage) -> list[dict[str, str]]:
    """Return every setting as ``{"flag", "value", "origin"}``, without secrets."""
    return [
        {"flag": name, "value": _text(name, value), "origin": origin}
        for name, value, origin in flags_with_origins(stage.config)
    ]


def settings_that_differ(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return ``{"flag", "values": [its value in each stage, as text]}`` for the flags that differ;
    paths of the runs do not count."""
    known = [
        {flag: value for flag, value, _ in flags_with_origins(stage.config)} for stage in stages
    ]
    flags = dict.fromkeys(flag for values in known for flag in values if flag not in _PLACES)
    shown = {flag: [_text(flag, values.get(flag)) for values in known] for flag in flags}
    return [{"flag": flag, "values": texts} for flag, texts in shown.items() if len(set(texts)) > 1]


def _text(flag: str, value: Any) -> str:
    shown = redacted(value, flag)
    return shown if isinstance(shown, str) else orjson.dumps(shown, default=repr).decode()


def engines(stage: Stage) -> dict[str, Any]:
    """Return the mean load of each engine and the names of metrics about engines: ``{"loads":
    {engine: requests}, "names"}``."""
    loads = dict(sorted(engine_loads(stage.rows).items(), key=lambda item: int(item[0])))
    keys = stage.keys()
    return {"loads": loads, "names": [name for name in keys if name.startswith(_ENGINES)]}
