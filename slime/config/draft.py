"""A configuration while it is being resolved: what the user set, what is derived, where each value
comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.flag import FlagSpec, option_of


@dataclass
class UserFlags:
    """The flags that the user set, by dest.

    Attributes:
        values: typed values.
        origins: "flag" or "yaml <file>".
        extra: keys of --custom-config-path that are no flags.
        warnings: about settings in files that have no effect.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def set(self, dest: str, value: Any, origin: str) -> None:
        self.values[dest] = value
        self.origins[dest] = origin

    def update(self, other: UserFlags) -> None:
        """Add the flags of ``other``, which take precedence."""
        self.values.update(other.values)
        self.origins.update(other.origins)
        self.extra.update(other.extra)
        self.warnings += other.warnings

    def without(self, dest: str) -> UserFlags:
        """Return the flags as if the user had left ``dest`` out."""
        return UserFlags(
            {name: value for name, value in self.values.items() if name != dest},
            {name: origin for name, origin in self.origins.items() if name != dest},
            self.extra,
            self.warnings,
        )


@dataclass
class Draft:
    """Flags on their way to a `Config`.

    Attributes:
        values: by dest; None for what is not derived yet.
        origins: by dest.
        given: what the user set.
        specs: every flag by dest.
        entry: "train" or "train_async".
        is_run: the flags are of a whole run, with its defaults, rather than of a command that uses
            a part of the system.
        warnings: messages that are no errors.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    given: UserFlags
    specs: Mapping[str, FlagSpec]
    entry: str
    is_run: bool = False
    warnings: list[str] = field(default_factory=list)

    @staticmethod
    def with_defaults(
        given: UserFlags, specs: Mapping[str, FlagSpec], entry: str, is_run: bool = False
    ) -> Draft:
        """Return a draft with the given values over the constant defaults of slime's flags."""
        values = {dest: spec.default for dest, spec in specs.items() if not spec.sections}
        origins = dict.fromkeys(values, "default")
        return Draft(
            {**values, **given.values}, {**origins, **given.origins}, given, specs, entry, is_run
        )

    def __getitem__(self, dest: str) -> Any:
        return self.values[dest]

    def is_given(self, dest: str) -> bool:
        return dest in self.given.values

    def differs(self, dest: str) -> bool:
        """Tell whether the user set a value other than the default."""
        return self.is_given(dest) and self.values[dest] != self.specs[dest].default

    def truncations(self) -> list[str]:
        """Return the flags, with their values, that exclude tokens from sampling."""
        off = {"rollout_top_k": (None, -1), "rollout_top_p": (1.0,), "rollout_min_p": (0.0,)}
        return [f"{option_of(dest)} {self[dest]:g}" for dest in off if self[dest] not in off[dest]]

    def derive(self, dest: str, value: Any, formula: str) -> None:
        """Set ``dest``, unless the user or an earlier derivation did."""
        if self.values[dest] is None and value is not None:
            self.values[dest] = value
            self.origins[dest] = f"derived: {formula}"

    def copy(self, dest: str, source: str) -> None:
        """Set ``dest`` to the value of ``source``, unless it is given."""
        self.derive(dest, self.values[source], source)
