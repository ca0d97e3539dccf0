"""Rows of a data file: JSONL, Parquet, CSV, Hugging Face data sets. ``path@[a:b]`` takes a slice.

JSONL is read line by line through an index of offsets rather than by `datasets`, which would fill every row up to the
union of all keys (a row without "metadata" would get one full of None) and cannot say which line is malformed.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from slime.errors import UserError
from slime.files import JSON_SUFFIXES
from slime.prompts.problems import RowProblem

Row = dict[str, Any]
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


class Rows(Protocol):
    """Random access to rows. ``[i]`` raises `RowProblem` for a row that cannot be read."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> Row: ...
    def where(self, position: int) -> str:
        """Where the row comes from, for messages: "train.jsonl:17"."""
        ...


def split_slice(path: str) -> tuple[str, slice]:
    """
    Example:
        >>> split_slice("train.jsonl@[-100:]")
        ('train.jsonl', slice(-100, None, None))
    """
    match = _SLICE.match(path)
    if match is None:
        if path.endswith("]") and "@[" in path:
            raise UserError(f"'{path}' has a slice that cannot be read", fix="write it as path@[start:stop]")
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def open_rows(path: str) -> Rows:
    """The rows of ``path``, which may carry a slice.

    Raises:
        UserError: no such file, a type that is not known, several splits to choose from, or no rows.
    """
    file, part = split_slice(path)
    _check_exists(file)
    rows: Rows
    if Path(file).is_file() and Path(file).suffix in JSON_SUFFIXES:
        rows = JsonArray(file, part) if _is_json_array(file) else JsonLines(file, part)
    elif Path(file).is_file() and Path(file).suffix == ".csv":
        rows = CsvRows(file, part)
    else:
        rows = TableRows(file, part)
    if len(rows) == 0:
        raise UserError(f"'{path}' has no rows", fix="check the file and the slice")
    return rows


def iter_rows(path: str) -> Iterator[tuple[str, Row]]:
    """(where, row) one after another, nothing loaded ahead of time; for ``--streaming-data``.

    Raises:
        UserError: as `open_rows`; also a malformed line, when it is reached.
    """
    file, part = split_slice(path)
    _check_exists(file)
    suffix = Path(file).suffix
    negative = (part.start or 0) < 0 or (part.stop or 0) < 0
    if Path(file).is_file() and suffix in JSON_SUFFIXES and not negative and not _is_json_array(file):
        yield from itertools.islice(_iter_json_lines(file), part.start, part.stop)
    elif Path(file).is_file() and suffix == ".parquet" and not negative:
        yield from itertools.islice(_iter_parquet(file), part.start, part.stop)
    else:
        rows = open_rows(path)
        for position in range(len(rows)):
            try:
                yield rows.where(position), rows[position]
            except RowProblem as problem:
                raise problem.at(rows.where(position)) from problem


def _check_exists(file: str) -> None:
    if Path(file).exists():
        return
    folder = Path(file).parent
    there = sorted(entry.name for entry in folder.iterdir())[:12] if folder.is_dir() else []
    raise UserError(
        f"there is no data file '{file}'",
        why=f"{folder} has: {', '.join(there) or 'nothing'}" if folder.is_dir() else f"there is no folder {folder}",
        fix="check the path; of the hub's data sets pass org/name, of which nothing may be here",
    )


def _is_json_array(file: str) -> bool:
    if Path(file).suffix != ".json":
        return False
    with open(file, "rb") as stream:
        return stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parse_line(line: bytes) -> Row:
    try:
        row = orjson.loads(line.removeprefix(codecs.BOM_UTF8))  # which editors on Windows put before the first line
    except orjson.JSONDecodeError as error:
        fix = "write one JSON object per line, in UTF-8"
        raise RowProblem("are no valid JSON", str(error).split(": line")[0], fix) from error
    if not isinstance(row, dict):
        raise RowProblem("are no JSON objects", f"found a {type(row).__name__}")
    return row


def _iter_json_lines(file: str) -> Iterator[tuple[str, Row]]:
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield f"{file}:{number}", _parse_line(line)
                except RowProblem as problem:
                    raise problem.at(f"{file}:{number}") from problem


def _iter_parquet(file: str) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet

    position = 0
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"'{file}' is no Parquet file",
            why=str(error).split(". ")[0],
            fix="it may be cut short, or a pointer of git lfs (git lfs pull fetches what it stands for)",
        ) from error
    with opened as table:
        for batch in table.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield f"{file} row {position}", row
                position += 1


