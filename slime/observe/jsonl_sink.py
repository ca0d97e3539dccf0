"""``metrics.jsonl``: one JSON object per step, and one more per evaluation that ran during later
steps."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

from slime.errors import UserError
from slime.files import dump_line, write_atomically
from slime.log import get_logger
from slime.observe.run_data import read_metrics
from slime.observe.run_folder import RunFolder

logger = get_logger(__name__)


def metrics_row(step: int, metrics: dict[str, float], stage: str | None) -> dict[str, Any]:
    """Return the object of one line: the metrics plus ``step``, ``time`` (epoch seconds) and
    ``stage``.

    JSON has no NaN and infinities: they become null, and ``nonfinite`` lists their keys.

    Example:
        >>> metrics_row(3, {"train/loss": float("nan"), "train/lr": 0.1}, "sft")
        {'step': 3, 'time': 1767225600.0, 'stage': 'sft', 'train/loss': None, 'train/lr': 0.1,
         'nonfinite': ['train/loss']}
    """
    row: dict[str, Any] = {"step": step, "time": time.time(), "stage": stage}
    nonfinite = []
    for name, value in metrics.items():
        number = value if isinstance(value, int) else float(value)
        if not math.isfinite(number):
            nonfinite.append(name)
        row[name] = number if math.isfinite(number) else None
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row


class JsonlSink:
    """Appends whole lines to ``metrics.jsonl``.

    Opening the file removes an incomplete line that an earlier crash left.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._path = run.metrics_path
        self._remove_cut_line()
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _follow(self, step: int) -> None:
        """Open the file again if it was removed or moved during the run."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file), self._path.stat()):
                return
        logger.warning(
            "%s is not the file that this run writes to any more, which is %s now: steps from %d "
            "on are in a new one",
            self._path,
            os.readlink(f"/proc/self/fd/{self._file}"),
            step,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._open()
        os.close(self._file)
        self._file = new

    def _remove_cut_line(self) -> None:
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self._path, content.rfind(b"\n") + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        line = dump_line(metrics_row(step, metrics, self._run.stage))
        size: int | None = None
        try:
            self._follow(step)
            size = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written < len(line):  # the disk is full: write again, to get the error
                os.write(self._file, line[written:])
        except OSError as error:
            if size is not None:
                os.ftruncate(self._file, size)
            raise UserError(
                f"cannot write step {step} to {self._path}",
                why=error.strerror or str(error),
                fix="free disk space",
            ) from error

    def rewind(self, next_step: int) -> None:
        """Remove this stage's lines from `next_step` on, which a resumed run will write again.

        The removed lines are kept in ``history/``, as a record of the lost steps.
        """
        kept: list[dict[str, Any]] = []
        lost: list[dict[str, Any]] = []
        for row in read_metrics(self._path):
            is_lost = row.get("stage") == self._run.stage and row["step"] >= next_step
            (lost if is_lost else kept).append(row)
        if not lost:
            return
        stamp = time.strftime("%Y%m%d-%H%M%S")
        write_atomically(
            self._run.path / "history" / f"metrics.{stamp}.jsonl", b"".join(map(dump_line, lost))
        )
        write_atomically(self._path, b"".join(map(dump_line, kept)))
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        os.close(self._file)
