"""A process group of one trainer rank and the engines, outside ``torch.distributed``'s default
group.

It must not change either side's default group. So the backend object is built directly, on a
separate store. SGLang builds its side with ``torch.distributed``'s ``_new_process_group_helper``;
the same chain of key prefixes lets the two sides find each other.

    trainer: store = ExternalGroup.open_store(…); ExternalGroup(store, …, rank=0)
    engine:  ExternalGroup.join(address, port, …, rank=1)
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig

from slime import deadlines
from slime.log import get_logger
from slime.processes.host import environment_variable

logger = get_logger(__name__)


class ExternalGroup:
    """One member. `broadcast` is the only collective needed.

    Attributes:
        address: of the trainer that holds the store.
        rank, world_size: 0 is the trainer; engine i's processes follow from its ``rank_offset``.
        port: of the store, for the others to join.
    """

    def __init__(
        self,
        store: TCPStore,
        address: str,
        name: str,
        backend: str,
        rank: int,
        world_size: int,
        timeout: float,
    ) -> None:
        self.address = address
        self.name = name
        self.backend = backend
        self.rank = rank
        self.world_size = world_size
        self.port = store.port
        # keeps the master's store alive; the group needs it
        self._store = store
        device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        limit = timedelta(seconds=timeout)
        self._group: Any
        options: Any
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # bound to the interface towards the trainer: gloo's default is this host's name, which
            # may not resolve, or GLOO_SOCKET_IFNAME, which the trainer's own group may have set to
            # loopback
            options._devices = [gloo.create_device(hostname=address_towards(address))]
            options._timeout = limit
            self._group = gloo(prefixed, rank, world_size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            # NCCL's watchdog would end this process when a member is lost or late. Here a lost
            # engine must be reported as an error.
            with environment_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                self._group = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
            self._stream = torch.cuda.Stream()

    @staticmethod
    def open_store(address: str, world_size: int, timeout: float) -> TCPStore:
        """Open the rendezvous that the trainer holds, on a free port. Others can join at once."""
        return listening_store(address, 0, world_size, timeout, wait_for_workers=False)

    @staticmethod
    def join(
        address: str, port: int, name: str, backend: str, rank: int, world_size: int, timeout: float
    ) -> ExternalGroup:
        """Connect an engine to the trainer's store as rank ``rank``. Block until all have
        joined.

        Raises:
            torch.distributed.DistError: the others did not join within ``timeout`` seconds.
        """
        limit = timedelta(seconds=timeout)
        store = TCPStore(
            address, port, world_size, is_master=False, timeout=limit, wait_for_workers=False
        )
        return ExternalGroup(store, address, name, backend, rank, world_size, timeout)

    def start_broadcast(
        self, tensor: torch.Tensor, timeout: float, source: int = 0
    ) -> Future[None]:
        """Begin to send (rank ``source``) or receive a tensor; one at a time.

        Returns at once: a thread runs the transfer, because NCCL's first collective blocks without
        limit until all members have joined. On a GPU the transfer waits for the work already queued
        on the caller's stream; later work there does not wait for it.

        Returns:
            Done when the tensor has arrived, or may be overwritten. Holds a RuntimeError if that
            took more than ``timeout`` seconds (gloo only; for NCCL the caller must watch the time),
            or a member is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout)
        ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        done: Future[None] = Future()

        def transfer() -> None:
            try:
                if ready is None:
                    self._group.broadcast([tensor], options).wait(options.timeout)
                else:
                    with torch.cuda.stream(self._stream):
                        self._stream.wait_event(ready)
                        self._group.broadcast([tensor], options).wait()  # only orders streams
                        self._stream.synchronize()
            except Exception as error:  # re-raised by the future
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=transfer, name="weight-broadcast", daemon=True).start()
        return done

    def broadcast(self, tensor: torch.Tensor, timeout: float, source: int = 0) -> None:
        """`start_broadcast`, and wait for it.

        Raises:
            RuntimeError: not done within ``timeout`` seconds, or a member is gone.
        """
        try:
            # gloo's own limit comes first and has the better message
            self.start_broadcast(tensor, timeout, source).result(
                timeout + (1 if self.backend == "gloo" else 0)
            )
        except FutureTimeout as error:
            self.abort()
            raise RuntimeError(
                f"{tensor.numel()} elements were not transferred within {timeout:.0f} s"
            ) from error

    def abort(self) -> None:
        """Abort the transfers in progress; afterwards the group can only be closed."""
        self._group.abort()

    def close(self, timeout: float = deadlines.PROCESS_GROUP_LEAVE) -> None:
        """Leave; the other members' collectives fail from then on.

        NCCL waits until members on the same host have left too, here at most ``timeout`` seconds.
        """
        leaving = threading.Thread(
            target=self._group.shutdown, name="weight-group-leaves", daemon=True
        )
        leaving.start()
        leaving.join(timeout)


def listening_store(
    address: str, port: int, world_size: int, timeout: float, *, wait_for_workers: bool = True
) -> TCPStore:
    """Open a group's rendezvous store, reachable only through ``address``.

    By default, torch listens on every address of the host, without authentication: any client can
    read and write all keys. So the store must be reachable only by its members, and they must read
    only plain data from it (numbers, JSON), never a pickle.

    Args:
        address: of this host, as the other members know it. torch's default remains for a host
            name, which other hosts may resolve differently, and for an address unknown to this host
            (behind NAT).
        port: 0 picks a free one.
        timeout: seconds to wait for a key and, with ``wait_for_workers``, for the others.
    Raises:
        OSError: the port is taken.
    """
    listener = _listener(address, port)
    if listener is not None:
        port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=wait_for_workers,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )


def _listener(address: str, port: int) -> socket.socket | None:
    """Open a socket that listens on only one address; None if that is impossible."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:  # a name
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            logger.warning(
                "%s is not an address of this host: the store listens on all addresses", address
            )
            return None
        raise
    return listener


def address_towards(host: str) -> str:
    """Return this host's address as seen by ``host``, from the routing table; sends nothing."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
