"""The processes that stand for trainer ranks in tests start as forks and sleep between jobs."""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_ranks import Pools, trainer_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU forbids forks")


def join_job(info: Any) -> int:
    from slime.trainer.megatron.parallel import initialise

    initialise(info, trainer_config(actor_num_gpus_per_node=info.world_size))
    return os.getpid()


@pytest.mark.skipif(os.environ["OMP_NUM_THREADS"] != "1", reason="OpenMP's threads forbid forks")
def test_ranks_are_forks_of_pytest(ranks: Pools) -> None:
    """A new Python would import for 7 CPU seconds. It is needed if a module starts a thread while
    tests are collected."""
    ranks.run(1, join_job)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    command = Path(f"/proc/{server._forkserver_pid}/cmdline").read_bytes()
    assert command == Path("/proc/self/cmdline").read_bytes()


def test_no_event_loop_runs_between_jobs(ranks: Pools) -> None:
    for pid in ranks.run(2, join_job):
        threads = [file.read_text().strip() for file in Path(f"/proc/{pid}/task").glob("*/comm")]
        assert not any("gloo" in name for name in threads), threads
