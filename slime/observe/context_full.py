"""Samples that found no room to answer, told apart from answers that were cut at their length
limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ROWS = 10
#: Share of the samples that is not worth a word.
_FEW = 0.02
_NO_ROOM = "rollout/prompt_too_long"
_EMPTY = "rollout/dropped_empty"

Rows = Sequence[Mapping[str, Any]]


def no_room(rows: Rows) -> tuple[str, str] | None:
    """What is seen, and what to try, where prompts of the newest steps left no room for an
    answer."""
    newest = [row for row in rows if row.get(_NO_ROOM) is not None][-_ROWS:]
    count = sum(row[_NO_ROOM] for row in newest)
    samples = sum(row.get("rollout/num_samples") or 0.0 for row in newest)
    if count <= _FEW * (samples + count):
        return None
    empty = sum(row.get(_EMPTY) or 0.0 for row in newest)
    last = next(row["step"] for row in reversed(newest) if row[_NO_ROOM])
    when = (
        f"in the last {len(newest)} steps (last: step {last})"
        if len(newest) > 1
        else f"at step {last}"
    )
    detail = (
        f"{when} a prompt, or a conversation of several turns, filled the context {count:.0f} "
        f"times; {empty:.0f} samples without an answer left training"
    )
    fix = (
        "--rollout-max-prompt-len leaves such prompts out when the data is read; the context is "
        "--rollout-max-context-len, or without it the engine's (--sglang-context-length, by "
        "default what the model was made for)"
    )
    return detail, fix


def cut_shares(rows: Rows) -> list[float]:
    """Of each step the share of responses that were cut, without those that had no room from the
    start: these another limit would help."""
    shares = []
    for row in rows:
        share = row.get("rollout/truncated_ratio")
        if share is None:
            continue
        dropped = sum(
            value or 0.0 for name, value in row.items() if name.startswith("rollout/dropped_")
        )
        samples = (row.get("rollout/num_samples") or 0.0) + dropped
        shares.append(max(0.0, share - (row.get(_NO_ROOM) or 0.0) / samples) if samples else share)
    return shares
