"""Rows of a data file: JSONL, JSON, CSV, Parquet, Arrow, Hugging Face data sets.

JSON and CSV are read row by row through an index of offsets rather than by `datasets`, which would
guess types (a CSV field "007" becomes 7, a JSON number 5.10 becomes 5.1), would fill every row up
to the union of all keys (a row without "metadata" would get one full of None), and cannot say which
line is malformed.
"""

from __future__ import annotations

import array
import bisect
import codecs
import contextlib
import csv
import io
import itertools
import json
import math
import mmap
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np

from slime.data_path import (
    COMPRESSED_SUFFIXES,
    CSV_DELIMITERS,
    JSON_SUFFIXES,
    ROW_SUFFIXES,
    TABLE_SUFFIXES,
    row_suffix,
    split_name,
    split_slice,
)
from slime.errors import UserError, a_type, in_place_of
from slime.files import repeated_key
from slime.prompts import dataset_folders
from slime.prompts.arrow_rows import TableRows, iter_parquet, load_file
from slime.prompts.labels import JsonRow, NumberAsWritten, written_integer
from slime.prompts.problems import RowProblem

Row = dict[str, Any]


class Rows(Protocol):
    """Random access to rows. ``[i]`` raises `RowProblem` for a row that cannot be read."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> Row: ...
    def where(self, position: int) -> str:
        """Return the place of the row, for messages: "train.jsonl:17"."""
        ...


def open_rows(path: str, splits: Sequence[str] = dataset_folders.TRAINING) -> Rows:
    """Open the rows of ``path[:split][@[start:stop]]``.

    Args:
        splits: splits to read if the path names none, in order of preference.
    Raises:
        UserError: there is no such file, its type is unknown, splits or configurations are
            ambiguous, the file cannot be read, or there are no rows.
    """
    file, part = split_slice(path)
    file, split = split_name(file)
    rows: Rows
    if Path(file).is_file():
        rows = _open_file(_without_split(file, split), part)
    else:
        rows = SlicedRows(_open_dataset(file, split, splits), part)
    if len(rows) == 0:
        raise _no_rows(path)
    return rows


def iter_rows(
    path: str, splits: Sequence[str] = dataset_folders.TRAINING
) -> Iterator[tuple[str, Row]]:
    """Yield (where, row); files are not loaded ahead, for ``--streaming-data``.

    Raises:
        UserError: as `open_rows`; also a malformed row, when it is reached.
    """
    file, part = split_slice(path)
    file, split = split_name(file)
    if Path(file).is_file():
        file = _without_split(file, split)
        stream = _stream_of(file)
        if stream is not None and (part.start or 0) >= 0 and (part.stop or 0) >= 0:
            is_plain = not file.endswith(COMPRESSED_SUFFIXES)
            is_empty = True
            with contextlib.nullcontext() if is_plain else _decompressing(file):
                for row in itertools.islice(stream(file), part.start, part.stop):
                    is_empty = False
                    yield row
            if is_empty:
                raise _no_rows(path)
            return
    rows = open_rows(path, splits)
    for position in range(len(rows)):
        try:
            yield rows.where(position), rows[position]
        except RowProblem as problem:
            raise problem.at(rows.where(position)) from problem


def _no_rows(path: str) -> UserError:
    return UserError(f"'{path}' has no rows", fix="check the file and the slice")


def _stream_of(file: str) -> Callable[[str], Iterator[tuple[str, Row]]] | None:
    """Return the function that streams a file without an index; None for files that are read as a
    whole."""
    suffix = row_suffix(file)
    if suffix in CSV_DELIMITERS:
        return _iter_csv
    if suffix == ".parquet":
        return iter_parquet
    if suffix in JSON_SUFFIXES and not _is_json_array(file):
        return _iter_json_lines
    return None


def _open_file(file: str, part: slice = slice(None)) -> Rows:
    suffix = row_suffix(file)
    if suffix in JSON_SUFFIXES:
        return JsonArray(file, part) if _is_json_array(file) else JsonLines(file, part)
    if suffix in CSV_DELIMITERS:
        return CsvRows(file, part)
    if suffix in TABLE_SUFFIXES:
        return TableRows(load_file(file, suffix), file, part)
    types = ", ".join(suffix for suffix in ROW_SUFFIXES if not suffix.endswith(COMPRESSED_SUFFIXES))
    raise UserError(
        f"'{file}' has a type that cannot be read",
        why=f"its name ends in '{Path(file).suffix}'",
        fix=f"give {types} ({', '.join(COMPRESSED_SUFFIXES)} after a text type), or a data "
        "set folder",
    )


def _open_dataset(path: str, split: str | None, splits: Sequence[str]) -> Rows:
    """Return all rows of a split of a data set folder."""
    found = dataset_folders.find(path, split, splits)
    if found is None:
        raise _missing(f"{path}:{split}" if split else path)
    if found.table is not None:
        name = found.name if len(found.splits) == 1 else f"{found.name}:{found.split}"
        return TableRows(found.table(), name, slice(None))
    return ConcatenatedRows([_open_file(file) for file in found.text_files])


def _without_split(file: str, split: str | None) -> str:
    if split is not None:
        raise UserError(
            f"'{file}:{split}' names a split of a file",
            why="a file has none; a data set folder has",
            fix=f"leave ':{split}' out; a slice of the rows is {file}@[0:100]",
        )
    return file


def _missing(file: str) -> UserError:
    return UserError(
        f"there is no data file '{file}'",
        why=in_place_of(Path(file)),
        fix="check the path; for a Hub data set pass org/name; no local path of that name may "
        "exist",
    )


# -- parts of rows ---------------------------------------------------------------------------------


class SlicedRows:
    """A slice of other rows."""

    def __init__(self, rows: Rows, part: slice) -> None:
        self._rows = rows
        self._positions = range(len(rows))[part]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, position: int) -> Row:
        return self._rows[self._positions[position]]

    def where(self, position: int) -> str:
        return self._rows.where(self._positions[position])


class ConcatenatedRows:
    """Rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, position: int) -> Row:
        part, inside = self._find(position)
        return part[inside]

    def where(self, position: int) -> str:
        part, inside = self._find(position)
        return part.where(inside)

    def _find(self, position: int) -> tuple[Rows, int]:
        number = bisect.bisect_right(self._ends, position)
        return self._parts[number], position - (self._ends[number - 1] if number else 0)


