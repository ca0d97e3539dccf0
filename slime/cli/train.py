"""`slime train` and `slime train-async`: the same run, with another default of
--async-buffer-size."""

from __future__ import annotations

import logging

from slime.config import Config, parse_args
from slime.config.make import judge_args
from slime.errors import several

logger = logging.getLogger(__name__)


def main(argv: list[str], entry: str = "train") -> None:
    """Run `slime train`, or `python train.py`."""
    config = _config(argv, entry)
    if config.debug.dry_run:
        from slime.cli.dry_run import dry_run

        dry_run(config)
        return
    from slime.loop import train  # late: it imports Ray, and flags are checked without it
    from slime.run.session import open_session

    with open_session(config) as session:
        train(session)


def _config(argv: list[str], entry: str) -> Config:
    """Parse the flags of the run.

    Raises:
        UserError: all errors in the flags, and in the files and functions that they name.
    """
    if "--help" in argv or "-h" in argv:
        return parse_args(argv, entry)
    config, errors = judge_args(argv, entry)
    if errors and config is not None:
        from slime.diagnosis.doctor import preflight

        preflight(config, errors)
    if errors or config is None:
        raise several(errors)
    for warning in config.warnings:
        logger.warning(warning)
    return config


def main_async(argv: list[str]) -> None:
    """Run `slime train-async`, or `python train_async.py`."""
    main(argv, "train_async")
