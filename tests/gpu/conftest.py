"""Settings of all tests on a GPU: transformers, which they compare with, computes in float32."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

_HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep cuDNN from computing convolutions in TF32, its default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _exact_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers compute delta rules by torch, also where flash-linear-attention is
    installed, whose kernels multiply float32 numbers in TF32."""
    for family in _HYBRIDS:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        # transformers 5.12 takes None for "not installed"; 5.24 wraps its own functions
        for name in (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "FusedRMSNormGated",
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, None)
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
