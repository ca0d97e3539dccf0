"""Add what training knew of the tokens of recorded samples, when one is shown or a run is
frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from slime.files import read_lines
from slime.observe.recorder import trained_name
from slime.page.files import is_inside

#: Key of a sample → its line; the key is text, because lines may hold anything.
_Training = dict[bytes, dict[str, Any]]


def training_of(file: Path, rollout: int, run: Path) -> _Training:
    """Read what training knew of the samples of a file; {} if it was not trained on.

    Args:
        run: the run folder, outside of which nothing is read.
    """
    path = file.with_name(trained_name(rollout))
    if not is_inside(path, run):
        return {}
    try:
        lines = read_lines(path)
    except OSError:  # it went meanwhile
        return {}
    return {
        _key(line.get("index"), line.get("total_length"), line.get("response_length")): line
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
    found = known.get(_key(record.get("index"), total, response))
    if found is None:
        return record
    more = {
        name: _per_token(found.get(name), len(texts)) for name in ("advantages", "log_prob_diffs")
    }
    return {**record, "tokens": {**tokens, **more}}


def _key(index: Any, total_length: Any, response_length: Any) -> bytes:
    return orjson.dumps([index, total_length, response_length])


def _per_token(values: Any, length: int) -> list[Any] | None:
    """Expand one number to all tokens; None if the length does not fit."""
    if isinstance(values, (int, float)):
        return [values] * length
    return values if isinstance(values, list) and len(values) == length else None
