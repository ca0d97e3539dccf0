"""What one rank computes on a batch, for comparison with a single process, and the flags of the
layouts compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.samples.batch import TrainBatch
from tests.support.trainer_ranks import trainer_config
from tests.support.trainers import gathered_gradients, whole_gradients

TEMPERATURE = 0.8
TOLERANCE = 1e-5
LOSS: dict[str, Any] = {
    "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "entropy_coef": 0.01,
    "optimizer": "sgd", "lr": 0.3, "clip_grad": 0.5, "rollout_temperature": TEMPERATURE,
    "rollout_batch_size": 12,
}  # fmt: skip
MICRO_BATCHES = [[0, 1, 2], [3, 4, 5]]
#: For pipelines, whose schedules treat the first and last micro-batches alike.
PIPELINED = [[0, 1], [2, 3], [4], [5]]
DATA_PARALLEL = {
    1: [(range(6), MICRO_BATCHES)],
    # rank 0 ends with an empty micro-batch
    2: [([4, 0], [[0, 1], []]), ([1, 3, 5, 2], [[0, 1], [2, 3]])],
    4: [([4, 0], [[0], [1]]), ([1], [[0], []]), ([3, 5], [[0, 1], []]), ([2], [[], [0]])],
}

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2 = {"context_parallel_size": 2}
ETP1, SP = {"expert_tensor_parallel_size": 1}, {"sequence_parallel": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
VIRTUAL = {"num_virtual_stages_per_pipeline_rank": 2}


def parity_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Everything that is compared, on one rank; tensors that are trained by their Hugging Face
    names."""
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.weights.source import ModelSource

    backend = MegatronBackend(
        trainer_config(**LOSS, **flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    batch = batches[backend.data_parallel_rank]

    def named() -> dict[str, Tensor]:
        source = ModelSource(backend.model_chunks, backend.hf_config, adapters=backend.adapters)
        return {name: tensor.clone() for name, tensor in source.tensors()}

    log_probs, entropies = _scores(backend, batch)
    gradients: dict[str, Tensor] = {}
    apply = backend.optim_step

    def optim_step(*args: Any, **kwargs: Any) -> Any:
        gradients.update(gradients or gathered_gradients(backend, named))  # of the first step
        return apply(*args, **kwargs)

    backend.optim_step = optim_step
    metrics = [backend.train(batch) for _ in range(2)]
    return {
        "samples": batch.sample_indices,
        "log_probs": log_probs,
        "entropies": entropies,
        "gradients": gradients,
        "metrics": [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics],
        "weights": named(),
        "reporting": backend.is_reporting_rank,
    }


def gradients_in_double(
    info: Any, flags: dict[str, Any], batches: list[TrainBatch]
) -> dict[str, Tensor]:
    """The gradients of one rank with everything but A_log and the norms of gated delta nets in
    float64, where rounding hides no error."""
    from unittest.mock import patch

    from slime.trainer.megatron import model
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.weights.source import ModelSource

    arguments = model._trainer_arguments
    with (
        patch.object(model, "parameter_dtype", lambda config: torch.float64),
        patch.object(
            model,
            "_trainer_arguments",
            lambda *args: {**arguments(*args), "gradient_accumulation_fusion": False},
        ),
        patch.object(Tensor, "float", lambda self: self.to(torch.float64)),
    ):
        backend = MegatronBackend(
            trainer_config(
                **LOSS,
                **flags,
                accumulate_allreduce_grads_in_fp32=False,
                actor_num_gpus_per_node=info.world_size,
            ),
            info,
        )
        backend.setup()

        def named() -> dict[str, Tensor]:
            source = ModelSource(backend.model_chunks, backend.hf_config)
            return {name: tensor.clone() for name, tensor in source.tensors()}

        return whole_gradients(backend, batches[backend.data_parallel_rank], named)


def _scores(backend: Any, batch: TrainBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Per sample, as the training pass computes them; [] where there is no output layer."""
    from slime.trainer.megatron import forward

    packed = backend._pack(batch, batch.steps[0].micro_batches)
    scores = forward.score(backend.model_chunks, packed, temperature=TEMPERATURE, with_entropy=True)
    log_probs, entropies = {}, {}
    for micro_batch, score in zip(packed, scores):
        log_probs.update(zip(micro_batch.samples, micro_batch.split(score.log_probs)))
        entropies.update(zip(micro_batch.samples, micro_batch.split(score.entropy)))
    order = sorted(log_probs)
    return [log_probs[i] for i in order], [entropies[i] for i in order]


def worst(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()
