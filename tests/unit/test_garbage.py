"""The collector rests while something is imported, and no longer."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from slime.processes.garbage import paused
from slime.trainer.megatron.device import _import_without_servers


def test_it_rests_inside_and_goes_on_whatever_happens() -> None:
    with pytest.raises(ImportError), paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one has not ended"
        raise ImportError
    assert gc.isenabled()


def test_what_stands_in_for_a_module_is_gone_after_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _import_without_servers("no_such_module", stand_in=ModuleType("stand_in"))
    assert "stand_in" not in sys.modules and "wandb" not in sys.modules
