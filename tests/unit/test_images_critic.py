"""A critic of a model that sees images: its values, its layouts, and what of it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.models.images import ImageReader
from slime.samples.batch import TrainBatch
from tests.support.images import CLOSE, IMAGES, reference_logits, save_seeing
from tests.support.parity import CP2
from tests.support.seeing_samples import batch_of
from tests.support.trainer_ranks import Pools, trainer_config
from tests.support.trainers import trainer

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 0.01, **IMAGES}


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "gemma3"])
def test_values_are_outputs_of_transformers_layers(kind: str, tmp_path: Path) -> None:
    """A head that is a row of the output layer gives one of the logits."""
    model = save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), **PPO)
    try:
        assert backend.critic is not None and backend.critic.head is not None
        with torch.no_grad():
            backend.critic.head.weight.copy_(model.lm_head.weight[7:8])
        ours = backend.critic.outputs(batch)
    finally:
        backend.close()
    for tokens, media, values in zip(batch.tokens, batch.media, ours, strict=True):
        with torch.no_grad():
            logits = reference_logits(model, reader, tokens.tolist(), media)
        theirs = logits[-len(values) - 1 : -1, 7]
        assert (values - theirs).abs().max() <= max(1e-5, CLOSE.get(kind, 0.0)) * theirs.abs().max()


def job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> list[Tensor] | None:
    """Values after three rollouts."""
    from slime.trainer.megatron.backend import MegatronBackend

    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    assert backend.critic is not None
    for _ in range(3):
        backend.train(batches[backend.data_parallel_rank])
    return backend.critic.outputs(batches[backend.data_parallel_rank])


def test_another_layout_trains_the_adapters_of_one_process(tmp_path: Path, ranks: Pools) -> None:
    """A critic of whole layers is in test_critic.py, and images are in test_images_layouts.py."""
    save_seeing(tmp_path)
    batch = batch_of(ImageReader(tmp_path), [[0, 1, 2], [3, 4, 5]])
    flags = {"hf_checkpoint": str(tmp_path), **PPO, "lora_rank": 2}
    [expected] = ranks.run(1, job, flags, [batch])
    found = next(own for own in ranks.run(2, job, flags | CP2, [batch]) if own is not None)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("freeze", [False, True])
def test_its_tower_is_frozen_as_the_policys(freeze: bool, tmp_path: Path) -> None:
    save_seeing(tmp_path / "hf")
    batch = batch_of(ImageReader(tmp_path / "hf"), [[0, 1, 2], [3, 4, 5]])
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), freeze_vision_tower=freeze, **PPO)
    try:
        assert backend.critic is not None
        name = "vision_model.blocks.0.attn.qkv.weight"
        weight = dict(backend.critic.chunks[0].module.named_parameters())[name]
        before = weight.detach().clone()
        for _ in range(2):  # the head starts from 0, and sends no gradient back at first
            backend.train(batch)
        assert torch.equal(before, weight) == freeze
    finally:
        backend.close()
