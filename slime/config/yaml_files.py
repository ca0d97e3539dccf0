"""Read YAML files as their authors mean them.

PyYAML follows YAML 1.1, which reads some values as others: ``017`` as 15, ``12:30`` as 750,
``1e-6`` as text, ``2024-01-01`` as a date. `load` reads numbers as a command line does, leaves the
rest of these values as text, and refuses keys that come twice, of which YAML keeps the last. For
flags that take text, `load_as_written` returns the letters of the file: ``1.10`` stays ``1.10``.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+)")
_FLOAT = re.compile(
    r"[-+]?(?:(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_NULLS = ("", "~", "null", "Null", "NULL")


class _Loader(yaml.SafeLoader):
    """Numbers in decimal notation, and no dates; keys are distinct."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} comes twice", key.start_mark
                )
            seen.add(name)
            if key.tag == f"{_TAG}bool":  # the key no is a name, not False
                key.tag = f"{_TAG}str"
        return super().construct_mapping(node, deep)


class _AsWritten(_Loader):
    """Every plain scalar is text."""


def _resolvers(*kept: str) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the implicit types of YAML 1.1 with these names."""
    tags = [_TAG + name for name in kept]
    found = yaml.SafeLoader.yaml_implicit_resolvers.items()
    return {first: [row for row in rows if row[0] in tags] for first, rows in found}


_Loader.yaml_implicit_resolvers = _resolvers("bool", "null", "merge")
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(rf"(?:{_INT.pattern})\Z"), [*"-+0123456789"])
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), [*"-+.0123456789"]
)
_AsWritten.yaml_implicit_resolvers = _resolvers("merge")


def load(text: str) -> Any:
    """Return the content of a YAML file.

    Raises:
        yaml.YAMLError: it is not valid, or a key comes twice.

    Example:
        >>> load("{seed: 017, rate: 1e-6, at: 12:30, on: off}")
        {'seed': '017', 'rate': 1e-06, 'at': '12:30', 'on': False}
    """
    return yaml.load(text, _Loader)


def load_as_written(text: str) -> Any:
    """Return the content of a YAML file, in which every scalar is text.

    Example:
        >>> load_as_written("{version: 1.10, names: [no, null]}")
        {'version': '1.10', 'names': ['no', 'null']}
    """
    return yaml.load(text, _AsWritten)


def text_of(typed: Any, written: Any) -> Any:
    """Return the value of a flag that takes text: scalars as written, null as None.

    Args:
        typed, written: the value as `load` and as `load_as_written` read it.
    """
    if isinstance(typed, list) and isinstance(written, list):
        return [text_of(*pair) for pair in zip(typed, written)]
    return typed if typed is None or isinstance(typed, (dict, list)) else written


def is_empty(typed: Any, written: Any) -> bool:
    """Tell whether nothing is written, not even null."""
    return typed is None and written == ""
