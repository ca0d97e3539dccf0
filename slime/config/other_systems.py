"""Names of settings in other systems, and the flags that correspond to them.

An unknown flag is looked up here before a similar spelling is suggested; `slime flags WORD` looks
here too. docs/coming-from.md shows the same rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from slime.config.data import read_table

#: Last parts of dotted names that say nothing without the parts before them.
_GENERIC = frozenset({
    "enable", "enabled", "format", "len", "metric_name", "mode", "name", "num_workers", "path",
    "seed", "shuffle", "target", "type"
})  # fmt: skip


@dataclass(frozen=True)
class OtherName:
    """Names of one setting in other systems.

    Attributes:
        names: as other systems write them; the last part of a dotted name is found too.
        answer: Markdown that names the flags with the same effect, or says why there is none.
    """

    names: tuple[str, ...]
    answer: str

    @property
    def text(self) -> str:
        """The answer without Markdown."""
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.answer).replace("`", "")


@functools.cache
def other_names() -> dict[str, list[OtherName]]:
    """Return the rows of `data/other_systems.toml` by system, "TRL" and "verl"."""
    return {
        system: [OtherName(tuple(row["names"]), row["answer"]) for row in rows]
        for system, rows in read_table("other_systems.toml").items()
    }


def _key(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()


@functools.cache
def _by_name() -> dict[str, OtherName]:
    """Return the rows by whole names; earlier rows take precedence."""
    table: dict[str, OtherName] = {}
    for row in (row for rows in other_names().values() for row in rows):
        for name in row.names:
            table.setdefault(_key(name), row)
    return table


@functools.cache
def _by_last_part() -> dict[str, OtherName]:
    table: dict[str, OtherName] = {}
    for name, row in _by_name().items():
        last = name.rpartition(".")[2]
        if len(last) > 1 and (last == name or last not in _GENERIC):
            table.setdefault(last, row)
    return table


def other_name(name: str, *, by_last_part: bool = True) -> OtherName | None:
    """Return the row for another system's name, or None if the name is unknown.

    Args:
        by_last_part: take a row of another section too, if only the last parts are equal.
    Example:
        >>> other_name("--learning-rate").text
        '--lr'
        >>> other_name("actor_rollout_ref.actor.ppo_mini_batch_size").text
        '--global-batch-size (samples, not prompts), or --num-steps-per-rollout'
    """
    parts = _key(name).split(".")
    ends = [".".join(parts[first:]) for first in range(len(parts))]
    found = next((_by_name()[end] for end in ends if end in _by_name()), None)
    return found or (_by_last_part().get(parts[-1]) if by_last_part else None)
