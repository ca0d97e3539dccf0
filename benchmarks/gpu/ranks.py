"""Trainer ranks as processes, for measurements that need a real one: random or loaded weights, no rollout."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
from collections.abc import Callable
from typing import Any

Job = Callable[..., Any]


def run(job: Job, world: int, config_flags: dict[str, Any], *arguments: Any) -> Any:
    """``job(backend, rank, *arguments)`` on every rank of a trainer; what rank 0 returns.

    Args:
        config_flags: of `make_config`; ``hf_checkpoint`` is loaded.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(job, rank, world, port, config_flags, results, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        while True:
            try:
                return results.get(timeout=5)
            except Exception as error:
                dead = [process.exitcode for process in processes if process.exitcode]
                if dead:
                    raise RuntimeError(f"a trainer rank ended with exit status {dead[0]}") from error
    finally:
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def _rank(
    job: Job, rank: int, world: int, port: int, flags: dict[str, Any], results: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    from slime.config import make_config
    from slime.train.megatron.backend import MegatronBackend  # first: it prepares a host without a GPU
    from slime.train.megatron.parallel import RankInfo

    config = make_config(**flags, actor_num_gpus_per_node=world, rollout_batch_size=world, num_rollout=1)
    backend = MegatronBackend(config, RankInfo(rank, world, rank, "127.0.0.1", port))
    backend.setup()
    answer = job(backend, rank, *arguments)
    if rank == 0:
        results.put(answer)
    backend.close()
