"""Settings of all tests on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cuDNN compute convolutions in float32, which it does in TF32 by default: those of
    transformers' hybrids are what the tests compare with."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
