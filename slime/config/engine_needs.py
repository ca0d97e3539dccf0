"""Options of SGLang's server and of its router that act only beside another one:
`data/engine_needs.toml` as `Requirement` records."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime.config.data import read_table, record_of
from slime.config.flag import Condition, Requirement


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the table, which describes its fields."""

    options: tuple[str, ...]
    why: str
    with_: Mapping[str, list[str | int]] = field(default_factory=dict)
    without: Mapping[str, list[str | int]] = field(default_factory=dict)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        required = [Condition(dest, tuple(values)) for dest, values in self.with_.items()]
        excluded = [
            Condition(dest, tuple(values), negated=True) for dest, values in self.without.items()
        ]
        return (*required, *excluded)


@functools.cache
def _rows(prefix: str) -> tuple[_Row, ...]:
    table = read_table("engine_needs.toml")[prefix]
    return tuple(
        record_of(_Row, {"with_" if key == "with" else key: value for key, value in row.items()})
        for row in table
    )


def requirements(
    prefix: str, options: Mapping[str, tuple[Any, ...]]
) -> dict[str, tuple[Requirement, ...]]:
    """Return what options need to have an effect, as warnings, by name.

    Args:
        prefix: "sglang" or "router".
        options: the options of the version at hand, with their choices. Conditions on other
            options and values are left out, and so is a requirement without any condition.

    Example:
        >>> requirements("router", {"otlp_traces_endpoint": (), "enable_trace": ()})[
        ...     "otlp_traces_endpoint"][0].words()
        'without --router-enable-trace'
    """
    found: dict[str, tuple[Requirement, ...]] = {}
    for row in _rows(prefix):
        conditions = tuple(
            known for one in row.conditions if (known := _in_version(one, prefix, options))
        )
        if not conditions:
            continue
        need = Requirement(conditions, row.why, warns=True)
        for option in row.options:
            found[option] = (*found.get(option, ()), need)
    return found


def _in_version(
    condition: Condition, prefix: str, options: Mapping[str, tuple[Any, ...]]
) -> Condition | None:
    """Return the condition with the values that the version has; None if it lacks the option."""
    owner, _, name = condition.dest.partition("_")
    if owner != prefix:
        return condition
    if name not in options:
        return None
    values = condition.values
    kept = tuple(value for value in values if not options[name] or value in options[name])
    return replace(condition, values=kept) if kept or not values else None


def never_acting(prefix: str) -> dict[str, str]:
    """Return the options that have no effect in any combination. name → reason"""
    return {
        option: row.why for row in _rows(prefix) if not row.conditions for option in row.options
    }
