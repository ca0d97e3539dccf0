"""Optimizer states in host memory: the same bits as an optimizer whose states stay on the
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_jobs import make_model
from tests.support.streamed_jobs import train
from tests.support.trainer_ranks import Pools

STREAMED = {"optimizer_cpu_offload": True}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "qwen3", {}),
    "dp2": (2, "qwen3", {}),
    "tp2": (2, "qwen3", {"tensor_model_parallel_size": 2}),
    "ep2": (2, "qwen3_moe", {"expert_model_parallel_size": 2}),
}
COMMON: dict[str, Any] = {
    "bf16": True,
    "weight_decay": 0.1,
    "lr": 0.01,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "clip_grad": 0.5,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in ("qwen3", "qwen3_moe")}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert repr(ours["outcomes"]) == repr(theirs["outcomes"])  # one norm is NaN
    assert ours["rates"] == theirs["rates"]
    for mine, other in zip(ours["weights"], theirs["weights"], strict=True):
        assert torch.equal(mine, other)
    for (name, mine), (other_name, other) in zip(ours["states"], theirs["states"], strict=True):
        assert name == other_name and torch.equal(mine, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits(ranks: Pools, models: dict[str, Path], layout: str) -> None:
    size, family, flags = LAYOUTS[layout]
    plain, streamed = (
        ranks.run(size, train, models[family], {**COMMON, **flags, **more}, 4, 0, 2)
        for more in ({}, STREAMED)
    )
    for ours, theirs in zip(streamed, plain, strict=True):
        assert_same(ours, theirs)
        assert [applied for _, applied in ours["outcomes"]] == [True, True, False, True]
