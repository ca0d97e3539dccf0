"""README.md of a trained model: its base model, its training and its scores, from the run
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.hub import hub_name
from slime.observe.console import eval_scores
from slime.observe.run_data import (
    RunData,
    Stage,
    config_value,
    flags_with_origins,
    is_supervised,
    learns_preferences,
)
from slime.redact import redacted

_CHOSEN = ("flag", "yaml")
#: Flags with names and paths of this machine, which are not part of the recipe.
_PLACES = (
    "output_dir", "run_name", "stage", "save", "save_hf", "load", "ref_load", "config", "resume",
)  # fmt: skip
UNKNOWN = "unknown"


def model_card(
    name: str,
    run: RunData | None,
    base_model: Path | None = None,
    licence: str = UNKNOWN,
    *,
    is_adapter: bool = False,
    base_format: str = "",
) -> str:
    """Return the card as Markdown with the hub's YAML header.

    Args:
        name: display name of the model.
        run: the run that trained it; None if unknown.
        base_model: directory that the run started from; a download from the hub gets its hub name.
        licence: the hub's identifier of the base model's licence.
        is_adapter: whether the files are a LoRA adapter of the base model.
        base_format: quantisation of the base model's weights; "" if they are not quantised.
    """
    base = (hub_name(str(base_model)) or base_model.name) if base_model is not None else ""
    library = "peft" if is_adapter else "transformers"
    head = {"library_name": library, "pipeline_tag": "text-generation", "license": licence}
    if base and "/" in base:
        head["base_model"] = base
    if is_adapter:
        head["base_model_relation"] = "adapter"
    supervised = run is not None and all(is_supervised(stage) for stage in run.stages)
    method = "reinforcement-learning"
    kind = "reinforcement learning"
    if run is not None and learns_preferences(run.stages[-1]):
        method = str(config_value(run.stages[-1].config, "preference_loss"))
        kind = f"learning from preferences ({method})"
    elif supervised:
        method = "sft"
        kind = "supervised fine-tuning"
    tags = ["slime", method] if run else ["slime"]
    tags += ["lora"] if is_adapter else []
    lines = ["---", *(f"{key}: {value}" for key, value in head.items())]
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", "", f"# {name}", ""]
    if is_adapter:
        form = f" ({base_format})" if base_format else ""
        lines += [
            f"An adapter (LoRA) of `{base}`{form}, in PEFT's format: it needs that model.",
            "",
        ]
    if run is None:
        return "\n".join(
            [*lines, "Uploaded with `slime push`; of its training nothing is known here.", ""]
        )
    lines += [
        f"{f'`{base}`' if base else 'A model'} after {kind} with slime (run `{run.name}`).",
        "",
    ]
    for stage in run.stages:
        lines += _stage(stage, several=len(run.stages) > 1)
    if versions := _versions(run):
        lines += ["## Made with", "", versions, ""]
    return "\n".join(lines)


def _stage(stage: Stage, several: bool) -> list[str]:
    flags = {flag: value for flag, value, _ in flags_with_origins(stage.config)}
    facts: dict[str, Any] = {"Data": _file(flags.get("prompt_data"))}
    if not is_supervised(stage):
        facts["Reward"] = (
            flags.get("custom_rm_path") and _file(flags["custom_rm_path"])
        ) or flags.get("rm_type")
        facts["Algorithm"] = flags.get("advantage_estimator")
    evaluated = flags.get("eval_prompt_data") or ()
    facts["Evaluated on"] = ", ".join(_file(path) or "" for path in evaluated[1::2])
    facts["Steps"] = int(stage.rows[-1]["step"]) if stage.rows else None
    title = f"## Training{f': {stage.name}' if several and stage.name else ''}"
    lines = [title, "", *(f"- {fact}: {value}" for fact, value in facts.items() if value), ""]
    lines += _scores(stage)
    chosen = [
        f"--{flag.replace('_', '-')} {_shown(flag, value)}".rstrip()
        for flag, value, origin in flags_with_origins(stage.config)
        if origin.startswith(_CHOSEN) and flag not in _PLACES and value is not None
    ]
    return [*lines, "```", *chosen, "```", ""] if chosen else lines


def _scores(stage: Stage) -> list[str]:
    """Return a table of the first and last value of the main curves."""
    keys = [
        f"eval/{name}"
        for name in dict.fromkeys(name for row in stage.rows for name in eval_scores(row))
    ]
    keys += ["train/loss"] if is_supervised(stage) else ["rollout/raw_reward"]
    rows = []
    for key in keys:
        values = [(step, value) for step, value in stage.series(key) if value is not None]
        if values:
            (first_step, first) = values[0]
            (last_step, last) = values[-1]
            rows.append(
                f"| {key} | {_number(first)} (step {first_step:g}) | {_number(last)} (step "
                f"{last_step:g}) |"
            )
    return ["| | first | last |", "|---|--:|--:|", *rows, ""] if rows else []


def _shown(flag: str, value: Any) -> str:
    """Format a flag's value without secrets and without this machine's folders."""
    value = redacted(value, flag)
    if value is True:
        return ""
    parts = value if isinstance(value, list) else [value]
    return " ".join(
        json.dumps(part) if isinstance(part, dict) else _file(str(part)) or "" for part in parts
    )


def _file(path: str | None) -> str | None:
    """Return the name of a file without its folder, or its name on the hub."""
    if not path:
        return None
    named = hub_name(path)
    return named or (path.rsplit("/", 1)[-1] if path.startswith(("/", "~", "./", "../")) else path)


def _versions(run: RunData) -> str:
    """Return the package versions of the last stage."""
    packages: dict[str, str] = run.stages[-1].summary.get("packages", {}) if run.stages else {}
    return ", ".join(
        f"{name} {version}" for name, version in packages.items() if version != "not installed"
    )


def _number(value: float) -> str:
    """Format a number in a few characters: 1,240 · 12.3 · 0.0123 · 1.2e-06."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}" if size >= 0.1 else f"{value:.2g}"
    return f"{value:.1e}"
