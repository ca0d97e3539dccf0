"""Recorded samples as HTML: the best and the worst of the groups that differ most. All text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.files import read_lines
from slime.observe.report.charts import number
from slime.observe.report.data import Stage

MAX_GROUPS = 4
MAX_EVAL = 3


def escape(value: Any) -> str:
    return html.escape(str(value), quote=True)


def reward_of(record: dict[str, Any], reward_key: str | None = None) -> float | None:
    """The reward as a number: of a dict reward the value of `reward_key`, else its first number."""
    reward = record.get("reward")
    if isinstance(reward, dict):
        values = [reward.get(reward_key)] if reward_key in reward else list(reward.values())
        reward = next((v for v in values if isinstance(v, (int, float))), None)
    return float(reward) if isinstance(reward, (int, float)) else None


def groups_by_contrast(records: Sequence[dict[str, Any]], reward_key: str | None) -> list[list[dict[str, Any]]]:
    """The records by group, each group from best to worst; groups with the largest reward difference first."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record.get("group"), []).append(record)

    def reward(record: dict[str, Any]) -> float:
        value = reward_of(record, reward_key)
        return float("-inf") if value is None else value

    ordered = [sorted(group, key=reward, reverse=True) for group in groups.values()]
    scored = [group for group in ordered if reward(group[-1]) > float("-inf")]
    unscored = [group for group in ordered if reward(group[-1]) == float("-inf")]
    return sorted(scored, key=lambda group: reward(group[-1]) - reward(group[0])) + unscored


def prompt_html(prompt: Any) -> str:
    """A text prompt, or chat messages with their roles."""
    if isinstance(prompt, list):
        parts = []
        for message in prompt:
            if isinstance(message, dict):
                role, content = message.get("role", "?"), message.get("content", "")
                parts.append(f'<span class="role">{escape(role)}</span> {escape(content)}')
            else:
                parts.append(escape(message))
        return "\n".join(parts)
    return escape(prompt)


def response_html(record: dict[str, Any]) -> str:
    """The response; pieces that are not trained on are shaded, pieces of an other weight version marked."""
    pieces = record.get("segments")
    if not isinstance(pieces, list) or not pieces:
        return escape(record.get("response") or "") or '<span class="empty">(empty response)</span>'
    versions = {piece.get("version") for piece in pieces if piece.get("version") is not None}
    parts = []
    for piece in pieces:
        kind = "trained" if piece.get("trained") else "untrained"
        title = "trained on" if piece.get("trained") else "not trained on (loss mask 0)"
        version = piece.get("version")
        if version is not None and len(versions) > 1:
            title += f", weights {version}"
            parts.append(f'<sup class="version">v{escape(version)}</sup>')
        parts.append(f'<span class="{kind}" title="{escape(title)}">{escape(piece.get("text", ""))}</span>')
    return "".join(parts)


def _chips(record: dict[str, Any], reward_key: str | None) -> str:
    reward = reward_of(record, reward_key)
    chips = [f'<b class="reward">reward {escape(number(reward) if reward is not None else "–")}</b>']
    status = record.get("status")
    if status and status != "completed":
        chips.append(f'<span class="chip warn">{escape(status)}</span>')
    chips.append(f'<span class="chip">{escape(record.get("response_length", "?"))} tokens</span>')
    log_probs = record.get("log_probs")
    if isinstance(log_probs, dict) and isinstance(log_probs.get("mean"), (int, float)):
        chips.append(f'<span class="chip">log-prob {escape(number(log_probs["mean"]))}</span>')
    if record.get("remove_sample"):
        chips.append('<span class="chip warn">removed from the loss</span>')
    return " ".join(chips)


def _column(title: str, record: dict[str, Any], kind: str, reward_key: str | None) -> str:
    return (
        f'<div class="response {kind}"><header><em>{title}</em> {_chips(record, reward_key)}</header>'
        f"<pre>{response_html(record)}</pre></div>"
    )


