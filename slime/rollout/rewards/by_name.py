"""Reward functions that get arguments by parameter name, as in a notebook: ``lambda response,
label: …``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from slime.samples.types import Sample

NAMES = ("response", "label", "prompt", "metadata", "sample")


class RewardByName:
    """A `slime.user_code.hooks.RewardFunction` around a function of some of ``response``,
    ``label``, ``prompt``, ``metadata`` and ``sample``.

    Example:
        >>> reward = RewardByName.of(lambda response, label: response == label)
        >>> reward(None, Sample(response="22", label="22"))
        True
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = tuple(inspect.signature(function).parameters)
        # its name in errors
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    @property
    def required(self) -> set[str]:
        """Names that have no default."""
        parameters = inspect.signature(self._function).parameters.values()
        return {parameter.name for parameter in parameters if parameter.default is parameter.empty}

    @staticmethod
    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` if all its parameters are in `NAMES`; else return it, e.g. one of
        (args, sample)."""
        try:
            names = set(inspect.signature(function).parameters)
        except ValueError:  # some builtins have no signature
            return function
        return RewardByName(function) if names and names <= set(NAMES) else function

    def __call__(self, args: Any, sample: Sample, **_: Any) -> Any:
        return self._function(
            **{name: sample if name == "sample" else getattr(sample, name) for name in self._names}
        )
