"""The arguments of a subcommand other than training, whose flags are declared in `slime.config`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from slime.errors import UserError


class Arguments(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose complaints look like all others, and whose help keeps the lines it is given.

    Args:
        prog: "slime chat".
        description: what ``--help`` says first; usually the module's docstring, with examples.
    """

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage:").split())
        raise UserError(f"{self.prog}: {message}", why=f"it is called as {usage}", fix=f"{self.prog} --help tells more")
