"""What a trainer rank does in the tests of checkpoints and conversion: tiny models, real backend,
any layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from slime.models import family_of
from slime.processes.host import free_port
from slime.samples.batch import TrainBatch
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import random_hf
from tests.support.trainer_ranks import make_batch, trainer_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2+vpp2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}
#: That all of them can have, for `make_model`.
FOUR_LAYERS = {"num_hidden_layers": 4}


def make_model(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A Hugging Face directory with random weights whose logits are neither flat nor extreme."""
    shape = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 8,
    }
    rest = {"rope_theta": 1000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    config = config_of(family, **{**shape, **rest, **changes})
    spec = family_of(config).model_spec(config)
    tensors = {
        name: 0.2 * tensor for name, tensor in random_hf(family_of(config), spec, seed=5).items()
    }
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.add_(1.0)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def backend_of(info: Any, model: Path, **flags: Any) -> Any:
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(
        hf_checkpoint=str(model), actor_num_gpus_per_node=info.world_size, **flags
    )
    backend = MegatronBackend(config, info)
    backend.next_rollout_id = backend.setup()
    return backend


@contextmanager
def single(model: Path, **flags: Any) -> Iterator[Any]:
    """One trainer rank in this process."""
    from slime.trainer.megatron.backend import MegatronBackend  # noqa: F401  (prepares megatron for the CPU)
    from slime.trainer.megatron.parallel import RankInfo, shut_down

    try:
        yield backend_of(RankInfo(0, 1, 0, "127.0.0.1", free_port()), model, **flags)
    finally:
        shut_down()


def parameters(backend: Any) -> list[torch.Tensor]:
    return [
        parameter.detach().clone()
        for chunk in backend.model_chunks
        for parameter in chunk.parameters()
    ]


def fake_step(backend: Any, seed: int) -> None:
    """An optimizer step with gradients that depend on the parameters alone, not on the layout."""
    for chunk in backend.model_chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.sin(parameter.detach().float() * 1000 + seed))
    backend.optimizer.step()
    backend.scheduler.step(6)


