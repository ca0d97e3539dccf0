"""One log format for every process of a run; files go to the run folder's ``logs/``.

    12:03:04.512 INFO    trainer 0  weights.sync: version 7 pushed in 0.18 s

Modules take ``logger = get_logger(__name__)`` at import; each process calls `setup_logging` or
`log_to_file_only` once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from slime.errors import UserError, is_debugging
from slime.processes import stacks
from slime.redact import Redacting, redact_text, remember

_ROOT = "slime"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MAX_UNTOLD = 100
#: Warnings of a process without a terminal that the driver has not printed yet, and keys of the
#: warnings that were already logged once.
_untold: list[str] = []
_said: set[str] = set()


class _ProcessFormatter(logging.Formatter):
    """Adds the process role, shortens ``slime.weights.sync`` to ``weights.sync``, and hides
    secrets."""

    def __init__(self, role: str, with_date: bool) -> None:
        date = "%Y-%m-%d " if with_date else ""
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s  %(short_name)s: %(message)s",
            date + "%H:%M:%S",
        )
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        record.role = self._role
        record.short_name = record.name.removeprefix(_ROOT + ".")
        return redact_text(super().format(record))


class _CurrentStderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live display may replace to print lines above
    itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """Return a standard logger below ``slime``: pass ``__name__``, or a topic ("rewards" becomes
    "slime.rewards")."""
    return logging.getLogger(
        name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}"
    )


def tell(logger: logging.Logger, text: str, *args: object, once: str = "") -> None:
    """Log a warning for the user's terminal. The driver prints the warnings of processes without a
    terminal, see `untold`.

    Args:
        text, args: format string and arguments, as for `logging`.
        once: a key; this process logs the warning of each key once.
    """
    if once in _said:
        return
    if once:
        _said.add(once)
    logger.warning(text, *args, stacklevel=2)
    _untold.append(text % args if args else text)
    del _untold[:-_MAX_UNTOLD]  # with a terminal, `untold` is never called


def untold() -> list[str]:
    """Return the warnings of `tell` since the last call."""
    warnings = _untold[:]
    _untold.clear()
    return warnings


def log_level(level: str | None = None) -> int:
    """Return the numeric level: DEBUG if `is_debugging`, else ``level``, else INFO.

    Raises:
        UserError: there is no such level.
    """
    if is_debugging():
        return logging.DEBUG
    name = (level or "INFO").upper()
    if name not in _LEVELS:
        raise UserError(
            f"--log-level {level}: no such level", fix=f"use one of {', '.join(_LEVELS)}"
        )
    return int(logging.getLevelName(name))


def log_to_file_only(role: str, log_dir: Path, level: str | None = None, *settings: Any) -> None:
    """`setup_logging` for processes without a terminal: all output, including that of libraries and
    user code and the traceback of a fatal signal, goes to ``<log_dir>/<role>.log``.

    Args:
        settings: secrets in them, and in the environment, are hidden in all output.
    """
    remember(*settings)
    log_dir.mkdir(parents=True, exist_ok=True)
    with open(log_dir / f"{role.replace(' ', '-')}.log", "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # line buffering: a killed process must not lose what it printed
    out = os.fdopen(1, "w", 1, encoding="utf-8", errors="replace", closefd=False)
    err = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stdout = cast(TextIO, Redacting(out))
    sys.stderr = cast(TextIO, Redacting(err))
    faulthandler.enable()
    stacks.answer()
    setup_logging(role, level, with_date=True)


def setup_logging(
    role: str,
    level: str | None = None,
    log_dir: str | Path | None = None,
    *,
    with_date: bool = False,
) -> None:
    """Send this process's slime logs to stderr and, if ``log_dir`` is given, to
    ``<log_dir>/<role>.log``.

    A second call replaces the handlers of the first. Only the ``slime`` loggers are changed: the
    root logger belongs to the program that embeds slime.

    Args:
        role: what this process is: "driver", "rollout", "trainer 0", "engine 1". Shown in each
            line.
        level: name of the level, see `log_level`.
        log_dir: the run folder's ``logs/``; created if missing.
        with_date: lines on stderr begin with the date; those in files always do.
    """
    _untold.clear()
    _said.clear()
    logger = logging.getLogger(_ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(log_level(level))
    logger.propagate = False
    console = _CurrentStderrHandler()
    console.setFormatter(_ProcessFormatter(role, with_date))
    logger.addHandler(console)
    if log_dir is not None:
        directory = Path(log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(directory / f"{role.replace(' ', '-')}.log", encoding="utf-8")
        file.setFormatter(_ProcessFormatter(role, with_date=True))
        logger.addHandler(file)
