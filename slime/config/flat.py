"""The flat ``args`` that hooks get: mutable, copyable, picklable, with flag names as attributes."""

from __future__ import annotations

import argparse
import copy
import difflib
from typing import Any


class FlatArgs(argparse.Namespace):
    """A namespace of all flags. It is a copy: what a hook sets on it stays among hooks, the `Config` is frozen.

    Example:
        >>> args = config.flat()
        >>> args.n_samples_per_prompt
        8
        >>> args.n_sample_per_prompt
        AttributeError: args has no 'n_sample_per_prompt'; the nearest flag is 'n_samples_per_prompt'
    """

    def __init__(self, values: dict[str, Any] | None = None, **more: Any) -> None:
        for name, value in {**(values or {}), **more}.items():
            setattr(self, name, _mutable(value))

    def __getattr__(self, name: str) -> Any:  # only called when the attribute is not there
        if name.startswith("__"):
            raise AttributeError(name)
        near = difflib.get_close_matches(name, vars(self), n=1)
        hint = f"; the nearest flag is {near[0]!r}" if near else ""
        raise AttributeError(f"args has no {name!r}{hint}", name=name, obj=None)


def _mutable(value: Any) -> Any:
    """Tuples become lists, as plugins expect of nargs flags; dicts are copied."""
    if isinstance(value, tuple):
        return [_mutable(item) for item in value]
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value
