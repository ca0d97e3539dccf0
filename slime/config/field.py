"""How a field of a configuration group says that it is a flag.

    temperature: float = flag(1.0)                      →  --temperature 0.7
    colocate: bool = flag(False)                        →  --colocate  (and --no-colocate, to undo a YAML file)
    stop: tuple[str, ...] = flag(())                    →  --stop A B
    env: dict[str, Any] = flag({})                      →  --env '{"A": "1"}'
    num_engines: int = derived("formula")               →  a flag whose default is computed in `resolve`

The annotation gives the type, the docstring under the field gives the help text, and `refused` says that the
name is known but what it asks for is not in this version.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_KEY = "slime_flag"


@dataclasses.dataclass(frozen=True)
class FlagMeta:
    """What the annotation cannot say of a flag.

    Attributes:
        name: the flag without dashes, where it differs from the field's name.
        aliases: further spellings that set the same field.
        off: spelling that sets a boolean to False, where it is not ``--no-<name>``; "-" when there is none.
        append: the flag may be repeated; each occurrence adds to the list.
        derived: formula of the default that `resolve` computes; empty when the default is a constant.
        refused: why setting this flag is not supported in this version; empty when it works.
        refused_at_launch: the same for a flag that can be parsed, as launch scripts of other systems have it, and
            stops the launch.
        refused_values: the same for single values of a flag that otherwise works.
        no_effect: why setting this flag changes nothing, which is said in a warning; empty when it does.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    off: str = ""
    append: bool = False
    derived: str = ""
    refused: str = ""
    refused_at_launch: str = ""
    refused_values: dict[Any, str] = dataclasses.field(default_factory=dict)
    no_effect: str = ""


NO_META = FlagMeta()


def flag(default: Any, **meta: Any) -> Any:
    """A dataclass field that is a flag with a constant default; see `FlagMeta` for the keywords."""
    metadata = {_KEY: FlagMeta(**meta)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(formula: str, **meta: Any) -> Any:
    """A flag whose default `slime.config.resolve` computes by ``formula``; never unset in a resolved `Config`
    unless the annotation admits None."""
    return flag(None, derived=formula, **meta)


def meta_of(field: dataclasses.Field[Any]) -> FlagMeta | None:
    """The flag's metadata, or None for a field that is no flag (a resolved record)."""
    return field.metadata.get(_KEY)
