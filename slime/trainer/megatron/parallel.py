"""Process groups of the trainer and this rank's position in them."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.checkpoints.random_state import random_state, seed_generators, set_random_state
from slime.config.config import Config
from slime.engines.wire.process_group import listening_store
from slime.errors import UserError
from slime.samples.batch import TrainLayout
from slime.trainer.megatron import device
from slime.trainer.megatron.context import ContextGroup
from slime.trainer.ranks import Ranks


@dataclass(frozen=True)
class RankInfo:
    """The position of a trainer process among all; the code that starts the processes builds it.

    Attributes:
        rank, world_size: over all hosts.
        local_rank: index of the process's GPU on its host.
        master_addr, master_port: address at which rank 0 listens for the rendezvous.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def initialise(rank_info: RankInfo, config: Config, virtual_stages: int | None = None) -> Ranks:
    """Join the process group, create Megatron's groups for the layout in ``config``, and seed the
    random generators.

    Collectives of all these groups time out after ``--distributed-timeout-minutes``.

    Args:
        virtual_stages: model chunks per pipeline rank; None without interleaving.
    Returns:
        This rank's position, with helpers for collectives.
    Raises:
        UserError: the world size is not a multiple of tensor × pipeline × context parallel sizes.
    """
    chosen = device.select_gpu(rank_info.local_rank)
    megatron = config.megatron
    tensor = megatron.tensor_model_parallel_size
    pipeline = megatron.pipeline_model_parallel_size
    model_parallel = tensor * pipeline * megatron.context_parallel_size
    if rank_info.world_size % model_parallel:
        raise UserError(
            f"{rank_info.world_size} trainer ranks cannot hold this layout",
            why=f"tensor {tensor} × pipeline {pipeline} × context "
            f"{megatron.context_parallel_size} = {model_parallel} ranks hold one copy of the "
            f"model, and {rank_info.world_size} is no multiple of it",
            fix="change --actor-num-nodes × --actor-num-gpus-per-node, or the parallel sizes",
        )
    if rank_info.master_addr.startswith("127."):
        # Megatron also creates gloo groups, which would look up a host name that may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(minutes=config.cluster.distributed_timeout_minutes)
    dist.init_process_group(
        device.communication_backend(),
        store=_store(rank_info, timeout),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
    )
    return _create_groups(config, virtual_stages, chosen)


def _create_groups(config: Config, virtual_stages: int | None, chosen: torch.device) -> Ranks:
    """Create Megatron's groups for a layout, and seed the random generators for this rank."""
    megatron = config.megatron
    minutes = config.cluster.distributed_timeout_minutes
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        distributed_timeout_minutes=minutes,
    )
    for group in parallel_state._global_process_group_list or ():
        # Megatron creates one of the gloo groups with torch's default timeout
        if group is not None and dist.get_backend(group) == "gloo":
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=minutes), group)
    seed_generators(config.train.seed)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    is_first = is_last and parallel_state.get_tensor_model_parallel_rank() == 0
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return Ranks(
        device=chosen,
        replicas=parallel_state.get_data_parallel_group(),
        has_output=is_last,
        speaks_for_shard=is_first and parallel_state.get_context_parallel_rank() == 0,
        is_reporting=is_first and data_rank == 0,
    )


class SecondLayout:
    """Another layout over the same ranks: Megatron's groups and the random generators of a model
    that takes turns with the first one. Collective.

    Megatron finds its groups in the variables of one module, so `active` exchanges those.

    Args:
        config: with the parallel sizes of this layout, which must fit the ranks.
        virtual_stages: as for `initialise`, which comes first.

    Attributes:
        ranks: this rank's place in this layout.
    """

    def __init__(self, config: Config, virtual_stages: int | None, device: torch.device) -> None:
        self._groups: dict[str, Any] = {name: {} if name in _TABLES else None for name in _GROUPS}
        self._random = random_state()
        self._is_active = False
        with self.active():
            self.ranks = _create_groups(config, virtual_stages, device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let Megatron use these groups and generators inside the block; blocks can be nested."""
        if self._is_active:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        others = {name: getattr(parallel_state, name) for name in _GROUPS}
        vars(parallel_state).update(self._groups)
        self._groups = others
        own = self._random
        self._random = random_state()
        set_random_state([own])
        self._is_active = not self._is_active


#: The variables in which Megatron keeps the groups of the current layout, and those that are dicts.
_GROUPS = [
    name for name in vars(parallel_state) if re.match("_[A-Z]|_global_process_group_list$", name)
]
_TABLES = [name for name in _GROUPS if isinstance(getattr(parallel_state, name), dict)]


def _store(info: RankInfo, timeout: datetime.timedelta) -> dist.Store:
    """Return the rendezvous store. Rank 0 serves it, or torchrun if it started the ranks."""
    address = info.master_addr
    port = info.master_port
    if info.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(address, port, info.world_size, is_master=False, timeout=timeout)
    else:
        store = listening_store(address, port, info.world_size, timeout.total_seconds())
    return dist.PrefixStore("default_pg", store)


def shut_down() -> None:
    """Leave all groups; a process may `initialise` again afterwards, even with another layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def train_layout(config: Config) -> TrainLayout:
    """Return the part of the layout that packing needs."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    # Megatron's interleaved schedule processes groups of micro-batches and fails for an incomplete
    # group
    group = config.megatron.transformer.get("microbatch_group_size_per_vp_stage")
    multiple = group or config.megatron.pipeline_model_parallel_size
    return TrainLayout(
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        micro_batch_multiple=multiple if virtual else 1,
    )


def context_group() -> ContextGroup:
    """Return the context-parallel group of this rank, whose ranks share each micro-batch."""
    group = parallel_state.get_context_parallel_group()
    return ContextGroup(group.rank(), group.size(), group)
