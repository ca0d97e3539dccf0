"""TensorBoard event files, written with the tensorboard package, without torch or TensorFlow."""

from __future__ import annotations

import itertools
import os
import platform
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_file_count = itertools.count()


class TensorBoardSink:
    """Writes scalars to ``directory`` and flushes them once per step, so that curves grow during
    the run."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        number = f"{next(_file_count):04d}"  # readers sort files by name
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{number}"
        )
        self._writer = RecordWriter((directory / name).open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def rewind(self, next_step: int) -> None:
        """Tell readers to discard values of earlier event files from `next_step` on."""
        self._write(
            Event(
                wall_time=time.time(),
                step=next_step,
                session_log=SessionLog(status=SessionLog.START),
            )
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()
