"""Atomic writes of files, and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import xxhash

from slime.errors import safe_repr

_MAX_DEPTH = 12
_INT64 = 1 << 63


def repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key that comes twice in a JSON object."""
    names = [name for name, _ in pairs]
    return next(name for name in names if names.count(name) > 1)


def json_safe(value: Any, max_text: int = 0, _depth: int = 0) -> Any:
    """``value`` in JSON types only: non-finite floats become None, unknown objects their repr.

    Args:
        value: anything.
        max_text: cut strings to this many characters (0: never), and say how many were cut.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()  # lone surrogates are not valid UTF-8
        if max_text and len(text) > max_text:
            return f"{text[:max_text]}… [{len(text) - max_text} more characters]"
        return str(text)
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if _depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {
                str(json_safe(safe_repr(k, str))): json_safe(v, max_text, _depth + 1)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple, set, frozenset)):
            return [json_safe(item, max_text, _depth + 1) for item in value]
    return json_safe(safe_repr(value), max_text or 200)


def indented_json(value: Any) -> bytes:
    """Encode ``value``, made safe by `json_safe`, as JSON for people to read."""
    return orjson.dumps(json_safe(value), option=orjson.OPT_INDENT_2)


def json_checksum(content: dict[str, Any]) -> str:
    """Return a hash of an object, whatever the order of its keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def dump_line(value: dict[str, Any]) -> bytes:
    """Return the JSON text of an object, and a newline."""
    return orjson.dumps(value) + b"\n"


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces ``path`` at the end of the block. Readers
    never see a part of a file, even if this process is killed. Creates missing folders; an
    exception in the block leaves ``path`` unchanged.

    Args:
        durable: sync the file to disk before the block ends, so that it survives a power cut.

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
    """Write these bytes with `replacing`."""
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_bytes(content)


#: The fingerprint of a larger file uses its size and this many pieces of this size; with ``whole``,
#: only after this much data.
_WHOLE_BYTES = 16 << 20
_DATA_BYTES = 1 << 30
_PIECES = 64
_PIECE_BYTES = 1 << 16


def content_fingerprint(path: Path, *, whole: bool = False) -> str:
    """Return a hash of the content of a file, or of all files in a folder; "" if there is no file.

    Args:
        whole: read large files completely, up to a gigabyte in total.
    """
    digest = xxhash.xxh3_128()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    num_files = 0
    left = _DATA_BYTES if whole else 0
    for file in files:
        try:
            if not file.is_file():
                continue
            size = file.stat().st_size
            num_files += 1
            digest.update(os.fsencode(f"{file.relative_to(path)} {size}\n"))
            with file.open("rb", buffering=0) as stream:
                step = size // _PIECES if size > max(_WHOLE_BYTES, left) else _PIECE_BYTES
                left -= size if left > 0 else 0
                for offset in range(0, size, step):
                    stream.seek(offset)
                    digest.update(stream.read(_PIECE_BYTES))
        except OSError:  # the reader of the file reports it
            digest.update(b"cannot be read\n")
    return digest.hexdigest() if num_files else ""


def bring_to_disk(path: Path) -> None:
    """Call fsync on a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_plain(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: it is not a regular file (a pipe would block), or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text. A byte order mark, UTF-16 and NaN are accepted.

    Raises:
        ValueError: it is not JSON; the message says where.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            return json.loads(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none, or it cannot be read."""
    try:
        value = parse_json(read_plain(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSONL file; [] if it cannot be read. Lines that are not an
    object are skipped: a line may be incomplete while it is written, or after a crash."""
    rows = []
    try:
        content = read_plain(path)
    except OSError:
        return []
    for line in content.split(b"\n"):
        with contextlib.suppress(orjson.JSONDecodeError):  # also of an empty line
            row = orjson.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def entries_of(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted; [] if the folder is missing or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def left_behind(path: Path) -> Iterator[bool]:
    """Whether the process that kept a file or folder of this user locked (``flock``) has died. If
    so, it stays locked by this process until the block ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # another user's, a symbolic link, or already deleted
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
