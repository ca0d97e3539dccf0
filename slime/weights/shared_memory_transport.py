"""Transport to engines on the same host through /dev/shm: one copy out of the model, one into each
engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch

from slime.engines.fleet import EngineFleet
from slime.engines.wire.buckets import Bucket, Packing
from slime.engines.wire.shared_memory import Segment, SegmentPool, remove_stale
from slime.weights.transport import NamedTensors, Observer, Transferred, Transport, deadline_for


class SharedMemoryTransport(Transport):
    """Packs buckets into two alternating shared segments, so packing overlaps the engines' copies.

    Args:
        fleet: engines on this host.
    """

    name = "shared memory"

    def __init__(self, fleet: EngineFleet, packing: Packing) -> None:
        remove_stale()
        self._fleet = fleet
        self._packing = packing
        self._pool = SegmentPool(count=2)
        # segment number → engines' answers
        self._reading: dict[int, tuple[Future[list[dict[str, Any]]], float]] = {}

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        num_tensors = nbytes = 0
        self._pool.rewind()  # nothing is read between pushes
        try:
            for bucket in self._packing.buckets(tensors, self._allocate):
                for name, tensor in bucket.tensors:
                    observe(name, tensor)
                limit = deadline_for(bucket.nbytes)
                body = _request(bucket, self._current, version)
                answers = self._fleet.start("/update_weights_from_tensor", body, limit)
                self._reading[self._number] = answers, limit
                num_tensors += len(bucket.entries)
                nbytes += bucket.nbytes
        finally:
            self._wait_for_all()
        return Transferred(num_tensors, nbytes)

    def close(self) -> None:
        self._pool.close()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._wait_for_readers(self._pool.turn)
        self._number, self._current = self._pool.take(nbytes)
        return self._current.tensor[:nbytes]

    def _wait_for_all(self) -> None:
        """Wait until no engine reads, whatever fails; then raise the first failure. An answer that
        is left would count for the segment's next reader."""
        failures: list[Exception] = []
        for number in sorted(self._reading):
            try:
                self._wait_for_readers(number)
            except Exception as error:  # raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def _wait_for_readers(self, number: int) -> None:
        if number in self._reading:
            answers, limit = self._reading.pop(number)
            self._fleet.wait(answers, limit)


def _request(bucket: Bucket, segment: Segment, version: int) -> dict[str, Any]:
    table = [entry.to_json() for entry in bucket.entries]
    return {
        "load_format": "shared_memory",
        "weight_version": str(version),
        "flush_cache": False,  # once for all buckets, by `WeightSync`
        "segments": [{"shm": segment.name, "nbytes": bucket.nbytes, "tensors": table}],
    }
