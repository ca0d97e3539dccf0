"""One trouble as people know it: how it is called, what is seen of it, why it happens, what to do.

docs/troubleshooting.md lists them; what `slime doctor` and `slime explain` find refers to them by
name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.errors import UserError


@dataclass(frozen=True)
class Trouble:
    """A trouble, whoever finds it.

    Attributes:
        name: short and stable, of lower-case words with hyphens: "stop-tokens", "memory-colocated".
        symptom: what a user sees, in one line.
        cause: why, in a sentence or two.
        remedies: what to do, the most likely first; each names a flag, a variable or a command.
        provoke: how to see it happen, in a line: what its test does.
    """

    name: str
    symptom: str
    cause: str
    remedies: tuple[str, ...]
    provoke: str


@dataclass(frozen=True)
class Finding:
    """A trouble that was found, in the words of this run.

    Attributes:
        trouble: what it is an instance of.
        detail: what was seen, with this run's values.
        remedies: in place of the trouble's own, where this run's flags make them more exact.
        source: where it was seen: a log's name and line, a flag, a file.
        is_fatal: the run cannot work, as opposed to what only may go wrong.
        error: that a launch raises for it, if it is one.
    """

    trouble: Trouble
    detail: str
    remedies: tuple[str, ...] = ()
    source: str = ""
    is_fatal: bool = True
    error: UserError | None = field(default=None, compare=False)

    @property
    def advice(self) -> tuple[str, ...]:
        return self.remedies or self.trouble.remedies

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {
            "name": self.trouble.name,
            "symptom": self.trouble.symptom,
            "cause": self.trouble.cause,
            "detail": self.detail,
            "remedies": list(self.advice),
            "source": self.source,
            "fatal": self.is_fatal,
        }
