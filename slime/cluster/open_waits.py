"""The current waits of this process: for which actors, since when, and the time of the last
progress.

One thread of the driver waits, and waits may nest. Other threads only read this.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class OpenWait:
    """A wait of this process.

    Attributes:
        what: what is waited for, in messages: "training".
        since: epoch seconds.
        pending: actors that have not answered → process id, 0 if it is on another host.
    """

    what: str
    since: float = field(default_factory=time.time)
    pending: dict[str, int] = field(default_factory=dict)


_open: list[OpenWait] = []
_last_progress = time.monotonic()
_interrupt: BaseException | None = None


def note_progress() -> None:
    """Record an answer, or another sign of progress."""
    global _last_progress
    _last_progress = time.monotonic()


def last_progress() -> float:
    """Return the time of the last progress, on the monotonic clock."""
    return _last_progress


def interrupt_with(error: BaseException | None) -> None:
    """Make the next `raise_interrupt` raise ``error``, once; None cancels an earlier one."""
    global _interrupt
    _interrupt = error


def is_interrupt_pending() -> bool:
    """Return whether an interrupt is set and not raised yet."""
    return _interrupt is not None


def raise_interrupt() -> None:
    """Raise the error given to `interrupt_with`. Call this repeatedly while waiting."""
    global _interrupt
    error = _interrupt
    _interrupt = None
    if error is not None:
        raise error


@contextmanager
def waiting(what: str) -> Iterator[OpenWait]:
    """Record a wait ("training") during the block, which keeps ``pending`` up to date.

    An error that ends the outermost wait cancels a pending interrupt.
    """
    mine = OpenWait(what)
    _open.append(mine)
    try:
        yield mine
    except BaseException:
        if _open == [mine]:
            note_progress()
            interrupt_with(None)
        raise
    finally:
        _open.remove(mine)


def describe() -> str:
    """Return "has waited since 14:03:10 (training) for trainer-0", or "waits for no actor"."""
    for one in list(_open)[-1:]:
        since = time.strftime("%H:%M:%S", time.localtime(one.since))
        return f"has waited since {since} ({one.what}) for {', '.join(one.pending) or 'no actor'}"
    return "waits for no actor"


def names_of(pids: Collection[int]) -> list[str]:
    """Return the names of the pending actors with these process ids."""
    return [name for one in list(_open) for name, pid in list(one.pending.items()) if pid in pids]