class JsonLines:
    """A JSONL file, mapped into memory; holds one offset per line. Blank lines are no rows. Pickles as its path."""

    def __init__(self, file: str, part: slice) -> None:
        self._file, self._part = file, part
        starts, ends, numbers = _line_offsets(file)
        self._starts, self._ends, self._numbers = starts[part], ends[part], numbers[part]
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonLines, (self._file, self._part)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, position: int) -> Row:
        if self._map is None:
            with open(self._file, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse_line(self._map[self._starts[position] : self._ends[position]])

    def where(self, position: int) -> str:
        return f"{self._file}:{self._numbers[position]}"


def _line_offsets(file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, line number) of every line that is not blank; int64 arrays."""
    breaks, offset, last = [], 0, b"\n"
    with open(file, "rb") as stream:
        while block := stream.read(1 << 24):
            breaks.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + offset)
            offset += len(block)
            last = block[-1:]
        ends = np.concatenate(breaks) if breaks else np.zeros(0, dtype=np.int64)
        if last != b"\n":
            ends = np.append(ends, offset)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
        keep = ends > starts
        for i in np.flatnonzero(keep & (ends - starts <= 16)):  # a line of blanks is short
            stream.seek(starts[i])
            keep[i] = bool(stream.read(ends[i] - starts[i]).strip())
    return starts[keep], ends[keep], np.flatnonzero(keep) + 1


class JsonArray:
    """A .json file that holds one array of objects."""

    def __init__(self, file: str, part: slice) -> None:
        self._file = file
        try:
            rows = orjson.loads(Path(file).read_bytes().removeprefix(codecs.BOM_UTF8))
        except orjson.JSONDecodeError as error:
            raise UserError(f"'{file}' is no valid JSON", why=str(error)) from error
        self._rows, self._positions = rows[part], range(len(rows))[part]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Row:
        if not isinstance(self._rows[position], dict):
            raise RowProblem("are no JSON objects", f"found a {type(self._rows[position]).__name__}")
        return self._rows[position]

    def where(self, position: int) -> str:
        return f"{self._file} item {self._positions[position]}"


class CsvRows:
    """A CSV file with a header. Every value is the text that stands there: "007" is no number, and "" is an answer."""

    def __init__(self, file: str, part: slice) -> None:
        self._file = file
        try:
            with open(file, newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.DictReader(stream))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(
                f"'{file}' is no readable CSV", why=str(error), fix="save it as UTF-8, with commas"
            ) from error
        self._rows, self._positions = rows[part], range(len(rows))[part]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Row:
        row = self._rows[position]
        if None in row or None in row.values():  # what csv makes of too many and too few
            raise RowProblem("have another number of columns than the header", f"the row {position} does")
        return dict(row)

    def where(self, position: int) -> str:
        return f"{self._file} row {self._positions[position]}"


class TableRows:
    """Parquet or Arrow files and data set folders, through `datasets` (memory-mapped)."""

    def __init__(self, path: str, part: slice) -> None:
        table = _load_table(path)
        self._path, self._positions = path, range(len(table))[part]
        self._table = table if part == slice(None) else table.select(self._positions)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, position: int) -> Row:
        return self._table[position]

    def where(self, position: int) -> str:
        return f"{self._path} row {self._positions[position]}"


def _load_table(path: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is told once, below
    folder = Path(path)
    if folder.is_file() and folder.suffix not in (".parquet", ".arrow"):
        raise UserError(
            f"'{path}' is of a type that cannot be read",
            fix="give .jsonl, .json, .parquet, .arrow, .csv or a data set folder",
        )
    try:
        if folder.is_file():
            kind = "parquet" if folder.suffix == ".parquet" else "arrow"
            return datasets.load_dataset(kind, data_files=str(folder), split="train")
        saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of "An error occurred while generating the dataset", which says nothing
        why = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        fix = "name a .jsonl or .parquet file, or a folder that holds nothing but the files of one data set"
        raise UserError(f"the data set '{path}' cannot be read", why=why, fix=fix) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if len(loaded) > 1 and "train" not in loaded:
        splits = ", ".join(loaded)
        raise UserError(f"'{path}' has several splits: {splits}", fix=f"name one: {path}/{next(iter(loaded))}")
    return loaded["train"] if "train" in loaded else next(iter(loaded.values()))
