"""Tables of flags and names, as files. `tools/make_flag_tables.py` generates the JSON files; the
TOML files are written by hand. flags_page.md is the beginning of docs/flags.md."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


def read_table(name: str) -> dict[str, Any]:
    """Parse a file of this folder, JSON or TOML by its extension."""
    text = read_text(name)
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)


def record_of(cls: type[Record], row: Mapping[str, Any]) -> Record:
    """Convert a row of a table to a record, with tuples for lists.

    Raises:
        TypeError: a key of the row is no field of the record, or a required field is missing.
    """
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
    return cls(**values)


def read_text(name: str) -> str:
    """Return the text of a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
