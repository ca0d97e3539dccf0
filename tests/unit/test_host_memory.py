"""Page-locked memory: of the exact size, page-aligned, unlocked when nothing looks at it any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.weights.host_memory import host_buffer


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


def test_memory_that_cannot_be_locked_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.status = 2
    monkeypatch.setattr(torch.cuda, "CudaError", RuntimeError)  # the real one asks the driver for the words
    with pytest.raises(RuntimeError, match="2"):
        host_buffer(64, pin=True)
