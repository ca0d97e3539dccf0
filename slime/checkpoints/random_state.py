"""Random number generators of a trainer rank: seeding, saving and restoring them.

The trainer itself draws no random numbers while it trains: dropout is 0, and router jitter and
random routing are refused. Hooks may draw (a loss that samples, a model with dropout), and must get
the same numbers in a resumed run.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


def random_layout() -> dict[str, int]:
    """Return the layout to which random states belong: a rank can continue only with the state of
    the same place in the same layout."""
    from megatron.core import parallel_state as ps

    experts = ps.get_expert_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": ps.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": experts,
        # data-parallel replicas share a state, unless they hold different experts
        "data_parallel_size": ps.get_data_parallel_world_size(with_context_parallel=True)
        if experts > 1
        else 1,
    }


def sharded_random_state(state: dict[str, Any] | None) -> Any:
    """Return this rank's ``rng_state`` entry of a sharded state dict.

    Args:
        state: to save; None to load it.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    sizes = random_layout()
    shape = [sizes["pipeline_model_parallel_size"], sizes["tensor_model_parallel_size"]]
    place = [ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()]
    replica = ps.get_data_parallel_rank(with_context_parallel=True)
    if sizes["expert_model_parallel_size"] > 1:
        shape = [*shape, sizes["data_parallel_size"]]
        place = [*place, replica]
        replica = 0
    return ShardedObject("rng_state", [state], tuple(shape), tuple(place), replica_id=replica)


def random_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(states: list[dict[str, Any]]) -> None:
    from megatron.core import tensor_parallel

    state = states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def why_not_continued(saved_layout: dict[str, Any] | None) -> str | None:
    """Return why the random states of a checkpoint cannot be used in this layout; None if they can.

    Args:
        saved_layout: the `random_layout` at which they were saved, and ``has_rng_state``; None if
            it was not recorded.
    """
    if saved_layout is None:
        return "the checkpoint does not say at which layout its random states were saved"
    if not saved_layout["has_rng_state"]:
        return "the checkpoint was saved without random states"
    here = random_layout()
    there = {name: saved_layout.get(name, 1) for name in here}
    if here != there:
        return f"the random states were saved at {_described(there)} and this is {_described(here)}"
    return None


# -- seeding ---------------------------------------------------------------------------------------


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy, torch, and Megatron's tracker, which adds an offset for the rank.

    Args:
        seed: below 2³².
    """
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def seed_after(iteration: int, seed: int, because: str) -> None:
    """Seed the generators of a run that continues after ``iteration`` without a saved state. The
    seed differs from the run's first one, and is the same at each attempt."""
    seed_generators(seed_of(seed, iteration))
    if dist.get_rank() == 0:
        logger.info(
            "random numbers start anew from --seed %d and iteration %d: %s",
            seed,
            iteration,
            because,
        )


def seed_of(seed: int, iteration: int) -> int:
    """Derive a seed below 2³² from both. Their sum would not do: Megatron adds an offset for the
    rank, so that iterations would share numbers.

    Example:
        >>> seed_of(1234, 0) == seed_of(1234, 0), seed_of(1234, 0) == seed_of(1234, 1)
        (True, False)
    """
    return int(np.random.SeedSequence((seed, iteration)).generate_state(1)[0])


def _described(sizes: dict[str, int]) -> str:
    short = zip(("TP", "PP", "EP", "DP"), sizes.values(), strict=True)
    return " × ".join(f"{name} {size}" for name, size in short if size > 1) or "one rank"
