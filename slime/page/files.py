"""Read growing JSONL files: the lines since the last read, and whether it is still the same
file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

#: Bytes that are read at once, and bytes before the read position that identify the file.
_PIECE = 1 << 22
_TAIL = 64


@dataclass(frozen=True)
class ReadPosition:
    """How far a file has been read. ``tail`` has the last bytes before ``size``, which would differ
    in another file."""

    inode: int = 0
    size: int = 0
    mtime: int = 0
    tail: bytes = b""


@dataclass(frozen=True)
class JsonLine:
    """A complete line: its offset and length in bytes, and its JSON object."""

    offset: int
    length: int
    value: dict[str, Any]


def is_unchanged(path: Path, place: ReadPosition) -> bool:
    """Tell whether a file has the same inode and modification time as at the last read."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return place == ReadPosition()
    return (status.st_ino, status.st_mtime_ns) == (place.inode, place.mtime)


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)


def new_lines(
    path: Path, place: ReadPosition
) -> tuple[bool, Iterator[JsonLine], list[ReadPosition]]:
    """Read the lines appended since ``place``.

    A last line without a newline is read later, unless it is a complete object. Lines that are not
    JSON objects are skipped.

    Returns:
        (whether the file was replaced or rewritten, so that the lines start at its beginning; the
        lines; a list that receives the new position after the last line).
    """
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    begins = max(0, place.size - _TAIL)
    file.seek(begins)
    same = status.st_ino == place.inode and status.st_size >= place.size
    same = same and file.read(place.size - begins) == place.tail
    same = same and (status.st_size > place.size or status.st_mtime_ns == place.mtime)
    after: list[ReadPosition] = []
    return not same, _lines(file, status, place.size if same else 0, after), after


def _lines(
    file: BinaryIO, status: os.stat_result, offset: int, after: list[ReadPosition]
) -> Iterator[JsonLine]:
    with file:
        file.seek(offset)
        rest = b""
        while piece := file.read(_PIECE):
            *whole, rest = (rest + piece).split(b"\n")
            for text in whole:
                value = _object(text)
                if value is not None:
                    yield JsonLine(offset, len(text), value)
                offset += len(text) + 1
        value = _object(rest)
        if value is not None:
            yield JsonLine(offset, len(rest), value)
            offset += len(rest)
        begins = max(0, offset - _TAIL)
        file.seek(begins)
        after.append(
            ReadPosition(status.st_ino, offset, status.st_mtime_ns, file.read(offset - begins))
        )


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text) if text.strip() else None
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def is_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path lies in a folder after links are resolved; nothing outside of run folders
    is served."""
    return path.resolve().is_relative_to(folder.resolve())
