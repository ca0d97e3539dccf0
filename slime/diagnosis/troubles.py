"""The troubles that slime knows, read from data/troubles.toml, and what a command finds of them.

docs/troubles.md is generated from the same file.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

from slime.documentation import with_doc_urls
from slime.errors import UserError


@dataclass(frozen=True)
class Trouble:
    """One trouble with its cause and remedies.

    Attributes:
        name: short and stable, in lower case with hyphens: "stop-tokens".
        symptom: what a user sees, in one line.
        cause: why, in a sentence or two.
        remedies: what to do, the most likely first; each names a flag, a variable or a command.
        provoke: how to make it happen, in one line.
        test: the measurement of `slime align` that tells it from other causes.
    """

    name: str
    symptom: str
    cause: str
    remedies: tuple[str, ...]
    provoke: str
    test: str = ""


@dataclass(frozen=True)
class Finding:
    """A trouble that was found in this run.

    Attributes:
        detail: what was seen, with this run's values.
        remedies: replace the trouble's own if this run's flags make them more exact.
        source: where it was seen: a log's name and line, a flag, a file.
        is_fatal: the run cannot work; otherwise it only may go wrong.
        error: the error that a launch raises for it, if there is one.
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
        """Return what ``--json`` prints."""
        return {
            "name": self.trouble.name,
            "symptom": self.trouble.symptom,
            "cause": self.trouble.cause,
            "detail": self.detail,
            "remedies": list(self.advice),
            "source": self.source,
            "fatal": self.is_fatal,
        }


DATA: dict[str, Any] = tomllib.loads(
    importlib.resources.files("slime.diagnosis")
    .joinpath("data", "troubles.toml")
    .read_text(encoding="utf-8")
)


def _trouble(name: str, fields: dict[str, Any]) -> Trouble:
    return Trouble(
        name,
        fields["symptom"],
        with_doc_urls(fields["cause"]),
        tuple(with_doc_urls(remedy) for remedy in fields["remedies"]),
        fields["provoke"],
        fields.get("test", ""),
    )


#: In the order of docs/troubles.md: section → troubles.
SECTIONS: dict[str, tuple[Trouble, ...]] = {
    section["title"]: tuple(_trouble(*item) for item in section["trouble"].items())
    for section in DATA["section"]
}
TROUBLES: dict[str, Trouble] = {
    trouble.name: trouble for group in SECTIONS.values() for trouble in group
}
#: "module:function", a module or a package below slime → name of the trouble of its errors.
PLACES: dict[str, str] = {
    place: name
    for section in DATA["section"]
    for name, fields in section["trouble"].items()
    for place in fields.get("places", ())
}


def trouble_of(error: BaseException) -> str | None:
    """Name the trouble of an error by the innermost frame that has one."""
    frames = [
        (at.f_globals.get("__name__", ""), at.f_code.co_name)
        for at, _ in walk_tb(error.__traceback__)
    ]
    found = (trouble_at(*frame) for frame in reversed(frames))
    return next((name for name in found if name is not None), None)


def trouble_at(module: str, function: str) -> str | None:
    """Name the trouble of what a function of slime raises or logs: the most exact entry counts."""
    name = module.removeprefix("slime.")
    if name == module:
        return None
    keys = [f"{name}:{function}", name]
    while "." in name:
        name = name.rpartition(".")[0]
        keys.append(name)
    return next((PLACES[key] for key in keys if key in PLACES), None)
