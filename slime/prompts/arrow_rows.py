"""Rows of Parquet and Arrow files, and of data sets that `datasets` loads."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_Convert = Callable[[Any], Any]


class TableRows:
    """Rows of a `datasets.Dataset`, mapped into memory.

    Args:
        name: names the table in messages.
    """

    def __init__(self, table: Any, name: str, part: slice) -> None:
        self._name = name
        self._positions = range(len(table))[part]
        table = table if part == slice(None) else table.select(self._positions)
        self._table = table.with_format("arrow")
        self._features = type(table.features)(_without_media(dict(table.features)))
        self._converts = _conversions(table.data.schema)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, position: int) -> dict[str, Any]:
        [row] = self._table[position].to_pylist()
        return _converted(self._features.decode_example(row), self._converts)

    def where(self, position: int) -> str:
        return f"{self._name} row {self._positions[position]}"


def cache_folder() -> str | None:
    """Return a temporary folder if the cache of `datasets` is read-only, because `datasets` locks
    files there even to read text; else None."""
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    is_writable = existing.is_dir() and os.access(existing, os.W_OK)
    return None if is_writable else _temporary_folder().name


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slime-datasets-")


def load_file(file: str, suffix: str) -> Any:
    """Return the `datasets.Dataset` of a Parquet or Arrow file.

    Raises:
        UserError: the file cannot be read.
    """
    import datasets
    import pyarrow.parquet

    kind = {".parquet": "parquet", ".arrow": "arrow"}[suffix]
    with loading(file):
        if kind == "parquet":
            try:
                metadata = pyarrow.parquet.read_metadata(file)
            except pyarrow.ArrowInvalid as error:
                raise _not_parquet(file, error) from error
            if metadata.num_rows == 0:
                raise UserError(f"'{file}' has no rows", fix="check how the file was written")
            _check_names(file, metadata.schema.to_arrow_schema().names)
        return datasets.load_dataset(kind, data_files=file, split="train", cache_dir=cache_folder())


def _check_names(file: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"'{file}' has the column '{twice[0]}' twice", fix="rename one of them")


def _not_parquet(file: str, error: Exception) -> UserError:
    return UserError(
        f"'{file}' is not a Parquet file",
        why=str(error).split(". ")[0],
        fix="it may be cut short, or a git lfs pointer (git lfs pull fetches the file)",
    )


def iter_parquet(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of a Parquet file, one batch of rows in memory.

    Raises:
        UserError: it cannot be read.
    """
    import pyarrow.parquet

    position = 0
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise _not_parquet(file, error) from error
    with opened as table:
        _check_names(file, table.schema_arrow.names)
        converts = _conversions(table.schema_arrow)
        for batch in table.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield f"{file} row {position}", _converted(row, converts)
                position += 1


@contextlib.contextmanager
def loading(path: str) -> Iterator[None]:
    """Silence `datasets` within the block, and convert its errors to a `UserError` about
    ``path``."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # the message "An error occurred while generating the dataset" hides its cause
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        fix = (
            "name a .jsonl or .parquet file, or a folder that holds nothing but the files of one "
            "data set"
        )
        raise UserError(f"the data set '{path}' cannot be read", why=why, fix=fix) from error


def _without_media(feature: Any) -> Any:
    """Return features of `datasets` that leave images and other media as the file has them."""
    if isinstance(feature, dict):
        return {name: _without_media(one) for name, one in feature.items()}
    if isinstance(feature, list):
        return [_without_media(one) for one in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_without_media(feature.feature))
    is_media = hasattr(feature, "decode") and type(feature).__name__ != "Json"
    return replace(feature, decode=False) if is_media else feature


# -- values ----------------------------------------------------------------------------------------


def _converted(row: dict[str, Any], converts: dict[str, _Convert]) -> dict[str, Any]:
    for name, convert in converts.items():
        row[name] = convert(row[name])
    return row


def _conversions(schema: pyarrow.Schema) -> dict[str, _Convert]:
    """Return conversions of columns that Arrow converts badly: short floats get the digits of a
    double."""
    found = {field.name: _conversion(field.type) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _conversion(kind: pyarrow.DataType) -> _Convert | None:
    from pyarrow import types

    if types.is_float16(kind):
        return partial(_shortest, np.float16)
    if types.is_float32(kind):
        return partial(_shortest, np.float32)
    if types.is_dictionary(kind):
        return _conversion(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _conversion(kind.value_type)
        return partial(_in_list, inner) if inner else None
    if types.is_struct(kind):
        fields = _conversions(kind.fields)
        return partial(_in_struct, fields) if fields else None
    return None


def _shortest(kind: type[np.floating[Any]], value: Any) -> Any:
    """Return the float with the fewest digits that rounds to ``value`` in ``kind``: 0.1, not
    0.10000000149011612."""
    return float(str(kind(value))) if isinstance(value, float) else value


def _in_list(convert: _Convert, value: Any) -> Any:
    return [convert(item) for item in value] if isinstance(value, list) else value


def _in_struct(fields: dict[str, _Convert], value: Any) -> Any:
    return _converted(value, fields) if isinstance(value, dict) else value