def everything(directory: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, without the padding of the vocabulary."""
    target = scratch / f"{directory.parent.name}-{directory.name}.pt"
    dcp_to_torch_save(directory, target)
    loaded = torch.load(target, weights_only=False)
    return {
        key: value[:97]
        if key.endswith(("word_embeddings.weight", "output_layer.weight"))
        else value
        for key, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }


def exported(backend: Any) -> dict[str, torch.Tensor]:
    from slime.weights.source import ModelSource

    return {
        name: tensor.clone()
        for name, tensor in ModelSource(backend.model_chunks, backend.hf_config).tensors()
    }


# -- jobs of a pool of ranks -----------------------------------------------------------------------


def load_and_export(info: Any, model: Path, layout: str) -> dict[str, torch.Tensor]:
    return exported(backend_of(info, model, **LAYOUTS[layout]))


def export_directory(info: Any, model: Path, layout: str, target: Path) -> None:
    from slime.weights.source import save_hf

    backend = backend_of(info, model, **LAYOUTS[layout])
    save_hf(backend.model_chunks, backend.hf_config, target, assets_from=model)


def step_and_save(info: Any, model: Path, layout: str, root: Path) -> None:
    backend = backend_of(info, model, save=str(root), **LAYOUTS[layout])
    fake_step(backend, 1)
    backend.save(3, {"rank_0_said": layout})


def load_and_save(
    info: Any, model: Path, flags: dict[str, Any], source: Path, root: Path
) -> tuple[int, dict[str, Any]]:
    backend = backend_of(info, model, load=str(source), save=str(root), **flags)
    backend.save(4)
    return backend.next_rollout_id, backend.extra_state


def save_twice(info: Any, model: Path, root: Path) -> None:
    backend = backend_of(info, model, save=str(root))
    for rollout_id in range(2):
        backend.save(rollout_id)


def next_and_skipped(info: Any, model: Path, root: Path) -> tuple[int, list[str]]:
    """Go on in ``root``: the next rollout, and what is said of checkpoints that were skipped."""
    backend = backend_of(info, model, load=str(root), save=str(root))
    return backend.next_rollout_id, backend.skipped


Batches = list[list[TrainBatch]]
"""For each data-parallel rank one batch per rollout."""


def train_and_save(
    info: Any, model: Path, flags: dict[str, Any], batches: Batches, root: Path | None
) -> Any:
    """All rollouts but the last, then a checkpoint in ``root``; without ``root`` the last one, as
    `last_step`."""
    backend = backend_of(info, model, **flags, **({} if root is None else {"save": str(root)}))
    *earlier, last = batches[backend.data_parallel_rank]
    for batch in earlier:
        backend.train(batch)
    if root is None:
        return {"before": exported(backend), **_step(backend, last)}
    backend.save(earlier[-1].rollout_id)
    return None


def last_step(info: Any, model: Path, flags: dict[str, Any], batches: Batches) -> dict[str, Any]:
    """The step after what `train_and_save` saved: metrics, and the weights after it by their
    Hugging Face names."""
    backend = backend_of(info, model, **flags)
    last = batches[backend.data_parallel_rank][-1]
    assert backend.next_rollout_id == last.rollout_id
    return _step(backend, last)


def _step(backend: Any, batch: TrainBatch) -> dict[str, Any]:
    metrics = {
        name: value for name, value in backend.train(batch).items() if not name.startswith("perf/")
    }
    return {
        "metrics": metrics,
        "weights": exported(backend),
        "reporting": backend.is_reporting_rank,
    }


def alone(info: Any, job: Any, *args: Any) -> Any:
    """Run a job on the first rank as if it were the only one."""
    if info.rank == 0:
        return job(dataclasses.replace(info, world_size=1), *args)


def save_behind_training(info: Any, model: Path, root: Path) -> list[int]:
    """Save with rank 1's writer held until both ranks have trained on; what was visible then."""
    import threading

    import torch.distributed as dist

    from slime.checkpoints import sharded_store
    from slime.checkpoints.directory import saved_iterations

    opened, write = threading.Event(), sharded_store.FingerprintedFile.write

    def held(file: Any, data: Any) -> int:
        assert opened.wait(30)
        return write(file, data)

    if info.rank == 1:
        sharded_store.FingerprintedFile.write = held  # type: ignore[method-assign]
    try:
        backend = backend_of(info, model, save=str(root), async_save=True, **LAYOUTS["tp2"])
        backend.save(0)
        fake_step(backend, 1)
        dist.barrier()  # a collective of the training groups while the writers talk over theirs
        seen = saved_iterations(root)
        dist.barrier()
        opened.set()
        backend.save(1)
        backend.finish_saving()
        dist.barrier()
        return seen
    finally:
        sharded_store.FingerprintedFile.write = write  # type: ignore[method-assign]


def full_disk(info: Any, model: Path, root: Path, limit: int) -> str:
    """Save with files limited to ``limit`` bytes on rank 1 alone; the error text that this rank
    sees."""
    import resource

    from slime.errors import UserError

    backend = backend_of(info, model, save=str(root), **LAYOUTS["tp2"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if info.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        backend.save(9)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def push(info: Any, model: Path, layout: str, url: str) -> tuple[int, int]:
    from slime.weights.sync import WeightSync

    backend = backend_of(info, model, check_weight_update_equal=True, **LAYOUTS[layout])
    sync = WeightSync(
        backend.config, backend.model_chunks, backend.hf_config, rank=info.rank, world_size=2
    )
    sync.connect([url])
    receipt = sync.push()
    sync.close()
    return receipt.version, receipt.num_tensors


def canary(info: Any, model: Path, layout: dict[str, Any], tokens: list[int]) -> list[float] | None:
    return backend_of(info, model, **layout).canary_log_probs(tokens)


def failing_push(info: Any, model: Path, url: str) -> str:
    from slime.errors import UserError
    from slime.weights.sync import WeightSync

    backend = backend_of(info, model, **LAYOUTS["tp2"])
    sync = WeightSync(
        backend.config, backend.model_chunks, backend.hf_config, rank=info.rank, world_size=2
    )
    sync.connect([url])
    try:
        sync.push()
    except UserError as error:
        return str(error)
    finally:
        sync.close()
    return ""


def batch() -> Any:
    return make_batch()


def convert(info: Any, words: list[str]) -> None:
    """`slime convert` as torchrun would start it on this rank."""
    import os

    from slime.cli.convert import main

    place = {"RANK": info.rank, "WORLD_SIZE": info.world_size, "LOCAL_RANK": info.local_rank}
    address = {"MASTER_ADDR": info.master_addr, "MASTER_PORT": info.master_port}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in (place | address).items()})
    try:
        main(words)
    finally:
        os.environ.clear()
        os.environ.update(before)


def engine_weights(
    info: Any, model: Path, flags: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], ...]:
    """What the model exports while it has the weights of quantised engines, and afterwards."""
    backend = backend_of(info, model, **flags)
    with backend.engine_weights.swapped_in():
        inside = exported(backend)
    return inside, exported(backend)
