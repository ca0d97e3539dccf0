"""Who this process waits for now, since when, and when it heard last: what is said where a wait
does not end.

The driver has one thread that waits; waits lie within each other. Whoever reads this from another
thread asks nobody.
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
        what: "training".
        since: epoch seconds.
        whom: who has not answered yet, with the process id, 0 for none on this host.
    """

    what: str
    since: float = field(default_factory=time.time)
    whom: dict[str, int] = field(default_factory=dict)


_open: list[OpenWait] = []
_heard_at = time.monotonic()
_end: BaseException | None = None


def heard() -> None:
    """There was an answer, or another sign of progress."""
    global _heard_at
    _heard_at = time.monotonic()


def heard_at() -> float:
    """On the monotonic clock."""
    return _heard_at


def end_with(error: BaseException | None) -> None:
    """What `look` raises the next time, once; by whoever sees that the waits of this process will
    not end."""
    global _end
    _end = error


def is_ending() -> bool:
    """Nobody has looked yet."""
    return _end is not None


def look() -> None:
    """To be called now and then while waiting. Raises what `end_with` was given."""
    global _end
    error = _end
    _end = None
    if error is not None:
        raise error


@contextmanager
def waiting(what: str) -> Iterator[OpenWait]:
    """Within it this process waits ("training"); whoever waits keeps ``whom`` up to date. An error
    that ends the outermost wait tells enough: nothing is raised besides."""
    mine = OpenWait(what)
    _open.append(mine)
    try:
        yield mine
    except BaseException:
        if _open == [mine]:
            heard()
            end_with(None)
        raise
    finally:
        _open.remove(mine)


def words() -> str:
    """ "waits since 14:03:10 (training) for trainer-0", or that it waits for no actor."""
    for one in list(_open)[-1:]:
        since = time.strftime("%H:%M:%S", time.localtime(one.since))
        return f"waits since {since} ({one.what}) for {', '.join(one.whom) or 'nobody any more'}"
    return "waits for no actor"


def names_of(pids: Collection[int]) -> list[str]:
    """Of those that are waited for, the ones with these process ids."""
    return [name for one in list(_open) for name, pid in list(one.whom.items()) if pid in pids]
