"""Push weights to engines on any host by broadcast: NCCL between GPUs, gloo between CPUs.

    source rank of a stage ── HTTP: names, dtypes, shapes ──► every engine
                           ── broadcast: one flat bucket ───► every engine process

Each pipeline stage has a source rank and a process group of this rank and all engine processes.
While one bucket is sent and loaded, the next is gathered and packed. A buffer is reused only after
all engines have loaded its bucket.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from slime import deadlines
from slime.engines.api import ONLY_THE_POLICY, EngineError
from slime.engines.fleet import EngineFleet, is_local
from slime.engines.wire.buckets import Bucket, BufferPair, Packing, own_device
from slime.engines.wire.process_group import ExternalGroup, address_towards
from slime.weights.transport import NamedTensors, Observer, Transferred, Transport, deadline_for


@dataclass(frozen=True)
class _Sending:
    """A bucket in flight.

    Attributes:
        arrival: done when the broadcast is; answers: of the engines, after loading.
        limit: seconds for both.
    """

    nbytes: int
    arrival: Future[None]
    answers: Future[list[dict[str, Any]]]
    limit: float


@dataclass(eq=False)
class DistributedTransport(Transport):
    """Broadcast of flat buckets from this rank to all engine processes.

    Args:
        fleet: the engines.
        packing: of the buckets; two are held from the first push on.
        backend: "nccl" or "gloo".
        ranks_per_engine: processes that hold weights, by engine; one each by default.
        timeout: seconds to wait for a member (``NCCL_TIMEOUT`` or the flag), in addition to the
            time for the bytes.
        stage: pipeline stage of this rank, part of the group's name.
        await_turn: called when the first bucket is packed; returns when it may be sent.
    Raises:
        EngineError: an engine did not join; has its name and answer.
    """

    fleet: EngineFleet
    packing: Packing
    backend: str
    ranks_per_engine: Sequence[int] | None
    timeout: float
    stage: int = 0
    await_turn: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.name = f"{self.backend} broadcast"
        self._ranks = list(self.ranks_per_engine or [1] * len(self.fleet.urls))
        device = own_device() if self.backend == "nccl" else torch.device("cpu")
        self._buffers = BufferPair(self.packing.limit, device)
        self._sending: _Sending | None = None
        self._group: ExternalGroup | None = None
        self._is_broken = False
        self._join()

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        """Broadcast all tensors. After a failed push, first replace the group."""
        num_tensors = nbytes = 0
        self._buffers.rewind()
        try:
            for bucket in self.packing.buckets(tensors, self._allocate):
                if num_tensors == 0:
                    self.await_turn()
                    if self._is_broken:
                        self._leave()
                        self._join()
                num_tensors += len(bucket.entries)
                nbytes += bucket.nbytes
                self._finish()
                self._start(bucket, version)
                for name, tensor in bucket.tensors:
                    observe(name, tensor)
            self._finish()
        except Exception:
            if num_tensors:
                self._give_up()
            raise
        return Transferred(num_tensors, nbytes)

    def close(self) -> None:
        """Leave the group, and make the engines leave it."""
        self._leave()
        self._buffers.drop()

    # -- inside ------------------------------------------------------------------------------------

    def _join(self) -> None:
        # a new name per group: an engine may still have an earlier one
        name = f"slime-{secrets.token_hex(4)}-pp_{self.stage}"
        world_size = 1 + sum(self._ranks)
        address = own_address(self.fleet.urls)
        store = ExternalGroup.open_store(address, world_size, deadlines.DISTRIBUTED_JOIN)
        joining = self.fleet.start(
            "/init_weights_update_group",
            lambda number: {
                "master_address": address,
                "master_port": store.port,
                "rank_offset": 1 + sum(self._ranks[:number]),
                "world_size": world_size,
                "group_name": name,
                "backend": self.backend,
            },
            deadlines.DISTRIBUTED_JOIN,
        )
        try:
            self._group = ExternalGroup(
                store, address, name, self.backend, 0, world_size, deadlines.DISTRIBUTED_JOIN
            )
        except RuntimeError as error:
            # if an engine refused, this raises its reason, which is the better message
            self.fleet.wait(joining, deadlines.DISTRIBUTED_JOIN)
            raise EngineError(
                self._engines,
                f"{self._who} waited {deadlines.DISTRIBUTED_JOIN:.0f} s for them to join",
            ) from error
        self.fleet.wait(joining, deadlines.DISTRIBUTED_JOIN)
        self._is_broken = False

    def _leave(self) -> None:
        if self._group is None:
            return
        body = {"group_name": self._group.name}
        leaving = self.fleet.start(
            "/destroy_weights_update_group", body, deadlines.DISTRIBUTED_LEAVE
        )
        # at the same time as the engines: NCCL members on one host wait for one another
        self._group.close(deadlines.DISTRIBUTED_LEAVE)
        with contextlib.suppress(EngineError):  # a dead engine has left
            self.fleet.wait(leaving, deadlines.DISTRIBUTED_LEAVE)
        self._group = None

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return the start of the buffer that is not in flight."""
        self._buffers.advance()
        return self._buffers.current(nbytes)

    def _start(self, bucket: Bucket, version: int) -> None:
        assert self._group is not None
        limit = deadline_for(bucket.nbytes, self.timeout)
        request = _request(bucket, self._group.name, version)
        answers = self.fleet.start(
            "/update_weights_from_distributed", request, limit, deadlines.DISTRIBUTED_GRACE
        )
        self._sending = _Sending(
            bucket.nbytes, self._group.start_broadcast(bucket.buffer, limit), answers, limit
        )

    def _finish(self) -> None:
        """Wait until all engines have loaded the bucket in flight; raise the first failure."""
        if self._sending is None:
            return
        sending = self._sending
        self._sending = None
        both: list[Future[Any]] = [sending.arrival, sending.answers]
        # longer than the requests' limit, because their errors are more precise
        wait(both, sending.limit + deadlines.DISTRIBUTED_GRACE, return_when=FIRST_EXCEPTION)
        problem = sending.arrival.exception() if sending.arrival.done() else None
        if problem is not None:
            wait([sending.answers], 2 * deadlines.DISTRIBUTED_GRACE)
        if sending.answers.done():
            sending.answers.result()  # raises an engine's error
        if problem is not None or not sending.arrival.done():
            what = f"{self._who} waited for them to receive {sending.nbytes} bytes"
            raise EngineError(
                self._engines, f"{what}: {problem or 'not done in time'}"
            ) from problem
        sending.answers.result(deadlines.DISTRIBUTED_GRACE)

    def _give_up(self) -> None:
        """Abort the group: its members may be in different broadcasts."""
        self._sending = None
        self._is_broken = True
        if self._group is not None:
            self._group.abort()

    @property
    def _engines(self) -> str:
        return ", ".join(self.fleet.urls)

    @property
    def _who(self) -> str:
        return f"the source rank of pipeline stage {self.stage}"


def _request(bucket: Bucket, group_name: str, version: int) -> dict[str, Any]:
    return {
        "names": [entry.name for entry in bucket.entries],
        "dtypes": [entry.dtype for entry in bucket.entries],
        "shapes": [list(entry.shape) for entry in bucket.entries],
        "group_name": group_name,
        "weight_version": str(version),
        "load_format": "flattened_bucket",
        "flush_cache": False,
        **ONLY_THE_POLICY,
    }


def own_address(urls: tuple[str, ...]) -> str:
    """Return an address of this host that every engine can reach: loopback only if all engines are
    on this host."""
    if all(is_local(url) for url in urls):
        return "127.0.0.1"
    return address_towards(next(urlsplit(url).hostname or "" for url in urls if not is_local(url)))
