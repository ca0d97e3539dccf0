"""Find the installed SGLang and check that this system works with its version."""

from __future__ import annotations

import importlib.metadata

from slime.errors import UserError
from slime.processes.host import version_of

OLDEST = (0, 5, 12)
NEWEST = (0, 5, 16)
_INSTALL = "pip install 'slime-rl[sglang]'"


def installed_version() -> str | None:
    """Find the version of the installed SGLang without importing it, which takes half a minute;
    None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(version: str | None) -> str:
    """Return the version, if it is supported.

    Raises:
        UserError: SGLang is not installed, or its version is not supported.
    """
    oldest, newest = (".".join(map(str, limit)) for limit in (OLDEST, NEWEST))
    if version is None:
        raise UserError(
            "SGLang is not installed in this environment",
            why="--rollout-engine sglang starts python -m sglang.launch_server with this "
            "interpreter",
            fix=f"{_INSTALL} (versions {oldest} to {newest}), or pass --rollout-engine embedded",
        )
    number = version_of(version)[:3]
    if OLDEST <= number <= NEWEST:
        return version
    older = number < OLDEST
    missing = (
        "pausing with a mode, flat buckets and weight checksums"
        if older
        else "nothing newer has been tried"
    )
    raise UserError(
        f"SGLang {version} is not supported: {oldest} to {newest} are",
        why=f"{missing}; SGLang {oldest} is the first that has it" if older else missing,
        fix=f"{_INSTALL}, or pass --rollout-engine embedded",
    )