def _rewards_strip(group: Sequence[dict[str, Any]], reward_key: str | None) -> str:
    rewards = [reward_of(record, reward_key) for record in group]
    shown = ", ".join("–" if r is None else number(r) for r in rewards[:16])
    more = f" … ({len(rewards)} in all)" if len(rewards) > 16 else ""
    return f'<span class="strip" title="rewards of the group, best first">{escape(shown + more)}</span>'


def group_html(group: Sequence[dict[str, Any]], reward_key: str | None) -> str:
    best, worst = group[0], group[-1]
    same = len(group) == 1 or reward_of(best, reward_key) == reward_of(worst, reward_key)
    label = best.get("label")
    label_html = f'<div class="label"><em>label</em> {escape(label)}</div>' if label not in (None, "") else ""
    if same:
        columns = _column("all alike" if len(group) > 1 else "sample", best, "", reward_key)
    else:
        columns = _column("best", best, "best", reward_key) + _column("worst", worst, "worst", reward_key)
    return (
        f'<article class="group"><header>group {escape(best.get("group"))} · {len(group)} samples '
        f"{_rewards_strip(group, reward_key)}</header>"
        f'<pre class="prompt">{prompt_html(best.get("prompt"))}</pre>{label_html}'
        f'<div class="columns">{columns}</div></article>'
    )


def eval_html(records: Sequence[dict[str, Any]], reward_key: str | None) -> str:
    """A few right and wrong answers of each data set."""
    parts = []
    for name in dict.fromkeys(record.get("dataset") for record in records):
        scored = [r for r in records if r.get("dataset") == name and reward_of(r, reward_key) is not None]
        scored.sort(key=lambda r: reward_of(r, reward_key) or 0.0, reverse=True)
        if not scored:
            continue
        best = scored[:MAX_EVAL]
        worst = [r for r in scored[-MAX_EVAL:] if r not in best]
        parts.append(f"<h4>{escape(name)}</h4>")
        for kind, chosen in (("best", best), ("worst", worst)):
            for record in chosen:
                label = record.get("label")
                label_html = f'<div class="label"><em>label</em> {escape(label)}</div>' if label is not None else ""
                parts.append(
                    f'<article class="group"><pre class="prompt">{prompt_html(record.get("prompt"))}</pre>{label_html}'
                    f'<div class="columns">{_column(kind, record, kind, reward_key)}</div></article>'
                )
    return "".join(parts)


def _chosen_files(files: dict[str, Path]) -> list[tuple[str, Path]]:
    """First, middle and last."""
    items = list(files.items())
    if len(items) <= 3:
        return items
    return [items[0], items[len(items) // 2], items[-1]]


def _title(stem: str) -> str:
    kind, _, number_text = stem.partition("_")
    if number_text == "start":
        return "Evaluation before training"
    index = int(number_text) if number_text.isdigit() else number_text
    return f"Rollout {index}" if kind == "rollout" else f"Evaluation after rollout {index}"


def samples_html(stage: Stage, reward_key: str | None = None) -> str:
    """The samples section of a stage; "" when nothing was recorded."""
    tabs = []
    for stem, path in _chosen_files(stage.rollouts):
        groups = groups_by_contrast(read_lines(path), reward_key)[:MAX_GROUPS]
        if groups:
            tabs.append((_title(stem), "".join(group_html(group, reward_key) for group in groups)))
    for stem, path in list(stage.evaluations.items())[-1:]:
        content = eval_html(read_lines(path), reward_key)
        if content:
            tabs.append((_title(stem), content))
    if not tabs:
        return ""
    last_rollout = max((i for i, (title, _) in enumerate(tabs) if title.startswith("Rollout")), default=0)
    parts = ['<section><h3>Samples</h3><p class="hint">Groups whose rewards differ most: best beside worst.</p>']
    for i, (title, content) in enumerate(tabs):
        is_open = " open" if i == last_rollout else ""
        parts.append(f'<details class="tab"{is_open}><summary>{escape(title)}</summary>{content}</details>')
    return "".join([*parts, "</section>"])
