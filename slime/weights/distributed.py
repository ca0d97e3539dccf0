"""Weights to engines anywhere by broadcast: NCCL between GPUs, gloo between CPUs.

trainer rank 0 ── HTTP: names, dtypes, shapes ──► every engine
               ── broadcast: one flat bucket ───► every engine process
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch

from slime.rollout.engines.api import EngineError
from slime.weights.buckets import Bucket, pack
from slime.weights.engine_fleet import EngineFleet, is_local
from slime.weights.process_group import ExternalGroup, address_towards
from slime.weights.transport import NamedTensors, Observer, Transferred, deadline_for

_JOIN_SECONDS = 120.0


class DistributedTransport:
    """Broadcast of flat buckets from this rank (0) to all engine processes.

    Args:
        fleet: the engines.
        buffer_size: bytes per bucket.
        dtype: of the engines' floating-point weights.
        backend: "nccl" or "gloo".
        ranks_per_engine: processes that hold weights, by engine; one each by default.
        timeout: seconds that NCCL or gloo itself waits for a member (``NCCL_TIMEOUT`` or the flag).
    Raises:
        EngineError: an engine did not join; names it and what it said.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        buffer_size: int,
        dtype: torch.dtype,
        backend: str = "gloo",
        ranks_per_engine: Sequence[int] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.name = f"{backend} broadcast"
        self._fleet, self._buffer_size, self._dtype, self._timeout = fleet, buffer_size, dtype, timeout
        # a fresh name per group: an engine that still knows a former one must not mix them up
        self._group_name = f"slime-{secrets.token_hex(4)}"
        ranks = list(ranks_per_engine or [1] * len(fleet.urls))
        world_size = 1 + sum(ranks)
        address = own_address(fleet.urls)
        store = ExternalGroup.open_store(address, world_size, _JOIN_SECONDS)
        joining = fleet.start(
            "/init_weights_update_group",
            lambda number: {
                "master_address": address,
                "master_port": store.port,
                "rank_offset": 1 + sum(ranks[:number]),
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": backend,
            },
            _JOIN_SECONDS,
        )
        try:
            self._group = ExternalGroup(store, address, self._group_name, backend, 0, world_size, _JOIN_SECONDS)
        except RuntimeError as error:
            fleet.wait(joining, _JOIN_SECONDS)  # an engine that refused says why; that is the better message
            raise EngineError(
                fleet.urls[0], f"trainer rank 0 waited {_JOIN_SECONDS:.0f} s for engines to join"
            ) from error
        fleet.wait(joining, _JOIN_SECONDS)

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        """While the engines load a bucket, the next one is gathered and packed, and this one fingerprinted."""
        num_tensors = nbytes = 0
        loading: Future[list[dict[str, Any]]] | None = None
        limit = 0.0
        for bucket in pack(tensors, self._buffer_size, self._dtype):
            if loading is not None:
                self._fleet.wait(loading, limit)
            limit = deadline_for(bucket.nbytes)
            request = _request(bucket, self._group_name, version)
            loading = self._fleet.start("/update_weights_from_distributed", request, limit)
            self._broadcast(bucket, loading, limit)
            for name, tensor in bucket.tensors():
                observe(name, tensor)
            num_tensors, nbytes = num_tensors + len(bucket.entries), nbytes + bucket.nbytes
        if loading is not None:
            self._fleet.wait(loading, limit)
        return Transferred(num_tensors, nbytes)

    def _broadcast(self, bucket: Bucket, answers: Future[list[dict[str, Any]]], limit: float) -> None:
        try:
            self._group.broadcast(bucket.buffer, min(limit, self._timeout))
        except RuntimeError as error:
            if answers.done():
                self._fleet.wait(answers, limit)  # raises what the engine said
            waiting = f"trainer rank 0 waited for {len(self._fleet.urls)} engine(s) to receive {bucket.nbytes} bytes"
            raise EngineError(", ".join(self._fleet.urls), f"{waiting}: {error}") from error

    def close(self) -> None:
        """Leave the group and let the engines leave it."""
        with contextlib.suppress(EngineError):  # an engine that is gone has left
            self._fleet.post("/destroy_weights_update_group", {"group_name": self._group_name}, timeout=10)
        self._group.close()


def _request(bucket: Bucket, group_name: str, version: int) -> dict[str, Any]:
    return {
        "names": [entry.name for entry in bucket.entries],
        "dtypes": [entry.dtype for entry in bucket.entries],
        "shapes": [list(entry.shape) for entry in bucket.entries],
        "group_name": group_name,
        "weight_version": str(version),
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def own_address(urls: tuple[str, ...]) -> str:
    """An address of this host that every engine can reach: loopback only if all engines are here."""
    if all(is_local(url) for url in urls):
        return "127.0.0.1"
    return address_towards(next(urlsplit(url).hostname or "" for url in urls if not is_local(url)))
