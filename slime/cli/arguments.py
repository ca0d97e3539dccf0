"""Arguments of the subcommands. `slime.config` declares the flags of training."""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Iterable
from typing import Any, NoReturn

from slime.cli import ENTRIES
from slime.errors import UserError


def run_flags(words: list[str]) -> tuple[str, list[str]]:
    """Split off the loop's name, if the first word is one; returns (loop or "train", flags)."""
    entry = ENTRIES.get(words[0].replace("_", "-")) if words else None
    return (entry, words[1:]) if entry else ("train", words)


def at_least_one(text: str) -> int:
    """Parse a count, as argparse's ``type=``.

    Raises:
        ArgumentTypeError: ``text`` is not a whole number, or less than 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


class Arguments(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises `UserError` and keeps the line breaks of its
    description.

    Args:
        prog: the command, for example "slime chat".
        description: the first text of ``--help``; usually the module's docstring, with examples.
    """

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. Report a misspelt flag before argparse misreads its value.

        Raises:
            UserError: there is no such flag; the error names the nearest.
        """
        if not self._subparsers:  # their parsers check their own flags
            self._refuse_unknown_flags(args or ())
        return super().parse_args(args, namespace)

    def _refuse_unknown_flags(self, words: Iterable[str]) -> None:
        known = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                self.error(
                    f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else "")
                )

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise UserError(
            f"{self.prog}: {message}",
            why=f"it is called as {usage}",
            fix=f"{self.prog} --help tells more",
        )
