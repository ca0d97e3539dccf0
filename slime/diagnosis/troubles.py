"""The troubles that slime knows, from data/troubles.toml, and findings of them in a run.

docs/known-problems.md is generated from the same file.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Sequence
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
        cause: why it happens, in one or two sentences.
        remedies: what to do, most likely first; each names a flag, a variable or a command.
        provoke: how to reproduce it, in one line.
        places: where slime raises or logs it: "module:function", a module, or a package.
        test: the measurement with which `slime align` tells it from other causes.
    """

    name: str
    symptom: str
    cause: str
    remedies: tuple[str, ...]
    provoke: str
    places: tuple[str, ...] = ()
    test: str = ""


@dataclass(frozen=True)
class Finding:
    """A trouble that was found in this run.

    Attributes:
        detail: what was found, with the run's values.
        remedies: replace the trouble's own remedies, with the run's values; () keeps those.
        source: where it was found: a log and line, a flag, or a file.
        is_fatal: the run cannot work; otherwise, it may go wrong.
        error: the error that a launch raises for it, if any.
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


Table = dict[str, Any]


def read_tables(text: str) -> tuple[dict[str, tuple[Trouble, ...]], list[Table]]:
    """Read data/troubles.toml: troubles by section, and the tables of signatures.

    Raises:
        TypeError: a key is missing, misspelt, or read by nothing.
    """
    # tables become keyword arguments, so that the parameters are the list of known keys
    return _file(**tomllib.loads(text))


def _file(
    section: list[Table], signature: list[Table]
) -> tuple[dict[str, tuple[Trouble, ...]], list[Table]]:
    return dict(_section(**table) for table in section), signature


def _section(title: str, trouble: dict[str, Table]) -> tuple[str, tuple[Trouble, ...]]:
    return title, tuple(_trouble(name, **fields) for name, fields in trouble.items())


def _trouble(
    name: str,
    *,
    symptom: str,
    cause: str,
    remedies: list[str],
    provoke: str,
    places: Sequence[str] = (),
    test: str = "",
) -> Trouble:
    return Trouble(
        name,
        symptom,
        with_doc_urls(cause),
        tuple(map(with_doc_urls, remedies)),
        provoke,
        tuple(places),
        test,
    )


#: Section → troubles, in the order of docs/known-problems.md; and the tables of signatures.
SECTIONS, SIGNATURE_TABLES = read_tables(
    importlib.resources.files("slime.diagnosis")
    .joinpath("data", "troubles.toml")
    .read_text(encoding="utf-8")
)
TROUBLES: dict[str, Trouble] = {
    trouble.name: trouble for group in SECTIONS.values() for trouble in group
}
#: "module:function", module or package within slime → name of the trouble of its errors.
PLACES: dict[str, str] = {
    place: trouble.name for trouble in TROUBLES.values() for place in trouble.places
}


def trouble_of(error: BaseException) -> str | None:
    """Return the trouble of an error, by its innermost frame in `PLACES`; None if there is none."""
    frames = [
        (at.f_globals.get("__name__", ""), at.f_code.co_name)
        for at, _ in walk_tb(error.__traceback__)
    ]
    found = (trouble_at(*frame) for frame in reversed(frames))
    return next((name for name in found if name is not None), None)


def trouble_at(module: str, function: str) -> str | None:
    """Return the trouble of a function's errors and warnings, by the most specific place."""
    name = module.removeprefix("slime.")
    if name == module:
        return None
    keys = [f"{name}:{function}", name]
    while "." in name:
        name = name.rpartition(".")[0]
        keys.append(name)
    return next((PLACES[key] for key in keys if key in PLACES), None)
