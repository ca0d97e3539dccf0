"""What all unit tests share: the processes that stand for trainer ranks, and a log of their own."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime import log
from slime.processes.garbage import freeze_gc
from slime.trainer.megatron import device
from tests.support.gloo_loop import share_gloo_loop
from tests.support.trainer_ranks import Pools, fork_rank_server

# as a trainer does before anything imports megatron, which many modules of tests do
device.install()
share_gloo_loop()

#: A trainer has 43.
_MANY_THREADS, _FAR_TOO_MANY = 500, 2_000
_kept = 0  # threads that the last collection left


@pytest.hookimpl(trylast=True)  # after the collected objects are frozen
def pytest_collection_finish(session: pytest.Session) -> None:
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        fork_rank_server()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers for the virtual stages of two ranks."""
    from tests.support.tiny_models import save_tiny

    directory = tmp_path_factory.mktemp("deep")
    save_tiny("qwen3", directory, layers=4)
    return directory


@pytest.fixture(autouse=True)
def few_idle_threads() -> None:
    """Process groups that were left are in cycles; until those are found, each keeps threads.

    It looks before a test, when pytest holds nothing of the one before: at its end the trainer of
    that is still there.
    """
    global _kept
    threads = len(os.listdir("/proc/self/task"))
    if threads > _kept + _MANY_THREADS:
        if threads > _FAR_TOO_MANY:
            gc.unfreeze()  # the trainer of a fixture that lived when this was called last
        freeze_gc()  # and what is left is not looked at again
        _kept = len(os.listdir("/proc/self/task"))


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was told yet, and records reach caplog, whatever another test configured."""
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log, "_untold", [])
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks.run(size, job, *args)``."""
    pools = Pools()
    yield pools
    pools.close()
