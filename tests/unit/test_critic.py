"""PPO's critic: the model, its steps, checkpoints and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.samples.batch import TrainBatch
from tests.support import parity
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import trainer

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 0.05}


def test_first_values_are_zero_and_the_advantages_those_without_a_critic() -> None:
    backend = trainer(**PPO)
    try:
        metrics = backend.train(make_batch())
        again = backend.train(make_batch())
    finally:
        backend.close()
    assert metrics["rollout/values"] == 0.0
    assert metrics["rollout/advantages"] == metrics["rollout/returns"]
    assert again["rollout/values"] != 0.0


# -- layouts ---------------------------------------------------------------------------------------

TRAINING: dict[str, Any] = {
    **PPO,
    "critic_lr": 0.02,
    "optimizer": "sgd",
    "lr": 0.1,
    "clip_grad": 0.5,
    "kl_coef": 0.1,
    "gamma": 0.9,
    "lambd": 0.8,
    "critic_lambd": 0.95,
    "normalize_advantages": True,
    "normalize_values": True,
    "rollout_batch_size": 12,
}
TP2, PP2, CP2, SP, VIRTUAL = parity.TP2, parity.PP2, parity.CP2, parity.SP, parity.VIRTUAL
LAYOUTS = [
    (2, 1, TP2 | SP),
    (2, 1, PP2 | VIRTUAL),
    (2, 1, CP2),
    (2, 2, {}),
    pytest.param(2, 1, TP2, marks=pytest.mark.full),
    pytest.param(2, 1, PP2, marks=pytest.mark.full),
    pytest.param(4, 1, TP2 | SP | CP2, marks=pytest.mark.full),
    pytest.param(4, 2, PP2, marks=pytest.mark.full),
    pytest.param(4, 1, TP2 | PP2, marks=pytest.mark.full),
]


def critic_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Three rollouts: values of each sample before each, and all metrics."""
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**TRAINING, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.critic is not None
    batch = batches[backend.data_parallel_rank]
    values = []
    metrics = []
    for _ in range(3):
        metrics.append(backend.train(batch))
        values.append(backend.critic.outputs(batch))
    return {
        "samples": batch.sample_indices,
        "values": values,
        "metrics": [
            {k: v for k, v in m.items() if k.startswith(("train/critic", "rollout/"))}
            for m in metrics
        ],
        "reporting": backend.is_reporting_rank,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("qwen3", directory)
    return directory


def batches_for(data_parallel: int) -> list[TrainBatch]:
    whole = make_batch(parity.MICRO_BATCHES)
    return [shard(whole, *plan) for plan in parity.DATA_PARALLEL[data_parallel]]


@pytest.mark.parametrize(("size", "data_parallel", "layout"), LAYOUTS)
def test_any_layout_trains_the_critic_of_one_process(
    size: int, data_parallel: int, layout: dict[str, Any], ranks: Pools, model: Path
) -> None:
    flags = {"hf_checkpoint": str(model)}
    [alone] = ranks.run(1, critic_job, flags, batches_for(1))
    found = ranks.run(size, critic_job, flags | layout, batches_for(data_parallel))
    expected = dict(zip(alone["samples"], zip(*alone["values"])))
    seen = set()
    for rank in found:
        if rank["values"][0] is None:
            continue
        for sample, values in zip(rank["samples"], zip(*rank["values"])):
            seen.add(sample)
            for ours, theirs in zip(values, expected[sample]):
                assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0)
    assert seen == expected.keys()
    [reporting] = [rank for rank in found if rank["reporting"]]
    for ours, theirs in zip(reporting["metrics"], alone["metrics"]):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    last = alone["metrics"][-1]
    assert last["train/critic-explained_variance"] > 0.05 and last["rollout/kl"] != 0.0
