"""A process group of one trainer rank and the engines, outside ``torch.distributed``'s default group.

Neither side's WORLD may notice it: the trainer's has its own ranks, a stock engine's too. So the backend object is
built directly on a store of its own. The chain of key prefixes is the one that engines get who build their side with
``torch.distributed``'s ``_new_process_group_helper``, as SGLang does, so that the two sides find each other.

    trainer: store = ExternalGroup.open_store(…); ExternalGroup(store, …, rank=0)
    engine:  ExternalGroup.join(address, port, …, rank=1)
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig


class ExternalGroup:
    """One member. `broadcast` is the only collective needed.

    Attributes:
        address: of the trainer that holds the store.
        rank, world_size: 0 is the trainer; engine i's processes follow from its ``rank_offset``.
        port: of the store, for the others to join.
    """

    def __init__(
        self, store: TCPStore, address: str, name: str, backend: str, rank: int, world_size: int, timeout: float
    ) -> None:
        self.address, self.name, self.backend, self.rank, self.world_size = address, name, backend, rank, world_size
        self.port = store.port
        self._store = store  # the master's store dies with its last reference, and the group with it
        device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        limit = timedelta(seconds=timeout)
        self._group: Any
        options: Any
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # bound to the interface that leads to the trainer: gloo would ask for this host's name, which may not
            # resolve, or follow GLOO_SOCKET_IFNAME, which the trainer's own group may have set to loopback
            options._devices = [gloo.create_device(hostname=address_towards(address))]
            options._timeout = limit
            self._group = gloo(prefixed, rank, world_size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)

    @staticmethod
    def open_store(address: str, world_size: int, timeout: float, port: int = 0) -> TCPStore:
        """The rendezvous that the trainer holds; port 0 picks a free one. Others can join as soon as it exists."""
        limit = timedelta(seconds=timeout)
        return TCPStore(address, port, world_size, is_master=True, timeout=limit, wait_for_workers=False)

    @staticmethod
    def join(
        address: str, port: int, name: str, backend: str, rank: int, world_size: int, timeout: float
    ) -> ExternalGroup:
        """An engine's side: connect to the trainer's store and become rank ``rank``. Blocks until all have joined.

        Raises:
            torch.distributed.DistError: the others did not come within ``timeout`` seconds.
        """
        limit = timedelta(seconds=timeout)
        store = TCPStore(address, port, world_size, is_master=False, timeout=limit, wait_for_workers=False)
        return ExternalGroup(store, address, name, backend, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor, timeout: float, source: int = 0) -> None:
        """Send (rank ``source``) or receive a tensor; returns when it is done.

        Raises:
            RuntimeError: not done within ``timeout`` seconds, or a member is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = timedelta(seconds=timeout)
        work = self._group.broadcast([tensor], options)
        work.wait(timedelta(seconds=timeout))
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()  # NCCL's wait only orders streams

    def close(self) -> None:
        """Leave; the other members' collectives fail from then on."""
        self._group.shutdown()


def address_towards(host: str) -> str:
    """This host's address as ``host`` would see it; sends nothing, the routing table tells."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
