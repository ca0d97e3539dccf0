"""A sample as a row of the index: its sort keys, the text for searches, and its question.

Steps are those of metrics: rollout k is step k + 1, an evaluation before training is step 0.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.files import read_lines
from slime.observe.recorder import trained_name
from slime.page.files import JsonLine, is_inside

#: Columns of a row besides the place of its line: file, offset and length.
COLUMNS = (
    "stage", "kind", "step", "dataset", "grp", "sample", "status", "reward", "above", "spread",
    "prompt_length", "response_length", "trained_tokens", "log_prob", "cached_tokens",
    "tool_seconds", "removed", "prompt",
)  # fmt: skip
#: Sort key → column.
SORTS = {
    "step": "step",
    "spread": "spread",
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
    """Filters and order of a request for samples.

    Attributes:
        stage: "" in a run with one stage.
        kind: "rollout" or "eval".
        step: of the run; 0 is the evaluation before training. None: all.
        group: number of the prompt's draw.
        prompt: key of a prompt, as a row has it.
        words: each is somewhere in prompt, response or label.
        sort: one of `SORTS`.
    """

    stage: str = ""
    kind: str = "rollout"
    step: int | None = None
    group: int | None = None
    dataset: str | None = None
    status: str | None = None
    prompt: str | None = None
    words: tuple[str, ...] = ()
    sort: str = "step"
    descending: bool = False


def reward_of(record: dict[str, Any], reward_key: str | None = None) -> float | None:
    """Return the reward as a number; of a dict the value of ``reward_key``, else its first
    number."""
    reward = record.get("reward")
    if isinstance(reward, dict):
        values = [reward.get(reward_key)] if reward_key in reward else list(reward.values())
        reward = next((v for v in values if isinstance(v, (int, float))), None)
    return float(reward) if isinstance(reward, (int, float)) else None


def searched_text(record: dict[str, Any]) -> str:
    """Return the text that a search reads: prompt, response and label, casefolded."""
    parts = [record.get("prompt"), record.get("response"), record.get("label")]
    texts = [
        part if isinstance(part, str) else orjson.dumps(part).decode()
        for part in parts
        if part is not None
    ]
    return "\n".join(texts).casefold()


def prompt_key(prompt: Any) -> str:
    """Return a key of a prompt, which is the same in every step that drew it."""
    return hashlib.blake2b(orjson.dumps(prompt), digest_size=8).hexdigest()


#: Marks of a user's turn in prompts that a chat template has rendered, and what ends a turn.
_USER_MARK = re.compile(
    r"(?:<[^<>\s]{0,30}user[^<>\s]{0,12}>(?:user)?|<[^<>\s]{1,30}>\s?user\b)(?:<[^<>\s]{1,30}>)*"
    r"|\[INST\]|^(?:user|human)\s?:",
    re.IGNORECASE | re.MULTILINE,
)
_TURN_END = re.compile(
    r"<[|｜][^<>\n]{1,40}[|｜]?>|<[^<>\s]{0,30}(?:end|turn|assistant)[^<>\s]{0,12}>|</?s>|\[/INST\]|"
    r"^assistant\s?:",
    re.IGNORECASE | re.MULTILINE,
)
#: Markers of a user's turn that an environment or a tool wrote.
_NO_QUESTION = ("<tool_response>", "<|tool_response|>", "<information>")


def question_of(prompt: Any) -> str:
    """Return the last user turn of a prompt: of chat messages, or of text that a chat template has
    rendered.

    A prompt without turns is the question itself.

    Example:
        >>> question_of("<|system|>Be brief.<|user|>Hi<|assistant|>")
        'Hi'
    """
    if isinstance(prompt, list):
        users = [m for m in prompt if isinstance(m, dict) and m.get("role") == "user"]
        last = (users or prompt or [""])[-1]
        return _as_text(last.get("content") if isinstance(last, dict) else last).strip()
    text = _as_text(prompt)
    for mark in reversed(list(_USER_MARK.finditer(text))):
        end = _TURN_END.search(text, mark.end())
        turn = text[mark.end() : end.start() if end else None].strip()
        if turn and not turn.startswith(_NO_QUESTION):
            return turn
    return text.strip()


def _as_text(value: Any) -> str:
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, dict) and "type" in part for part in value)
    ):
        return " ".join(str(part.get("text") or f"[{part['type']}]") for part in value)
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def short_texts(record: dict[str, Any], most: int = 240) -> dict[str, str]:
    """Return the beginnings of a sample's texts for a list: ``{"question", "response",
    "label"}``."""
    texts = {
        "question": question_of(record.get("prompt")),
        "response": _as_text(record.get("response")),
        "label": _as_text(record.get("label")),
    }
    return {name: text[:most] for name, text in texts.items()}


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _INT64 else float(value)  # SQLite has no larger integers


def row_of(
    file: int, line: JsonLine, stage: str, kind: str, stem: str, reward_key: str | None
) -> tuple[Any, ...]:
    """Return file, offset and length of a line, and the values of `COLUMNS`."""
    record = line.value
    number = stem.partition("_")[2]
    log_probs = record.get("log_probs")
    dataset = record.get("dataset")
    status = record.get("status")
    return (
        file,
        line.offset,
        line.length,
        stage,
        kind,
        int(number) + 1 if number.isdecimal() and int(number) < _INT64 - 1 else 0,
        str(dataset) if dataset is not None else None,
        _number(record.get("group")),
        _number(record.get("index")),
        str(status) if status is not None else None,
        reward_of(record, reward_key),
        None,
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
    """Return the filters of a query as SQL and its values; its words are not part of it."""
    names = ("stage", "kind", "step", "dataset", "status", "prompt")
    asked = [("grp", query.group), *((name, getattr(query, name)) for name in names)]
    asked = [(name, value) for name, value in asked if value is not None]
    return " AND ".join(f"{name} = ?" for name, _ in asked), [value for _, value in asked]


def order_of(query: Query) -> str:
    """Return the ORDER BY of a query; rows without a value come last in either direction."""
    way = "DESC" if query.descending else "ASC"
    column = SORTS[query.sort]
    return f"{column} {way} NULLS LAST{f', step {way}' if column != 'step' else ''}, id {way}"


# -- values of tokens in training ------------------------------------------------------------------

#: Key of a sample → its line; the key is text, because lines may hold anything.
_Training = dict[bytes, dict[str, Any]]


def training_of(file: Path, rollout: int, run: Path) -> _Training:
    """Read training's values for the samples of a file; {} if it was not trained on.

    Args:
        run: the run folder, outside of which nothing is read.
    """
    path = file.with_name(trained_name(rollout))
    if not is_inside(path, run):
        return {}
    try:
        lines = read_lines(path)
    except OSError:  # deleted meanwhile
        return {}
    return {
        _training_key(
            line.get("index"), line.get("total_length"), line.get("response_length")
        ): line
        for line in lines
    }


def with_training(record: dict[str, Any], known: _Training) -> dict[str, Any]:
    """Add ``advantages`` and ``log_prob_diffs`` to the ``tokens`` of a sample's line: an entry per
    token, or null.

    Args:
        known: as `training_of` gives it.
    """
    tokens = record.get("tokens")
    if (
        not known
        or not isinstance(tokens, dict)
        or not isinstance(texts := tokens.get("text"), list)
    ):
        return record
    prompt = record.get("prompt_length")
    response = record.get("response_length")
    total = prompt + response if isinstance(prompt, int) and isinstance(response, int) else None
    found = known.get(_training_key(record.get("index"), total, response))
    if found is None:
        return record
    more = {
        name: _per_token(found.get(name), len(texts)) for name in ("advantages", "log_prob_diffs")
    }
    return {**record, "tokens": {**tokens, **more}}


def _training_key(index: Any, total_length: Any, response_length: Any) -> bytes:
    return orjson.dumps([index, total_length, response_length])


def _per_token(values: Any, length: int) -> list[Any] | None:
    """Expand one number to all tokens; None if the length does not fit."""
    if isinstance(values, (int, float)):
        return [values] * length
    return values if isinstance(values, list) and len(values) == length else None
