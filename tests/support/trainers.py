"""Trainer ranks that a test drives itself: opened, their gradients read, steps made."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.processes.host import free_port
from slime.samples.batch import TrainBatch
from slime.trainer import update
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.parallel import RankInfo
from slime.trainer.megatron.streamed import states_of
from tests.support.trainer_ranks import make_batch, shard, tiny_spec, trainer_config

LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.01}


def trainer(layers: int = 2, **flags: Any) -> MegatronBackend:
    """One rank in this process, with the model of ``hf_checkpoint``, or else a random one of
    `tiny_spec` with ``layers``."""
    backend = MegatronBackend(trainer_config(**flags), RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    try:
        backend.setup(
            **(
                {}
                if "hf_checkpoint" in flags
                else {"spec": tiny_spec(layers=layers), "initialise": True}
            )
        )
    except BaseException:
        backend.close()
        raise
    return backend


def poisoned(batch: TrainBatch, sample: int) -> TrainBatch:
    """The batch with a reward that is not a number."""
    rewards = list(batch.rewards)
    rewards[sample] = float("nan")
    bad = copy.copy(batch)
    bad.rewards = rewards
    return bad


def gradients(backend: MegatronBackend, batch: TrainBatch) -> dict[str, Tensor]:
    """Of the whole step, by parameter name; what the optimizer would get before clipping. Frozen
    ones have none."""
    data = update._initial_tensors(backend, batch)
    data.ref_log_probs = backend.log_probs(batch, "reference")
    update.compute_advantages(backend, batch, data)
    step = batch.steps[0]
    backend.forward_backward(
        batch, 0, lambda samples: update._loss_inputs(backend, batch, data, step, samples)
    )
    return {
        name: parameter.main_grad.clone()
        for chunk in backend.model_chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def whole_gradients(backend: Any, batch: TrainBatch, named: Any) -> dict[str, Tensor]:
    """What the optimizer would get before clipping, whole: shards of the distributed optimizer are
    put together, and the exporter turns them into Hugging Face tensors, standing in for the
    weights."""
    gradients(backend, batch)
    return gathered_gradients(backend, named)


def gathered_gradients(backend: Any, named: Any) -> dict[str, Tensor]:
    """`whole_gradients` of the pass that was made last."""
    chunks = backend.model_chunks
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            if not buffer.ddp_config.use_distributed_optimizer or group.size() == 1:
                continue
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        result = named()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    return result


def train_job(info: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Metrics of two steps and this rank's weights after them."""
    config = trainer_config(
        **{**LOSS, "lr": 0.02, "clip_grad": 0.5, **flags}, actor_num_gpus_per_node=info.world_size
    )
    backend = MegatronBackend(config, info)
    backend.setup(spec=tiny_spec(tie=False), initialise=True)
    whole = make_batch([[0, 1], [2, 3], [4], [5]])
    batch = whole
    if backend.layout.data_parallel_size == 2:
        mine = [[0, 1, 4], [2, 3, 5]][backend.data_parallel_rank]
        batch = shard(whole, mine, [[0, 1], [2]])
    metrics = [backend.train(batch) for _ in range(2)]
    return {
        "metrics": [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics],
        "weights": {
            n: p.detach().clone() for c in backend.model_chunks for n, p in c.named_parameters()
        },
        "on host": [
            states_of(o) is not None
            for p in backend.optimizer.chained_optimizers
            for o in [p.optimizer]
        ],
        "peaks": [name for name in metrics[0] if name.endswith("_peak_memory_gb")],
    }
