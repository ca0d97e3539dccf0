"""Rows of tasks for --prompt-data; shared by the adapters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.errors import UserError
from slime.samples.types import Sample


def write_rows(path: str | Path, prompts: Iterable[tuple[str, Any]]) -> int:
    """Write a row for each (prompt, task), from which `task_of` reads the task; return the number
    of rows.

    Use the file with ``--prompt-data PATH --input-key prompt --metadata-key metadata``.
    """
    rows = [json.dumps({"prompt": prompt, "metadata": {"task": task}}) for prompt, task in prompts]
    Path(path).write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def task_of(sample: Sample) -> Any:
    """Return the task that `write_rows` was given.

    Raises:
        UserError: the row has no task.
    """
    if "task" not in sample.metadata:
        raise UserError(
            f"sample {sample.index} names no task",
            why=f"its metadata has: {', '.join(sample.metadata) or 'nothing'}",
            fix="make the data with write_prompts() of the adapter, and pass --metadata-key "
            "metadata",
        )
    return sample.metadata["task"]
