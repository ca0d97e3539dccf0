"""This rank's place among the trainer's ranks, and their collective operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.processes.json_collectives import all_gather, all_gather_tensors, gather_tensors


@dataclass(frozen=True)
class Ranks:
    """This rank's place. Every method is collective: all ranks must call it.

    Attributes:
        device: this rank's.
        replicas: the ranks that hold the same part of the model and train on other samples. They
            exclude the other ranks of a context-parallel group, which see the same samples and
            compute the same loss.
        has_output: whether this rank holds the output layer, and so computes log-probs and loss.
        speaks_for_shard: whether this rank's numbers are written to files; of the ranks that train
            on the same samples (tensor- and context-parallel peers, pipeline stages), one does.
        is_reporting: whether this is the one rank whose metrics are logged.
    """

    device: torch.device
    replicas: dist.ProcessGroup
    has_output: bool
    speaks_for_shard: bool
    is_reporting: bool

    @property
    def replica(self) -> int:
        """The data-parallel rank."""
        return dist.get_rank(self.replicas)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel ranks, in place."""
        if dist.get_world_size(self.replicas) > 1:
            dist.all_reduce(values, group=self.replicas)
        return values

    def max_over_replicas(self, values: Tensor) -> Tensor:
        """Take the maximum over the data-parallel ranks, in place."""
        if dist.get_world_size(self.replicas) > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.replicas)
        return values

    def max_over_all(self, values: Tensor) -> Tensor:
        """Take the maximum over all ranks, in place."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def any_of_all(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank of the world."""
        return bool(self.max_over_all(torch.tensor([float(flag)], device=self.device)).item() > 0)

    def union(self, values: list[Any]) -> list[Any]:
        """Return the values (text or numbers) of all ranks, sorted, without duplicates."""
        return sorted({value for part in all_gather(values) for value in part})

    def of_reporting(self, value: Any) -> Any:
        """Return the value of the reporting rank: plain containers and tensors."""
        found = all_gather_tensors(value if self.is_reporting else None)
        return next(one for one in found if one is not None)

    def merged(self, parts: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return the entries of all ranks together."""
        own = {key: torch.from_numpy(values) for key, values in parts.items()}
        found = all_gather_tensors(own)
        return {key: values.numpy() for part in found for key, values in part.items()}

    def on_first(self, value: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """Return all ranks' values in rank order on rank 0, which writes files; None on others.

        Args:
            value: plain containers and tensors.
        """
        gathered = gather_tensors(value)
        return None if gathered is None else [found for found in gathered if found is not None]
