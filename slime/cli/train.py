"""`slime train` and `slime train-async`: the same run, with another default of --async-buffer-size."""

from __future__ import annotations

from slime.config import parse_args


def main(argv: list[str], entry: str = "train") -> None:
    """`slime train`, `python train.py`."""
    config = parse_args(argv, entry)
    if config.debug.dry_run:
        from slime.cli.dry_run import dry_run

        dry_run(config)
        return
    from slime.loop import train  # not before the flags are right: the session imports Ray
    from slime.session import open_session

    with open_session(config) as session:
        train(session)


def main_async(argv: list[str]) -> None:
    """`slime train-async`, `python train_async.py`."""
    main(argv, "train_async")
