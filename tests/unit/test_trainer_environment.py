"""What trainer ranks find in their environment."""

from __future__ import annotations

from typing import Any

import pytest

from slime.cluster.rank_group import trainer_environment
from slime.config import make_config


def environment(on_gpu: bool, **flags: Any) -> dict[str, str]:
    config = make_config(rollout_batch_size=1, num_rollout=1, hf_checkpoint="model", **flags)
    return trainer_environment(config, 3, on_gpu=on_gpu)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)


def test_a_trainer_maps_nccls_memory_as_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(True, rollout_engine="sglang") == {
        "OMP_NUM_THREADS": "3",
        "NCCL_CUMEM_ENABLE": "0",
    }
    assert environment(True, rollout_engine="embedded") == {"OMP_NUM_THREADS": "3"}
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # SGLang keeps what it finds, too
    assert environment(True, rollout_engine="sglang")["NCCL_CUMEM_ENABLE"] == "1"


def test_caches_of_matrix_products_are_limited_on_a_cpu_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = environment(False, rollout_engine="embedded")
    assert found["LRU_CACHE_CAPACITY"] == found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    found = environment(
        False, rollout_engine="embedded", train_env_vars={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 9}
    )
    assert (found["LRU_CACHE_CAPACITY"], found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "9")
