"""Page-locked memory: of the exact size, page-aligned, unlocked when nothing looks at it any
more."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from slime.processes import pinned_memory as host_memory
from slime.processes.pinned_memory import BuffersAhead, host_buffer


class Driver:
    """Stands in for ``torch.cuda.cudart()``."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    # what else runs on this host is not what is tested
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 64e9)
    return driver


def test_exactly_what_was_asked_for_is_locked_as_long_as_a_view_of_it_lives(driver: Driver) -> None:
    buffer = host_buffer(5000, pin=True)
    [(address, nbytes)] = driver.locked.items()
    assert (address, nbytes) == (buffer.data_ptr(), 5000) and address % 4096 == 0
    view = buffer.view(torch.bfloat16).view(50, 50).fill_(3)
    del buffer
    assert driver.locked and view.sum() == 7500
    del view
    assert not driver.locked


@pytest.mark.parametrize("arguments", [{"nbytes": 64, "pin": False}, {"nbytes": 0, "pin": True}])
def test_other_memory_is_ordinary(driver: Driver, arguments: Any) -> None:
    assert host_buffer(**arguments).numel() == arguments["nbytes"] and not driver.locked


def test_memory_that_cannot_be_locked_is_an_error(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(MemoryError, match=r"page-locked \(CUDA error 2\)"):
        host_buffer(64, pin=True)


def test_memory_that_is_not_there_is_an_error(driver: Driver) -> None:
    with pytest.raises(MemoryError, match="GB of host memory"):
        host_buffer(1 << 62, pin=True)


# -- ahead of time ---------------------------------------------------------------------------------


class SlowDriver(Driver):
    """Locks one buffer for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits, self.asked = threading.Semaphore(0), threading.Semaphore(0)
        self.fails_at: int | None = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.release()
        assert self.permits.acquire(timeout=30)
        return 2 if nbytes == self.fails_at else super().cudaHostRegister(address, nbytes, flags)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowDriver:
    driver = SlowDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 64e9)
    return driver


def test_buffers_are_made_beside_other_work(slow: SlowDriver) -> None:
    ahead = BuffersAhead([4096, 100, 9000])
    # we are here while the first one is locked
    assert slow.asked.acquire(timeout=30) and not slow.locked
    for _ in range(3):
        slow.permits.release()
    ahead._thread.join(30)
    buffers = ahead.take()
    assert [buffer.nbytes for buffer in buffers] == [4096, 100, 9000] and len(slow.locked) == 3
    assert ahead.take() == []
    buffers.clear()
    assert not slow.locked


def test_whoever_needs_them_waits_for_one_at_most(slow: SlowDriver) -> None:
    ahead = BuffersAhead([64, 64, 64])
    assert slow.asked.acquire(timeout=30)
    threading.Timer(0.05, slow.permits.release).start()
    assert len(ahead.take()) == 1 and not ahead._thread.is_alive()


def test_a_lock_that_takes_for_ever_is_not_waited_for(
    slow: SlowDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.deadlines.PINNED_MEMORY_LOCK", 0.05)
    ahead = BuffersAhead([64])
    with caplog.at_level(logging.WARNING, "slime"):
        assert ahead.take() == []
    assert "is not waited for" in caplog.text
    slow.permits.release()
    ahead._thread.join(30)


def test_what_cannot_be_locked_ahead_is_told(
    slow: SlowDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow.fails_at = 10_000_000
    for _ in range(2):
        slow.permits.release()
    with caplog.at_level(logging.WARNING, "slime"):
        ahead = BuffersAhead([64, 10_000_000, 10_000_000])
        ahead._thread.join(30)
    [buffer] = ahead.take()
    assert list(slow.locked) == [buffer.data_ptr()]
    assert "when they are needed: 0.0 GB of host memory cannot be page-locked" in caplog.text


def test_memory_that_the_host_may_not_have_is_left_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 5e9)
    with caplog.at_level(logging.WARNING, "slime"):
        ahead = BuffersAhead([64, 2_000_000_000, 64])
        ahead._thread.join(30)
    assert [buffer.nbytes for buffer in ahead.take()] == [64]
    assert (
        "2.0 GB of host memory are not locked ahead of time" in caplog.text
        and "5.0 GB are free" in caplog.text
    )
