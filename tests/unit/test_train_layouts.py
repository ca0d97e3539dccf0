"""Every parallel layout gives the numbers of a single process: log-probs, metrics, gradients, updated weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_model import gradients, save_tiny
from torch import Tensor
from trainer_ranks import RankPool, make_batch, shard, trainer_config

from slime.samples.types import TrainBatch

LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "entropy_coef": 0.01, "optimizer": "sgd"}
MICRO_BATCHES = [[0, 1], [2, 3], [4], [5]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel 2": {"tensor_model_parallel_size": 2},
    "tensor and sequence parallel 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline parallel 2": {"pipeline_model_parallel_size": 2},
    "pipeline parallel 2 with virtual stages": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "data parallel 2": {},
    "data parallel 2, optimizer not sharded": {"use_distributed_optimizer": False},
}


def train_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Log-probs, gradients, metrics of two steps, and the weights after them as Hugging Face tensors."""
    from slime.train.megatron.backend import MegatronBackend
    from slime.weights.hf_io import iter_hf_tensors

    backend = MegatronBackend(trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info)
    backend.setup()
    batch = batches[backend.data_parallel_rank if len(batches) > 1 else 0]
    scores = backend.log_probs(batch)
    metrics = [backend.train(batch) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in iter_hf_tensors(backend.model_chunks, backend.hf_config)}
    grads = gradients(backend, batch) if info.world_size == 1 or len(batches) > 1 else {}
    return {
        "log_probs": scores,
        "metrics": [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics],
        "weights": weights,
        "has_output": backend.has_output,
        "reporting": backend.is_reporting_rank,
        "gradients": grads,
    }


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    model = save_tiny(request.param, directory)
    return directory, model


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[RankPool, RankPool]]:
    both = RankPool(1), RankPool(2)
    yield both
    for pool in both:
        pool.close()


@pytest.fixture(scope="module")
def single(checkpoint: tuple[Path, Any], pools: tuple[RankPool, RankPool]) -> dict[str, Any]:
    return pools[0].run(train_job, flags_for(checkpoint), [make_batch(MICRO_BATCHES)])[0]


def flags_for(checkpoint: tuple[Path, Any], **layout: Any) -> dict[str, Any]:
    return {**LOSS, **layout, "hf_checkpoint": str(checkpoint[0]), "lr": 0.02, "clip_grad": 0.5}


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_same_numbers(
    name: str, checkpoint: tuple[Path, Any], pools: tuple[RankPool, RankPool], single: dict[str, Any]
) -> None:
    batch = make_batch(MICRO_BATCHES)
    if name.startswith("data"):  # rank 0 ends with an empty micro-batch
        batches = [shard(batch, [4, 0], [[0], [1], []]), shard(batch, [1, 3, 5, 2], [[0, 1], [2], [3]])]
    else:
        batches = [batch]
    results = pools[1].run(train_job, flags_for(checkpoint, **LAYOUTS[name]), batches)
    assert sum(result["reporting"] for result in results) == 1
    for result in results:
        for parameter, value in single["weights"].items():
            assert close(result["weights"][parameter], value, 1e-5), parameter
        if not result["has_output"]:
            assert result["log_probs"] is None
            continue
        for ours, theirs in zip(result["metrics"], single["metrics"]):
            for key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-5), key
        if len(batches) == 1:
            assert all(close(a, b, 1e-5) for a, b in zip(result["log_probs"], single["log_probs"]))


def test_the_weights_moved(checkpoint: tuple[Path, Any], single: dict[str, Any]) -> None:
    """Otherwise the comparison above would prove little."""
    before = checkpoint[1].state_dict()
    moved = [
        ((value - before[name]).norm() / before[name].norm()).item()
        for name, value in single["weights"].items()
        if before[name].dim() > 1
    ]
    assert max(moved) > 1e-3


def test_a_rank_with_nothing_to_train_takes_part(
    pools: tuple[RankPool, RankPool], checkpoint: tuple[Path, Any]
) -> None:
    batch = make_batch(MICRO_BATCHES)
    batches = [shard(batch, range(6), MICRO_BATCHES), shard(batch, [], [[], [], [], []])]
    flags = {**flags_for(checkpoint), "normalize_advantages": True}
    with_idle = pools[1].run(train_job, flags, batches)
    alone = pools[0].run(train_job, flags, [batch])[0]
    for parameter, value in alone["weights"].items():
        for result in with_idle:
            assert close(result["weights"][parameter], value, 1e-5), parameter


def test_layouts_that_do_not_fit_are_refused_by_number(
    checkpoint: tuple[Path, Any], pools: tuple[RankPool, RankPool]
) -> None:
    from slime.errors import UserError
    from slime.train.megatron.model import check_layout
    from slime.weights.convert import family_of

    spec = family_of(checkpoint[0]).model_spec(checkpoint[0]).padded(1)
    config = trainer_config(actor_num_gpus_per_node=3, tensor_model_parallel_size=3, rollout_batch_size=6)
    with pytest.raises(UserError, match="3") as caught:
        check_layout(spec, config)
    assert "attention heads" in caught.value.why and "4" in caught.value.why


@pytest.mark.parametrize(("per_stage", "expected"), [(1, 2), (2, None)])
def test_virtual_stages_by_layers(checkpoint: tuple[Path, Any], per_stage: int, expected: int | None) -> None:
    from slime.errors import UserError
    from slime.train.megatron.model import virtual_stages
    from slime.weights.convert import family_of

    def stages(num_layers: int) -> int | None:
        spec = family_of(checkpoint[0]).model_spec(checkpoint[0])
        facts = {**spec.transformer, "num_layers": num_layers}
        return virtual_stages(dataclasses.replace(spec, transformer=facts), config)

    layout = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2, "rollout_batch_size": 6}
    config = trainer_config(**layout, num_layers_per_virtual_pipeline_stage=per_stage)
    assert stages(4) == expected, "one chunk per rank is no interleaving"
    if per_stage == 2:
        with pytest.raises(UserError, match="2 does not fit") as caught:
            stages(6)
        assert "6 / 2 = 3 layers" in caught.value.why


def test_every_gradient_tensor_of_data_parallelism(
    checkpoint: tuple[Path, Any], pools: tuple[RankPool, RankPool]
) -> None:
    batch = make_batch(MICRO_BATCHES)
    batches = [shard(batch, [4, 0, 2], [[0], [1, 2]]), shard(batch, [1, 3, 5], [[0, 1], [2]])]
    flags = flags_for(checkpoint, use_distributed_optimizer=False)
    single = pools[0].run(train_job, flags, [batch])[0]["gradients"]
    for result in pools[1].run(train_job, flags, batches):
        for name, gradient in result["gradients"].items():
            scale = single[name].abs().max().clamp(min=1e-3)
            assert ((gradient - single[name]).abs().max() / scale).item() < 1e-4, name
            assert torch.isfinite(gradient).all()
