"""Run folders as a driver makes and holds them."""

from __future__ import annotations

from contextlib import ExitStack

from slime.config.config import Config
from slime.observe.run_folder import RunFolder


def create_run(config: Config, *, resuming: bool = False) -> RunFolder:
    """The folder of a run whose driver has let go of it."""
    run, locks = RunFolder.claim(config, resuming=resuming)
    locks.close()
    return run


def held(run: RunFolder) -> ExitStack:
    """The lock of a run that goes on, until it is closed."""
    lock = ExitStack()
    lock.enter_context(run.lock())
    return lock
