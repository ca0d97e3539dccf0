"""Read files of a run folder safely: some may be huge, half-written, links or pipes. Only regular
files inside the folder are opened, and large files are read only at their two ends."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Bytes of a log that are read: the head shows the launch, the tail the end.
HEAD_BYTES = 256 << 10
TAIL_BYTES = 2 << 20
#: Maximum characters of a line; longer lines are cut.
_MAX_CHARACTERS = 2000
#: Maximum number of logs that are read, newest first.
MAX_LOGS = 64
#: Kinds of `TextSource` that signatures may name: logs of processes, the error that ended the run,
#: and its traceback.
KINDS = frozenset({"engine", "trainer", "rollout", "router", "driver", "crash", "traceback"})
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class TextLine:
    """A line of a text.

    Attributes:
        number: line number in the file, from 1; negative numbers count from its end, -1 is the
            last line.
    """

    text: str
    number: int

    @property
    def place(self) -> str:
        return f"line {self.number}" if self.number > 0 else f"line {-self.number} from the end"


@dataclass(frozen=True)
class TextSource:
    """A text that is searched for causes.

    Attributes:
        name: display name: "logs/engine-0.log".
        kind: one of `KINDS`, or another word for logs of other processes.
        lines: the lines, in order.
        num_skipped: bytes between the two ends that were not read.
    """

    name: str
    kind: str
    lines: list[TextLine] = field(repr=False)
    num_skipped: int = 0


def is_within(path: Path, root: Path) -> bool:
    """Tell whether a path is a regular file inside ``root`` and has no link in it below
    ``root``."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        return path.resolve().is_relative_to(root.resolve()) and path.parent.resolve() == _plain(
            path.parent, root
        )
    except OSError:  # removed meanwhile, or in a folder that this user may not read
        return False


def _plain(folder: Path, root: Path) -> Path:
    """Return ``folder`` below the resolved root. The result differs from ``folder.resolve()`` if a
    part below ``root`` is a link."""
    return root.resolve() / folder.relative_to(root)


def read_ends(
    path: Path, root: Path, head: int = HEAD_BYTES, tail: int = TAIL_BYTES
) -> tuple[bytes, bytes, int]:
    """Return the beginning and the end of a file, and the number of bytes between them. A file of
    at most ``head + tail`` bytes is all beginning.

    A file that cannot be read (a link, a pipe, a removed file) counts as empty.
    """
    if not is_within(path, root):
        return b"", b"", 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", b"", 0
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size <= head + tail:
            return file.read(head + tail), b"", 0
        first = file.read(head)
        file.seek(size - tail)
        return first, file.read(tail), size - head - tail


def read_log(path: Path, root: Path) -> TextSource:
    """Read the two ends of a log as lines, without colour codes."""
    head, tail, skipped = read_ends(path, root)
    lines = [TextLine(text, number) for number, text in enumerate(_texts(head), 1)]
    if skipped:
        last = _texts(tail.partition(b"\n")[2])  # drop the incomplete first line
        lines = lines[:-1] + [
            TextLine(text, number - len(last)) for number, text in enumerate(last)
        ]
    kind = path.stem.partition("-")[0]
    # signatures treat a critic's ranks like the policy's
    kind = "trainer" if kind == "critic" else kind
    return TextSource(str(path.relative_to(root)), kind, lines, skipped)


def _texts(content: bytes) -> list[str]:
    # split only at newlines: editors do not count carriage returns of progress bars as lines
    texts = content.decode("utf-8", "replace").split("\n")
    if texts and not texts[-1]:
        texts.pop()
    return [
        _COLOUR.sub("", text.rsplit("\r", 1)[-1] if not text.endswith("\r") else text[:-1])[
            :_MAX_CHARACTERS
        ]
        for text in texts
    ]


def run_logs(root: Path) -> Iterator[Path]:
    """Yield the `MAX_LOGS` newest logs of a run, sorted by name."""
    folder = root / "logs"
    found = (
        [path for path in folder.glob("*.log") if is_within(path, root)] if folder.is_dir() else []
    )
    yield from sorted(sorted(found, key=_written, reverse=True)[:MAX_LOGS])


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
