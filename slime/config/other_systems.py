"""Names of settings in other systems, and the flags that correspond to them.

An unknown flag is looked up here before a similar spelling is suggested; `slime flags WORD` looks
here too. docs/coming-from.md shows the same rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from slime.config.data import read_table


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
    """Return the rows by whole names and by last parts of dotted names. Whole names take
    precedence, and then earlier rows."""
    answers = [row for rows in other_names().values() for row in rows]
    rows = [(_key(name), row) for row in answers for name in row.names]
    parts = [(name.rpartition(".")[2], row) for name, row in rows]
    table: dict[str, OtherName] = {}
    for name, row in [*rows, *(part for part in parts if len(part[0]) > 1)]:
        table.setdefault(name, row)
    return table


def other_name(name: str) -> OtherName | None:
    """Return the row for another system's name, or None if the name is unknown.

    Example:
        >>> other_name("--learning-rate").text
        '--lr'
        >>> other_name("actor_rollout_ref.actor.ppo_mini_batch_size").text
        '--global-batch-size (samples, not prompts), or --num-steps-per-rollout'
    """
    key = _key(name)
    return _by_name().get(key) or _by_name().get(key.rpartition(".")[2])
