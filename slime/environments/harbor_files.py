"""The files of a task of Harbor's format, and what its tests leave."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from slime.errors import UserError


def read_toml(file: Path) -> dict[str, Any]:
    """
    Raises:
        UserError: it is none.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file} cannot be read", why=str(error), fix="mend it, or leave the task out"
        ) from error


def text_left_in(file: Path) -> str:
    """Read a file that a program wrote, unless it is a link that leads elsewhere on this host, or
    blocks whoever opens it (a pipe).

    Raises:
        OSError: it is, or it is not there.
    """
    if file.resolve() != file:
        raise OSError(f"{file.name} is a link")
    if file.exists() and not file.is_file():
        raise OSError(f"{file.name} is no file")
    return file.read_text(encoding="utf-8")


def dockerfile_lines(task: Path) -> list[tuple[str, str]]:
    """The lines of a task's Dockerfile, each as its word and the rest; none where there is no
    Dockerfile."""
    file = task / "environment" / "Dockerfile"
    lines = (
        file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if file.is_file() else []
    )
    pairs = [
        line.strip().partition(" ")
        for line in lines
        if line.strip() and not line.strip().startswith("#")
    ]
    return [(word.upper(), " ".join(rest.split())) for word, _, rest in pairs]
