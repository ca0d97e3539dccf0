"""Keep a run going when its output cannot be written: a closed pipe, a full disk, a closed
terminal."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from slime.log import get_logger
from slime.redact import redact_text

logger = get_logger(__name__)


class _Tolerant:
    """A text stream that discards everything after its first failed write."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(redact_text(text))
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        _redirect_to_null(self._stream.fileno())
        with suppress(OSError):
            self._stream.flush()  # drop the buffered text into /dev/null
        _say(f"{self._name} cannot be written any more ({error.strerror})")


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _say(what: str) -> None:
    logger.warning("%s: the run continues, and its messages are only in its logs", what)


def lose_terminal() -> None:
    """Stop writing to a terminal that was closed. Files and pipes are unchanged."""
    for descriptor in (0, 1, 2):
        with suppress(OSError):  # closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                _redirect_to_null(descriptor)
    _say("the terminal was closed")


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Within this block, log the first failed write to stdout or stderr, and never raise it."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before):
        # no stream, or one without a descriptor
        with suppress(AttributeError, OSError, ValueError):
            stream.fileno()
            setattr(sys, name, _Tolerant(stream, name))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Tolerant):
                stream.flush()
        sys.stdout, sys.stderr = before
