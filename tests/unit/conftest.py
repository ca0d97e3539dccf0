"""What all unit tests share: the processes that stand for trainer ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slime.garbage import settle
from tests.support.trainer_ranks import Pools

_MANY_THREADS = 64
_kept = 0  # threads that the last collection left


@pytest.fixture(autouse=True)
def few_idle_threads() -> Iterator[None]:
    """Process groups that were left are in cycles; until those are found, each keeps a thread of gloo's, which wakes up
    a hundred times a second. Hundreds of them take half of the machine."""
    global _kept
    yield
    if len(os.listdir("/proc/self/task")) > _kept + _MANY_THREADS:
        settle()  # and what is left is not looked at again
        _kept = len(os.listdir("/proc/self/task"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks.run(size, job, *args)``."""
    pools = Pools()
    yield pools
    pools.close()
