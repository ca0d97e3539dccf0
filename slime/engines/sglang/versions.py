"""Find the installed SGLang and check that this system works with its version."""

from __future__ import annotations

import importlib.metadata

from slime.config.engine_flags import SGLANG_ON_GPUS, sglang_versions
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.processes.host import version_of

logger = get_logger(__name__)

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
    oldest, *_, newest = sglang_versions()
    if version is None:
        raise UserError(
            "SGLang is not installed in this environment",
            why="--rollout-engine sglang starts python -m sglang.launch_server with this "
            "interpreter",
            fix=f"{_INSTALL} (versions {oldest} to {newest}), or pass --rollout-engine embedded",
        )
    number = version_of(version)[:3]
    if version_of(oldest) <= number <= version_of(newest):
        return version
    older = number < version_of(oldest)
    missing = "nothing newer has been compared with this system"
    if older:
        missing = "pausing with a mode, flat buckets and weight checksums"
    raise UserError(
        f"SGLang {version} is not supported: {oldest} to {newest} are",
        why=f"{missing}; SGLang {oldest} is the first that has it" if older else missing,
        fix=f"{_INSTALL}, or pass --rollout-engine embedded",
    )


def check_installed() -> None:
    """Check the installed version before a launch, and warn unless it has run on GPUs.

    Raises:
        UserError: see `check_version`.
    """
    version = check_version(installed_version())
    if version_of(version)[:3] != version_of(SGLANG_ON_GPUS):
        tell(
            logger,
            "SGLang %s has not run on GPUs with slime: only its source was compared with what "
            "slime uses. %s has run; pip install sglang==%s installs it",
            version,
            SGLANG_ON_GPUS,
            SGLANG_ON_GPUS,
            once="SGLang's version",
        )