# -- text files ------------------------------------------------------------------------------------


def _open_bytes(file: str, *, mapped: bool = False) -> io.BufferedReader:
    """Open the content of a file, decompressed. The caller closes it.

    Args:
        mapped: decompress a compressed file into a temporary one, to map it into memory.
    Raises:
        UserError: the file is UTF-16 or UTF-32, a git lfs pointer, or not compressed as its name
            says.
    """
    stream: Any
    if not file.endswith(COMPRESSED_SUFFIXES):
        stream = open(file, "rb")  # noqa: SIM115
    else:
        import pyarrow

        with _decompressing(file):
            stream = io.BufferedReader(pyarrow.input_stream(file))
            stream.peek(1)
            if mapped:
                with stream as packed:
                    stream = tempfile.TemporaryFile()  # noqa: SIM115
                    shutil.copyfileobj(packed, stream, 1 << 22)
                stream.seek(0)
    head = stream.peek(64)[:64]
    if head.startswith(b"version https://git-lfs"):
        raise UserError(
            f"'{file}' is a git lfs pointer, not the data", fix="fetch the file: git lfs pull"
        )
    head = head[:4]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise UserError(
            f"'{file}' is not UTF-8",
            why="it begins as UTF-16 or UTF-32 text does",
            fix=f"convert it: iconv -f UTF-16 -t UTF-8 {file} > utf8{row_suffix(file)}",
        )
    return cast(io.BufferedReader, stream)


@contextlib.contextmanager
def _decompressing(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"'{file}' cannot be decompressed",
            why=str(error),
            fix=f"it may be cut short, or not be what '{Path(file).suffix}' says",
        ) from error


