"""A stopped trainer goes on as if it had not been stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer


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


def test_the_updated_reference_survives_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Taken after rollout 1; rollout 3's KL is measured against it also when the run was stopped in
    between."""
    caplog.set_level("INFO", logger="slime")
    save_tiny("qwen3", tmp_path / "hf")
    flags = {
        "hf_checkpoint": str(tmp_path / "hf"),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "ref_update_interval": 2,
    }
    batches = [dataclasses.replace(make_batch(seed=i), rollout_id=i) for i in range(4)]
    first = trainer(**flags)
    try:
        first.train(batches[0])
        first.save(0)
        for batch in batches[1:3]:
            first.train(batch)
        first.save(2)
        reference = [tensor.clone() for tensor in first.copies["reference"].tensors]
        unbroken = first.train(batches[3])
    finally:
        first.close()
    second = trainer(**flags)
    try:
        assert "reference model of rollout 1" in caplog.text
        assert second.copies["reference"].iteration == 1 and not second.reference_is_policy
        assert all(torch.equal(a, b) for a, b in zip(reference, second.copies["reference"].tensors))
        resumed = second.train(batches[3])
    finally:
        second.close()
    assert resumed["train/kl_loss"] == unbroken["train/kl_loss"] != 0
    # where it was not updated yet, and where only the weights are taken, it is that of --ref-load
    for other in ({"ckpt_step": 0}, {"finetune": True, "save": None}):
        third = trainer(**{**flags, **other})
        try:
            assert third.copies["reference"].iteration is None
            assert not all(
                torch.equal(a, b) for a, b in zip(reference, third.copies["reference"].tensors)
            )
        finally:
            third.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_memory_for_moments_is_locked_before_they_exist(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.trainer.megatron.offload import Offloader

    locked: list[int] = []
    status = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: locked.append(nbytes) or 0,  # type: ignore[func-returns-value]
        cudaHostUnregister=lambda address: 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: status)
    # what else runs on this host is not what is tested
    monkeypatch.setattr("slime.processes.pinned_memory.free_host_memory", lambda: 64e9)
    backend = trainer(bf16=True)
    try:
        for seed in range(steps):
            backend.train(make_batch(seed=seed))
        offloader = Offloader(backend.model_chunks, backend.optimizer, pin=True)
        offloader.sleep(keep_weights=True)
        assert offloader._ahead is None  # the push comes first
        offloader.sleep()
        assert offloader._ahead is not None
        offloader._ahead._thread.join(30)
        whole = sum(p.numel() for p in backend.model_chunks[0].parameters())
        # weights (their buffer is padded), master weights and moments, which are not there yet
        # where steps is 0
        assert sum(locked) == pytest.approx(whole * (2 + 4 + 2 * 4), rel=0.01)
        offloader.wake()
        backend.train(make_batch(seed=1))
        before = len(locked)
        offloader.sleep()
        assert len(locked) == before  # all that was needed was there
        offloader.wake()
    finally:
        backend.close()


@pytest.mark.parametrize("keep_weights", [False, True])
def test_sleep_frees_the_memory_and_wake_restores_the_bits(keep_weights: bool) -> None:
    from slime.trainer.megatron.offload import Offloader

    backend = trainer(bf16=True)
    try:
        backend.train(make_batch(seed=0))
        offloader = Offloader(backend.model_chunks, backend.optimizer)
        before = [p.detach().clone() for p in backend.model_chunks[0].parameters()]
        for _ in range(2):
            freed = offloader.sleep(keep_weights=keep_weights)
            size = sum(p.numel() for p in before)
            assert freed >= size * (4 + 3 * 4)  # float32 gradients, master weights and two moments
            empty = [
                p.untyped_storage().nbytes() == 0 for p in backend.model_chunks[0].parameters()
            ]
            assert all(empty) is not keep_weights
            rest = offloader.sleep()  # a second sleep takes what the first one kept
            assert (rest > 0) is keep_weights and offloader.sleep() == 0
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
        assert all(
            torch.equal(a, b) for a, b in zip(after, undisturbed.model_chunks[0].parameters())
        )
    finally:
        undisturbed.close()
