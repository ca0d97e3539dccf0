"""What training knew of the tokens of a recorded sample: read beside it, when one sample is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from slime.observe.recorder import trained_name
from slime.observe.watch.files import is_inside


def with_training(record: dict[str, Any], file: Path, rollout: int, run: Path) -> dict[str, Any]:
    """The line of a sample, with ``advantages`` and ``log_prob_diffs`` among its ``tokens``: an entry per token, or
    null.

    Args:
        file: where the line stands.
        run: the run folder, outside of which nothing is read.
    """
    tokens, path = record.get("tokens"), file.with_name(trained_name(rollout))
    if not isinstance(tokens, dict) or not isinstance(texts := tokens.get("text"), list) or not is_inside(path, run):
        return record
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # it is trained on later, or never
        return record
    prompt, response = record.get("prompt_length"), record.get("response_length")
    total = prompt + response if isinstance(prompt, int) and isinstance(response, int) else None
    wanted = {"index": record.get("index"), "total_length": total, "response_length": response}
    for line in lines:
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(found, dict) and all(found.get(name) == value for name, value in wanted.items()):
            known = {name: _per_token(found.get(name), len(texts)) for name in ("advantages", "log_prob_diffs")}
            return {**record, "tokens": {**tokens, **known}}
    return record


def _per_token(values: Any, length: int) -> list[Any] | None:
    """One number stands for all tokens."""
    if isinstance(values, (int, float)):
        return [values] * length
    return values if isinstance(values, list) and len(values) == length else None