def _mapped(file: str) -> np.ndarray:
    """Return the content of a file, decompressed and mapped into memory; uint8 [number of
    bytes]."""
    with _open_bytes(file, mapped=True) as stream:
        if not stream.peek(1):
            return np.zeros(0, dtype=np.uint8)  # an empty file cannot be mapped
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _positions(content: np.ndarray, byte: bytes) -> np.ndarray:
    """Return the positions of a byte, in order; int64."""
    block = 1 << 24
    found: list[np.ndarray] = [
        np.flatnonzero(content[at : at + block] == byte[0]) + at
        for at in range(0, len(content), block)
    ]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _between(breaks: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, end) of the lines; text after the last line break is a line too."""
    is_ended = not size or (len(breaks) and breaks[-1] == size - 1)
    ends = breaks if is_ended else np.append(breaks, size)
    return np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)], ends


class _MappedRows:
    """Rows of a text file, mapped into memory; holds offsets and a line number per row.

    A pickle holds only the index; another process maps the file again.
    """

    def __init__(
        self, file: str, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray
    ) -> None:
        self._file = file
        self._starts = starts
        self._ends = ends
        self._numbers = numbers
        self._map: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": None}

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, position: int) -> str:
        return f"{self._file}:{self._numbers[position]}"

    def _bytes(self, position: int) -> bytes:
        if self._map is None:
            self._map = _mapped(self._file)
        return self._map[self._starts[position] : self._ends[position]].tobytes()


# -- JSON ------------------------------------------------------------------------------------------


class JsonLines(_MappedRows):
    """A JSONL file. Blank lines are not rows."""

    def __init__(self, file: str, part: slice) -> None:
        starts, ends, numbers = _line_offsets(file)
        super().__init__(file, starts[part], ends[part], numbers[part])

    def __getitem__(self, position: int) -> Row:
        return _parse_line(self._bytes(position))


def _line_offsets(file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (start, end, line number) of every line that is not blank; int64 arrays."""
    content = _mapped(file)
    starts, ends = _between(_positions(content, b"\n"), len(content))
    keep = ends > starts
    first = content[starts[keep]]
    # only a line that begins with white space can be blank
    for i in np.flatnonzero(keep)[first <= 32]:
        keep[i] = bool(bytes(content[starts[i] : ends[i]]).strip())
    return starts[keep], ends[keep], np.flatnonzero(keep) + 1


def _iter_json_lines(file: str) -> Iterator[tuple[str, Row]]:
    with _open_bytes(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield f"{file}:{number}", _parse_line(line)
                except RowProblem as problem:
                    raise problem.at(f"{file}:{number}") from problem


class JsonArray:
    """A .json file with one array of objects. Holds its text in memory; pickles as its path."""

    def __init__(self, file: str, part: slice) -> None:
        self._file = file
        self._part = part
        with _open_bytes(file) as stream:
            content = stream.read()
        try:
            self._text = content.removeprefix(codecs.BOM_UTF8).decode()
            items = _array_items(self._text)
        except ValueError as error:  # includes decoding errors
            raise UserError(f"'{file}' is not valid JSON", why=str(error)) from error
        self._items = items[part]
        self._positions = range(len(items))[part]

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonArray, (self._file, self._part)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> Row:
        start, end = self._items[position]
        return _parse(self._text[start:end])

    def where(self, position: int) -> str:
        line = self._text.count("\n", 0, self._items[position][0]) + 1
        return f"{self._file}:{line} (item {self._positions[position]})"


_SPACE = re.compile(r"[ \t\n\r]*")


def _array_items(text: str) -> list[tuple[int, int]]:
    """Return the range of each item of a JSON array.

    Raises:
        ValueError: the text is not a JSON array.
    """
    # only the range matters, so numbers are not converted
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=str)
    skip = _SPACE.match
    at = skip(text).end() + 1  # type: ignore[union-attr]
    items: list[tuple[int, int]] = []
    end = skip(text, at).end()  # type: ignore[union-attr]
    if text[end : end + 1] != "]":
        while True:
            start = skip(text, at).end()  # type: ignore[union-attr]
            _, end = decoder.raw_decode(text, start)
            items.append((start, end))
            end = skip(text, end).end()  # type: ignore[union-attr]
            if text[end : end + 1] != ",":
                break
            at = end + 1
    if text[end : end + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
    rest = skip(text, end + 1).end()  # type: ignore[union-attr]
    if rest != len(text):
        raise json.JSONDecodeError("Extra data", text, rest)
    return items


def _is_json_array(file: str) -> bool:
    if row_suffix(file) != ".json":
        return False
    with _open_bytes(file) as stream:
        return stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parse_line(line: bytes) -> JsonRow:
    try:
        # editors on Windows put a BOM before the first line
        text = line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start + 1} of the line is not UTF-8") from error
    return _parse(text)


