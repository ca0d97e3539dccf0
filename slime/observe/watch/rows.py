"""A sample as a row of the index: what it can be found and sorted by, and which text a search looks through."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from slime.observe.watch.files import Line

#: Of a row, beside the place of its line: file, offset and length.
COLUMNS = (
    *("stage", "kind", "rollout", "dataset", "grp", "sample", "status", "reward", "above", "prompt_length"),
    *("response_length", "trained_tokens", "log_prob", "cached_tokens", "tool_seconds", "removed", "prompt"),
)
#: What samples can be sorted by → the column.
SORTS = {
    "step": "rollout",
    "reward": "reward",
    "advantage": "above",
    "length": "response_length",
    "log_prob": "log_prob",
    "cached": "cached_tokens",
    "tools": "tool_seconds",
}


_INT64 = 1 << 63


@dataclass(frozen=True)
class Query:
    """Which samples, in which order.

    Attributes:
        stage: "" in a run with one stage.
        kind: "rollout" or "eval".
        rollout: number of the rollout; -1 is the evaluation before training. None: all.
        group: number of the prompt's draw.
        prompt: key of a prompt, as a row has it.
        words: each is somewhere in prompt, response or label.
        sort: one of `SORTS`.
    """

    stage: str = ""
    kind: str = "rollout"
    rollout: int | None = None
    group: int | None = None
    dataset: str | None = None
    status: str | None = None
    prompt: str | None = None
    words: tuple[str, ...] = ()
    sort: str = "step"
    descending: bool = False


def reward_of(record: dict[str, Any], reward_key: str | None = None) -> float | None:
    """The reward as a number: of a dict reward the value of `reward_key`, else its first number."""
    reward = record.get("reward")
    if isinstance(reward, dict):
        values = [reward.get(reward_key)] if reward_key in reward else list(reward.values())
        reward = next((v for v in values if isinstance(v, (int, float))), None)
    return float(reward) if isinstance(reward, (int, float)) else None


def searched_text(record: dict[str, Any]) -> str:
    """What a search looks through: prompt, response and label, folded."""
    parts = [record.get("prompt"), record.get("response"), record.get("label")]
    texts = [part if isinstance(part, str) else orjson.dumps(part).decode() for part in parts if part is not None]
    return "\n".join(texts).casefold()


def prompt_key(prompt: Any) -> str:
    """The same for the same prompt, in whichever step it was drawn."""
    return hashlib.blake2b(orjson.dumps(prompt), digest_size=8).hexdigest()


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _INT64 else float(value)  # SQLite has no larger integers


def row_of(file: int, line: Line, stage: str, kind: str, stem: str, reward_key: str | None) -> tuple[Any, ...]:
    """File, offset and length of a line, and the values of `COLUMNS`."""
    record = line.value
    number = stem.partition("_")[2]
    log_probs = record.get("log_probs")
    dataset, status = record.get("dataset"), record.get("status")
    return (
        file,
        line.offset,
        line.length,
        stage,
        kind,
        int(number) if number.isdecimal() and int(number) < _INT64 else -1,
        str(dataset) if dataset is not None else None,
        _number(record.get("group")),
        _number(record.get("index")),
        str(status) if status is not None else None,
        reward_of(record, reward_key),
        None,
        _number(record.get("prompt_length")),
        _number(record.get("response_length")),
        _number(record.get("trained_tokens")),
        _number(log_probs.get("mean")) if isinstance(log_probs, dict) else None,
        _number(record.get("cached_tokens")),
        _number(record.get("non_generation_time")),
        int(bool(record.get("remove_sample"))),
        prompt_key(record.get("prompt")),
    )


def condition_of(query: Query) -> tuple[str, list[Any]]:
    """What a query asks of the columns, as SQL and its values; its words are not among it."""
    names = ("stage", "kind", "rollout", "dataset", "status", "prompt")
    asked = [("grp", query.group), *((name, getattr(query, name)) for name in names)]
    asked = [(name, value) for name, value in asked if value is not None]
    return " AND ".join(f"{name} = ?" for name, _ in asked), [value for _, value in asked]


def order_of(query: Query) -> str:
    """In which order a query asks for its rows, as SQL; what lacks a value comes last, whichever way it goes."""
    way, column = "DESC" if query.descending else "ASC", SORTS[query.sort]
    return f"{column} {way} NULLS LAST{f', rollout {way}' if column != 'rollout' else ''}, id {way}"
