"""A stopped trainer goes on as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_model import save_tiny, trainer
from trainer_ranks import make_batch


@pytest.mark.parametrize("flags", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_resumed_training_gives_the_same_bits(flags: dict[str, Any], tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "hf")
    common = {
        **flags,
        "hf_checkpoint": str(tmp_path / "hf"),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "lr_decay_style": "cosine",
        "save_hf": str(tmp_path / "hf_{rollout_id}"),
    }
    first = trainer(**common)
    try:
        first.train(make_batch(seed=0))
        path = first.save(0, {"weight_version": 7})
        unbroken = first.train(make_batch(seed=1))
        weights = [p.detach().clone() for p in first.model_chunks[0].parameters()]
    finally:
        first.close()
    assert path.name == "iter_0000000" and (tmp_path / "hf_0" / "config.json").is_file()

    second = trainer(**common)
    try:
        assert second.next_rollout_id == 1 and second.extra_state == {"weight_version": 7}
        assert not second.reference_is_policy
        resumed = second.train(make_batch(seed=1))
        assert all(torch.equal(a, b) for a, b in zip(weights, second.model_chunks[0].parameters()))
    finally:
        second.close()
    for name, value in unbroken.items():
        if not name.startswith("perf/"):
            assert resumed[name] == value, name


@pytest.mark.parametrize("keep_weights", [False, True])
def test_sleep_frees_the_memory_and_wake_restores_the_bits(keep_weights: bool) -> None:
    from slime.train.megatron.offload import Offloader

    backend = trainer(bf16=True)
    try:
        backend.train(make_batch(seed=0))
        offloader = Offloader(backend.model_chunks, backend.optimizer)
        before = [p.detach().clone() for p in backend.model_chunks[0].parameters()]
        for _ in range(2):
            freed = offloader.sleep(keep_weights=keep_weights)
            size = sum(p.numel() for p in before)
            assert freed >= size * (4 + 3 * 4)  # float32 gradients, master weights and two moments
            empty = [p.untyped_storage().nbytes() == 0 for p in backend.model_chunks[0].parameters()]
            assert all(empty) is not keep_weights
            assert offloader.sleep() == 0
            offloader.wake()
        assert all(torch.equal(a, b) for a, b in zip(before, backend.model_chunks[0].parameters()))
        slept = backend.train(make_batch(seed=1))["train/grad_norm"]
        after = [p.detach().clone() for p in backend.model_chunks[0].parameters()]
    finally:
        backend.close()
    undisturbed = trainer(bf16=True)
    try:
        undisturbed.train(make_batch(seed=0))
        assert undisturbed.train(make_batch(seed=1))["train/grad_norm"] == slept
        assert all(torch.equal(a, b) for a, b in zip(after, undisturbed.model_chunks[0].parameters()))
    finally:
        undisturbed.close()