def _parse(text: str) -> JsonRow:
    try:
        row = _decode(text)
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} (column {error.pos + 1})") from error
    if not isinstance(row, dict):
        raise RowProblem("are not JSON objects", f"found {a_type(row)}")
    return JsonRow(row, text)


def _decode(text: str) -> Any:
    text = text.strip()
    try:
        row = _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer with more digits than sys.get_int_max_str_digits()
        row = _LONG_INTEGERS.decode(text)
    if "\\u" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _invalid("it has half of a surrogate pair (\\ud800 to \\udfff)") from error
    return row


def _invalid(detail: str) -> RowProblem:
    return RowProblem("are not valid JSON", detail, "write one JSON object per line, in UTF-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        detail = f"the key '{repeated_key(pairs)}'"
        raise RowProblem("have a key twice in one object", detail, "keep the one that is meant")
    return found


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else NumberAsWritten(text)


def _refuse_constant(name: str) -> None:
    raise RowProblem(
        "have a number that JSON does not know",
        f"found {name}",
        "write null where there is no value, or text where it is an answer",
    )


_HOOKS: dict[str, Any] = {
    "object_pairs_hook": _unique,
    "parse_float": _float,
    "parse_constant": _refuse_constant,
}
_DECODER = json.JSONDecoder(**_HOOKS)
_LONG_INTEGERS = json.JSONDecoder(**_HOOKS, parse_int=written_integer)


# -- CSV -------------------------------------------------------------------------------------------


class CsvRows(_MappedRows):
    """A CSV file with a header. Every value stays text: "007" is not a number, and "" is an
    answer."""

    def __init__(self, file: str, part: slice) -> None:
        starts, ends, numbers = _csv_offsets(file)
        super().__init__(file, starts, ends, numbers)
        self._header = _checked_header(self._record(0), file) if len(self) else []
        self._starts = starts[1:][part]
        self._ends = ends[1:][part]
        self._numbers = numbers[1:][part]

    def __getitem__(self, position: int) -> Row:
        return _csv_row(self._header, self._record(position))

    def _record(self, position: int) -> list[str]:
        try:
            text = self._bytes(position).removeprefix(codecs.BOM_UTF8).decode()
        except UnicodeDecodeError as error:
            raise RowProblem("are not UTF-8", str(error), "save the file as UTF-8") from error
        return list(next(_csv_reader(io.StringIO(text, newline=""), self._file)))


def _csv_offsets(file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (start, end, line number) of each record that is not blank, the header first; int64
    arrays.

    Raises:
        UserError: as `_csv_records`.
    """
    content = _mapped(file)
    breaks = _positions(content, b"\n")
    quotes = _positions(content, b'"')
    returns = _positions(content, b"\r")
    if not _is_regular(content, quotes, returns, CSV_DELIMITERS[row_suffix(file)].encode()):
        spans = array.array("q")
        for start, end, line, _ in _csv_records(file):
            spans.extend((start, end, line))
        starts, ends, numbers = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        return starts, ends, numbers
    outside = np.flatnonzero(np.searchsorted(quotes, breaks) % 2 == 0)
    starts, ends = _between(breaks[outside], len(content))
    numbers = np.concatenate([[0], outside + 1])[: len(starts)] + 1
    keep = ends > starts
    keep[keep] = (content[starts[keep]] != ord("\r")) | (ends[keep] - starts[keep] > 1)
    return starts[keep], ends[keep], numbers[keep]


def _is_regular(
    content: np.ndarray, quotes: np.ndarray, returns: np.ndarray, delimiter: bytes
) -> bool:
    """Tell whether exactly the line breaks with an even number of quotes before them end a record.

    This holds if quotes occur only around fields and doubled within them; ``csv`` accepts other
    quotes too.
    """
    if len(quotes) % 2:
        return False
    opening = quotes[::2]
    closing = quotes[1::2]
    edges = np.frombuffer(delimiter + b"\r\n", dtype=np.uint8)
    first = 3 if content[:3].tobytes() == codecs.BOM_UTF8 else 0
    doubled: np.ndarray = np.zeros(len(opening), dtype=bool)
    doubled[1:] = opening[1:] == closing[:-1] + 1
    last = len(content) - 1
    before = np.isin(content[np.maximum(opening - 1, 0)], edges) | (opening == first)
    after = np.isin(content[np.minimum(closing + 1, last)], edges) | (closing == last)
    doubled_after = np.append(doubled[1:], False)[: len(closing)]
    if not (before | doubled).all() or not (after | doubled_after).all():
        return False
    lone = returns[np.searchsorted(quotes, returns) % 2 == 0]
    return bool((lone + 1 < len(content)).all()) and bool((content[lone + 1] == ord("\n")).all())


def _iter_csv(file: str) -> Iterator[tuple[str, Row]]:
    header: list[str] = []
    for _, _, line, record in _csv_records(file):
        if not header:
            header = _checked_header(record, file)
            continue
        try:
            yield f"{file}:{line}", _csv_row(header, record)
        except RowProblem as problem:
            raise problem.at(f"{file}:{line}") from problem


class _CountedLines:
    """Lines of a text stream, and the number of UTF-8 bytes read so far."""

    def __init__(self, stream: IO[str], offset: int) -> None:
        self._stream = stream
        self.offset = offset

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        line = next(self._stream)
        self.offset += len(line) if line.isascii() else len(line.encode())
        return line


def _csv_records(file: str) -> Iterator[tuple[int, int, int, list[str]]]:
    """Yield (start, end, line number, fields) of each record that is not blank, the header first.

    Raises:
        UserError: a record is not CSV, or bytes are not UTF-8.
    """
    with _open_bytes(file) as content:
        mark = len(codecs.BOM_UTF8) if content.peek(3).startswith(codecs.BOM_UTF8) else 0
        content.read(mark)
        lines = _CountedLines(io.TextIOWrapper(content, "utf-8", newline=""), mark)
        reader = _csv_reader(lines, file)
        while True:
            start = lines.offset
            line = reader.line_num + 1
            try:
                record = next(reader, None)
            except csv.Error as error:
                raise _no_csv(f"{file}:{line}", str(error)) from error
            except UnicodeDecodeError as error:
                raise _not_utf8(file) from error
            if record is None:
                return
            if record:
                yield start, lines.offset, line, record


def _csv_reader(lines: Any, file: str) -> Any:
    # process-wide; the default of 131,072 characters is shorter than a long prompt
    csv.field_size_limit(sys.maxsize)
    return csv.reader(lines, strict=True, delimiter=CSV_DELIMITERS[row_suffix(file)])


def _no_csv(where: str, error: str) -> UserError:
    why = "a quote opens here and is never closed" if error == "unexpected end of data" else error
    return UserError(
        f"{where}: the row that begins here is not CSV",
        why=why,
        fix="put values with commas, quotes or line breaks in quotes, and write a quote in them "
        'twice: "say ""hi"""',
    )


def _not_utf8(file: str) -> UserError:
    with _open_bytes(file) as content:
        for number, line in enumerate(content, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                what = f"{file}:{number}: this line is not UTF-8"
                return UserError(what, why=str(error), fix="save it as UTF-8")
    raise AssertionError("unreachable")


def _checked_header(names: list[str], file: str) -> list[str]:
    delimiter = CSV_DELIMITERS[row_suffix(file)]
    others = [other for other in ",;\t|" if other != delimiter and other in names[0]]
    if len(names) == 1 and others:
        raise UserError(
            f"{file}:1: the header has one column, '{names[0]}'",
            why=f"its columns seem to be separated by {others[0]!r}; those of {Path(file).suffix} "
            f"are by {delimiter!r}",
            fix="save it with commas as .csv, or with tabs as .tsv",
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"{file}:1: the header has the column '{twice[0]}' twice", fix="rename one of them"
        )
    return names


def _csv_row(header: list[str], record: list[str]) -> Row:
    if len(record) != len(header):
        raise RowProblem(
            "have a different number of columns than the header",
            f"{len(record)} instead of {len(header)} ({', '.join(header)})",
            "put values with commas or line breaks in quotes",
        )
    return dict(zip(header, record))
