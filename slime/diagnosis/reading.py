"""Read files of a run folder safely, though some may be huge, half-written, links or pipes. Only
regular files within the folder are opened, and only their two ends are read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Bytes read of a log: the launch is at its head, the end at its tail.
HEAD_BYTES = 256 << 10
TAIL_BYTES = 2 << 20
#: Longer lines are cut.
_MOST_CHARACTERS = 2000
#: Logs read of one run, those written last.
MOST_LOGS = 64
#: What a text that is searched for causes can be: a process's log, the error that ended the run, or
#: its traceback.
KINDS = frozenset({"engine", "trainer", "rollout", "router", "driver", "crash", "traceback"})
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class TextLine:
    """A line of a text.

    Attributes:
        number: from the beginning of the file, 1 is the first; negative: from its end, -1 is the
            last.
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
        name: for people: "logs/engine-0.log".
        kind: one of `KINDS`; logs of other processes have other ones.
        lines: in order.
        num_skipped: bytes between its two ends that were not read.
    """

    name: str
    kind: str
    lines: list[TextLine] = field(repr=False)
    num_skipped: int = 0


def is_within(path: Path, root: Path) -> bool:
    """Whether a path is a regular file below ``root`` that is reached through no link."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        return path.resolve().is_relative_to(root.resolve()) and path.parent.resolve() == _plain(
            path.parent, root
        )
    except OSError:  # it was removed meanwhile, or we may not read its folder
        return False


def _plain(folder: Path, root: Path) -> Path:
    """Return ``folder`` below the resolved root; it is not resolved itself if one of its parts is a
    link."""
    return root.resolve() / folder.relative_to(root)


def read_ends(
    path: Path, root: Path, head: int = HEAD_BYTES, tail: int = TAIL_BYTES
) -> tuple[bytes, bytes, int]:
    """Return the beginning and the end of a file, and how many bytes lie between them; a file that
    fits is all beginning.

    A file that cannot be read (a link, a pipe, one that was removed) counts as empty.
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
    """Read the two ends of a log as lines, without colours."""
    head, tail, skipped = read_ends(path, root)
    lines = [TextLine(text, number) for number, text in enumerate(_texts(head), 1)]
    if skipped:
        last = _texts(tail.partition(b"\n")[2])  # the first line is cut
        lines = lines[:-1] + [
            TextLine(text, number - len(last)) for number, text in enumerate(last)
        ]
    kind = path.stem.partition("-")[0]
    # a critic's ranks train as the policy's do
    kind = "trainer" if kind == "critic" else kind
    return TextSource(str(path.relative_to(root)), kind, lines, skipped)


def _texts(content: bytes) -> list[str]:
    # by newlines alone: a progress bar's carriage returns do not count as lines in an editor
    texts = content.decode("utf-8", "replace").split("\n")
    if texts and not texts[-1]:
        texts.pop()
    return [
        _COLOUR.sub("", text.rsplit("\r", 1)[-1] if not text.endswith("\r") else text[:-1])[
            :_MOST_CHARACTERS
        ]
        for text in texts
    ]


def run_logs(root: Path) -> Iterator[Path]:
    """Yield the logs of a run by name; of very many, those written last."""
    folder = root / "logs"
    found = (
        [path for path in folder.glob("*.log") if is_within(path, root)] if folder.is_dir() else []
    )
    yield from sorted(sorted(found, key=_written, reverse=True)[:MOST_LOGS])


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
