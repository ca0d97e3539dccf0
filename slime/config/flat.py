"""The flat ``args`` that hooks get: mutable, copyable, picklable, with flag names as attributes."""

from __future__ import annotations

import argparse
import copy
import difflib
from typing import Any


class MissingFlag(AttributeError):
    """``args`` has no such attribute. The nearest name is looked up only when the message is shown, because
    plugins probe with ``getattr(args, name, default)`` in their inner loops."""

    def __init__(self, attribute: str, known: dict[str, Any]) -> None:
        super().__init__(attribute)
        self._attribute, self._known = attribute, known

    def __str__(self) -> str:
        near = difflib.get_close_matches(self._attribute, self._known, n=1)
        hint = f"; the nearest flag is {near[0]!r}" if near else ""
        return f"args has no {self._attribute!r}{hint}"


class FlatArgs(argparse.Namespace):
    """A namespace of all flags. It is a copy: what a hook sets on it stays among hooks, the `Config` is frozen.

    Example:
        >>> args = config.flat()
        >>> args.n_samples_per_prompt
        8
        >>> args.n_sample_per_prompt
        MissingFlag: args has no 'n_sample_per_prompt'; the nearest flag is 'n_samples_per_prompt'
    """

    def __init__(self, values: dict[str, Any] | None = None, **more: Any) -> None:
        for name, value in {**(values or {}), **more}.items():
            setattr(self, name, _mutable(value))

    def __getattr__(self, name: str) -> Any:  # only called when the attribute is not there
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingFlag(name, vars(self))


def _mutable(value: Any) -> Any:
    """Tuples become lists, as plugins expect of flags with several values; dicts and lists are copied."""
    if isinstance(value, tuple):
        return [_mutable(item) for item in value]
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value
