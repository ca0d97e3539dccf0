"""Anything that users put into samples and metrics, as JSON that every reader accepts."""

from __future__ import annotations

import math
import os
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


#: Parts of the names of flags and environment variables whose values stay out of files, in small letters.
SECRET_NAMES = ("wandb_key", "api_key", "secret", "password", "hf_token")
HIDDEN = "•••"


def is_secret(name: str) -> bool:
    """Whether a flag or variable of this name holds a key or a password."""
    plain = name.lower().replace("-", "_")
    return any(secret in plain for secret in SECRET_NAMES)


def without_secrets(name: str, value: Any) -> Any:
    """`value`, hidden when `name` says that it is secret; dicts (environment variables) are looked through."""
    if isinstance(value, dict):
        return {key: without_secrets(str(key), inner) for key, inner in value.items()}
    return HIDDEN if value and is_secret(name) else value


def command_line(argv: list[str]) -> list[str]:
    """A command line that can be shown: values of secret flags, and of flags that carry environment, are hidden.

    Example:
        >>> command_line(["train.py", "--wandb-key", "abc", "--wandb-key=abc", "--lr", "1"])
        ['train.py', '--wandb-key', '•••', '--wandb-key=•••', '--lr', '1']
    """
    shown: list[str] = []
    for word in argv:
        before = shown[-1] if shown else ""
        flag, equals, _ = word.partition("=")
        if _hides_value(before) and "=" not in before:
            shown.append(HIDDEN)
        elif equals and _hides_value(flag):
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(word)
    return shown


def _hides_value(flag: str) -> bool:
    return flag.startswith("--") and (is_secret(flag) or flag == "--train-env-vars")


def dump_line(value: dict[str, Any]) -> bytes:
    """One JSON object and a newline."""
    return orjson.dumps(value) + b"\n"


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file that readers see whole or not at all, also when we are killed half-way.

    Args:
        durable: also when the power is cut: it is on the disk when this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        if durable:
            bring_to_disk(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        bring_to_disk(path.parent)


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
