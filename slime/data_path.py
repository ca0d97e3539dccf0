"""Names of data: ``path[:split][@[start:stop]]``, where the path is a file, a folder, or a name on
the hub."""

from __future__ import annotations

import re
from pathlib import Path

from slime.errors import UserError

#: Suffixes of the files with rows that `slime.prompts.readers` reads.
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_SUFFIXES = (*JSON_SUFFIXES, *CSV_DELIMITERS)
TABLE_SUFFIXES = (".parquet", ".arrow")
#: Text files may be compressed.
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst")
_COMPRESSED_TEXT = tuple(text + packed for text in TEXT_SUFFIXES for packed in COMPRESSED_SUFFIXES)
ROW_SUFFIXES = (*TEXT_SUFFIXES, *TABLE_SUFFIXES, *_COMPRESSED_TEXT)

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_SPLIT = re.compile(r"^(?P<path>.+):(?P<split>\w+(?:\.\w+)*)$")


def split_slice(path: str) -> tuple[str, slice]:
    """Separate a path from its slice.

    Raises:
        UserError: the slice cannot be read.

    Example:
        >>> split_slice("train.jsonl@[-100:]")
        ('train.jsonl', slice(-100, None, None))
    """
    match = _SLICE.match(path)
    if match is None:
        if path.endswith("]") and "@[" in path:
            raise UserError(
                f"'{path}' has a slice that cannot be read", fix="write it as path@[start:stop]"
            )
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def split_name(path: str) -> tuple[str, str | None]:
    """Separate the split of a data set from a path without slice. If a file or folder has the whole
    name, there is no split.

    Example:
        >>> split_name("openai/gsm8k/main:test"), split_name("train.jsonl")
        (('openai/gsm8k/main', 'test'), ('train.jsonl', None))
    """
    match = None if Path(path).exists() else _SPLIT.match(path)
    return (match["path"], match["split"]) if match else (path, None)


def row_suffix(path: str) -> str:
    """Return the suffix that says how a file's rows are read, without that of a compression; "" for
    other files.

    Example:
        >>> row_suffix("train.jsonl.gz"), row_suffix("train.parquet"), row_suffix("notes.txt")
        ('.jsonl', '.parquet', '')
    """
    found = next((suffix for suffix in ROW_SUFFIXES if path.endswith(suffix)), "")
    return found.removesuffix(Path(found).suffix) if found in _COMPRESSED_TEXT else found
