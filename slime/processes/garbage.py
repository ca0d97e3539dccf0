"""Settings of Python's garbage collector for processes that keep millions of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_gc(*, many_samples: bool = False) -> None:
    """Exclude all existing objects from garbage collection; a full collection of a million objects
    halts the process for 0.3 s. Call it after setup, when the objects that live as long as the
    process exist.

    Args:
        many_samples: the process handles thousands of samples at once. The collector then runs
            after 50,000 new objects instead of 700, since our code puts no sample into a cycle. A
            full collection comes after millions of objects, so the caller makes one per rollout
            for the cycles of users' code.
    """
    gc.collect()
    gc.freeze()
    if many_samples:
        gc.set_threshold(50_000)


@contextmanager
def paused() -> Iterator[None]:
    """Switch the garbage collector off inside the block. Used for imports, which create a million
    objects and no garbage: collections would take a fifth of the time that importing torch and
    megatron-core takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
