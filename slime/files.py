"""Files that are whole or not there, and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

_MAX_DEPTH = 12
_INT64 = 1 << 63


def json_safe(value: Any, max_text: int = 0, _depth: int = 0) -> Any:
    """`value` made of JSON types only: non-finite floats become None, unknown objects their repr.

    Args:
        value: anything.
        max_text: cut strings to this many characters (0: never), with a mark that says how many were cut.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()  # lone surrogates are no valid UTF-8
        if max_text and len(text) > max_text:
            return f"{text[:max_text]}… [{len(text) - max_text} more characters]"
        return str(text)
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if _depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {str(json_safe(str(k))): json_safe(v, max_text, _depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [json_safe(item, max_text, _depth + 1) for item in value]
    return json_safe(repr(value), max_text or 200)


def dump_line(value: dict[str, Any]) -> bytes:
    """One JSON object and a newline."""
    return orjson.dumps(value) + b"\n"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` at the end of the block: readers see the file whole or not
    at all, also when we are killed half-way. Folders are made; an exception leaves ``path`` as it was.

    Args:
        durable: also when the power is cut: it is on the disk when the block ends.

    Example:
        with replacing(Path("dumps/3.pt")) as unfinished:
            torch.save(data, unfinished)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        if durable:
            bring_to_disk(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    if durable:
        bring_to_disk(path.parent)


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """`replacing` with these bytes."""
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_bytes(content)


def bring_to_disk(path: Path) -> None:
    """fsync of a file's content, or of a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} when there is none, or none yet."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSONL file; a line that is still being written (or was cut by a crash) is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = orjson.loads(line) if line.strip() else None
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@contextlib.contextmanager
def left_behind(path: Path) -> Iterator[bool]:
    """Whether a file or folder of this user's is one whose owner kept it locked (``flock``) and has died. If so it is
    locked here as long as the block lasts."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # another user's, a link, or gone in the meantime
        yield False
        return
    try:
        is_free = os.fstat(descriptor).st_uid == os.geteuid()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its owner is alive
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)
