"""When Python's garbage collector looks, and at what: in processes that hold millions of objects
for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_gc(*, many_samples: bool = False) -> None:
    """Take all objects that are here out of the garbage collector's sight, which would halt
    everything for 0.3 s now and then to look through a million of them. To be called once all is
    set up that stays as long as the process.

    Args:
        many_samples: thousands of samples will be on their way at once. The collector then looks at
            new objects when there are 50,000 more instead of 700; it would look at them all the
            time, and find no cycles.
    """
    gc.collect()
    gc.freeze()
    if many_samples:
        gc.set_threshold(50_000)


@contextmanager
def paused() -> Iterator[None]:
    """The collector does not look inside. For imports, which make a million objects and no garbage:
    looking through them again and again is a fifth of what importing torch and megatron-core
    takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
