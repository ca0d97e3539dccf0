"""Shared code of the tracker sinks: import of packages, and the ids of a run, which its folder
keeps so that a resumed run continues the same curves."""

from __future__ import annotations

import importlib
import re
from typing import Any

from slime.errors import UserError
from slime.files import write_atomically
from slime.observe.run_folder import RunFolder


def tracker_package(name: str) -> Any:
    """Import the package of a tracker; ``name`` is also the name of its flag and of its extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_tracker(name) from error


def missing_tracker(name: str) -> UserError:
    return UserError(
        f"--use-{name} needs the package {name}", fix=f"pip install 'slime-rl[{name}]'"
    )


def kept(run: RunFolder, name: str, fresh: str, asked: str | None = None) -> str:
    """Return a value that stays the same when this stage is resumed: ``asked`` if given, else the
    stored value, else ``fresh``."""
    path = run.path / f".{name}{'-' + run.stage if run.stage else ''}"
    found = path.read_bytes().decode("ascii", "replace").strip() if path.is_file() else ""
    if asked or not re.fullmatch(r"[\w.-]+", found):
        found = asked or fresh
        write_atomically(path, found.encode())
    return found


def shown_name(run: RunFolder) -> str:
    """Return the display name of the run in trackers."""
    return f"{run.path.name}-{run.stage}" if run.stage else run.path.name
