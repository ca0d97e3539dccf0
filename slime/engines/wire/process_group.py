"""A process group of one trainer rank and the engines, outside ``torch.distributed``'s default
group.

It must not change either side's default group, which has ranks of its own. So the backend object
is built directly on a store of its own. The chain of key prefixes is the one of
``torch.distributed``'s ``_new_process_group_helper``, by which SGLang builds its side, so that the
two sides find each other.

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
        # the master's store dies with its last reference, and the group with it
        self._store = store
        device = next(iter(BackendConfig(Backend(backend)).get_device_backend_map()))
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        limit = timedelta(seconds=timeout)
        self._group: Any
        options: Any
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # bound to the interface that leads to the trainer: gloo would ask for this host's name,
            # which may not resolve, or follow GLOO_SOCKET_IFNAME, which the trainer's own group may
            # have set to loopback
            options._devices = [gloo.create_device(hostname=address_towards(address))]
            options._timeout = limit
            self._group = gloo(prefixed, rank, world_size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            # NCCL's watchdog would end this process when a member is lost or late. Members are
            # engines here, and the death of one must be an error that says so.
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
        """An engine's side: connect to the trainer's store and become rank ``rank``. Blocks until
        all have joined.

        Raises:
            torch.distributed.DistError: the others did not come within ``timeout`` seconds.
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

        Returns at once: NCCL's first collective sets its communicator up and blocks without any
        limit until all members have come, so a thread calls it. On a GPU the transfer follows what
        the caller's stream has to do so far, and nothing that is queued there later waits for it.

        Returns:
            Done when the tensor has arrived, or may be written to again. A RuntimeError in it: not
            done within ``timeout`` seconds (gloo; for NCCL the caller has to watch the time), or a
            member is gone.
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
                        self._group.broadcast([tensor], options).wait()  # orders streams, no more
                        self._stream.synchronize()
            except Exception as error:  # raised where the future is waited for
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
            # gloo's own limit comes first and says more
            self.start_broadcast(tensor, timeout, source).result(
                timeout + (1 if self.backend == "gloo" else 0)
            )
        except FutureTimeout as error:
            self.abort()
            raise RuntimeError(
                f"{tensor.numel()} elements were not through after {timeout:.0f} s"
            ) from error

    def abort(self) -> None:
        """Abort the transfers in progress; afterwards the group can only be closed."""
        self._group.abort()

    def close(self, timeout: float = deadlines.PROCESS_GROUP_LEAVE) -> None:
        """Leave; the other members' collectives fail from then on.

        NCCL waits for the members on the same host to leave too: for ``timeout`` seconds, then they
        are left behind.
        """
        leaving = threading.Thread(
            target=self._group.shutdown, name="weight-group-leaves", daemon=True
        )
        leaving.start()
        leaving.join(timeout)


def listening_store(
    address: str, port: int, world_size: int, timeout: float, *, wait_for_workers: bool = True
) -> TCPStore:
    """The store at which a group's members meet, which nobody reaches but through ``address``.

    torch's own listens on every address of the host. It asks nobody who they are: whoever reaches
    it reads and writes all of its keys. So it must not be reachable from further away than its
    members are, and what members take from it must be plain data (numbers, JSON), never a pickle.

    Args:
        address: of this host, as the other members know it. A host name, which may stand for other
            addresses on other hosts, and an address that this host does not know to be its own
            (behind NAT) leave torch's way.
        port: 0 picks a free one.
        timeout: seconds that a member waits for a key, and for the others with
            ``wait_for_workers``.
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
    """Open a socket that listens on one address alone; None where that is not possible."""
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
                "%s is no address of this host: the store listens on all of them", address
            )
            return None
        raise
    return listener


def address_towards(host: str) -> str:
    """Return this host's address as ``host`` would see it; sends nothing, the routing table
    tells."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
