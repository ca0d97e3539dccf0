"""Transport to engines on the trainer's GPUs: they read each rank's flat bucket through a handle.

    trainer rank r, GPU r   gather ─► pack into buffer 0 or 1 ─► handle ─┐
    rank 0                  POST to every engine: for each of its ranks, the handle from its GPU
    engine rank, GPU r      open the handle, load from it in place, close it

Only handles leave a GPU. Stock SGLang reads them as ``serialized_named_tensors`` in the format
``flattened_bucket``: a pickle of one uint8 tensor (a CUDA IPC handle; on hosts without GPUs a file
in shared memory) and a table. Runs of experts need its hook for custom loaders
(`slime.engines.sglang.weight_loader`). While engines load one bucket, the next is gathered and
packed; a buffer is reused only after every engine has answered for it.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from slime.engines.api import ONLY_THE_POLICY, WEIGHT_LOADER
from slime.engines.fleet import EngineFleet
from slime.engines.wire.buckets import (
    Bucket,
    BufferPair,
    Packing,
    TensorEntry,
    dtype_of,
    own_device,
)
from slime.errors import UserError
from slime.weights.transport import (
    EngineSlots,
    NamedTensors,
    Observer,
    Transferred,
    Transport,
    deadline_for,
)

_DEVICE_ARGUMENT = 6  # of `reductions.rebuild_cuda_tensor`


@dataclass(eq=False)
class IpcTransport(Transport):
    """One trainer rank's side; `send` on rank 0 and `follow` on the others, at the same time.

    Args:
        fleet: the engines; rank 0 only.
        engines: their slots; slot s is the GPU of trainer rank s.
        group: gloo group of all trainer ranks; None for a single rank.
        packing: of the buckets; two are held during a push.
        in_runs: experts are sent in runs, which only slime's loader inside the engines understands.
    Raises:
        UserError: an engine is on a GPU without a trainer rank, or this process's memory cannot be
            shared.
    """

    name = "IPC handles"

    fleet: EngineFleet | None
    engines: Sequence[EngineSlots]
    group: dist.ProcessGroup | None
    packing: Packing
    in_runs: bool = False

    def __post_init__(self) -> None:
        device = own_device()
        # a host's buffer is copied as a whole into shared memory when its handle is made
        self._buffers = BufferPair(self.packing.limit if device.type == "cuda" else 0, device)
        # buffer number → engines' answers
        self._reading: dict[int, tuple[Future[list[dict[str, Any]]], float]] = {}
        self._failure: BaseException | None = None
        _check_sharing(self.engines, self.group.size() if self.group is not None else 1)

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        """Send all tensors. A failure is raised only at the end, because the other ranks are in the
        loop's collectives."""
        assert self.fleet is not None
        num_tensors = nbytes = 0
        for bucket, handles in self._shared_buckets(tensors):
            num_tensors += len(bucket.entries)
            nbytes += bucket.nbytes
            if self._failure is not None:
                continue
            try:
                for name, tensor in bucket.tensors:
                    observe(name, tensor)
                limit = deadline_for(bucket.nbytes)
                answers = self.fleet.start(
                    "/update_weights_from_tensor", self._requests(bucket, handles, version), limit
                )
                self._reading[self._buffers.turn] = answers, limit
            except Exception as error:  # raised below
                self._failure = error
        if self._failure is not None:
            raise self._failure
        return Transferred(num_tensors, nbytes)

    def follow(self, tensors: NamedTensors) -> None:
        """Pack the same buckets at the same time, for the engine ranks on this rank's GPU."""
        for _ in self._shared_buckets(tensors):
            pass

    # -- inside ------------------------------------------------------------------------------------

    def _shared_buckets(self, tensors: NamedTensors) -> Iterator[tuple[Bucket, list[Handle]]]:
        """Yield buckets, the same on every rank, with the handles of all ranks' copies on rank 0;
        free the buffers at the end."""
        self._failure = None
        try:
            for bucket in self.packing.buckets(tensors, self._allocate):
                yield bucket, self._gather(handle_of(bucket.buffer))
            for number in (0, 1):
                self._wait_for_readers(number)
        finally:
            self._buffers.drop()
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()  # engines have closed all handles

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self._wait_for_readers(self._buffers.advance())
        return self._buffers.current(nbytes)

    def _wait_for_readers(self, number: int) -> None:
        """Wait on all ranks until no engine reads the buffer."""
        if number in self._reading:
            assert self.fleet is not None
            answers, limit = self._reading.pop(number)
            try:
                self.fleet.wait(answers, limit)
            except Exception as error:  # raised by `send`, after the other ranks have finished
                self._failure = self._failure or error
        if self.group is not None:
            dist.barrier(self.group)

    def _gather(self, handle: Handle) -> list[Handle]:
        if self.group is None:
            return [handle]
        gathered: list[Any] | None = [None] * self.group.size() if self.group.rank() == 0 else None
        dist.gather_object(handle, gathered, group=self.group, group_dst=0)
        return gathered or []

    def _requests(
        self, bucket: Bucket, handles: list[Handle], version: int
    ) -> Callable[[int], dict[str, Any]]:
        """Make the request to each engine: a payload for each of its ranks."""
        contents = _bucket_and_table(bucket) if self.in_runs else _flattened_bucket(bucket)
        payloads: dict[int, str] = {}

        def payload(slot: int) -> str:
            if slot not in payloads:
                payloads[slot] = base64.b64encode(
                    pickle.dumps(contents(Opened(handles[slot])))
                ).decode()
            return payloads[slot]

        def request(number: int) -> dict[str, Any]:
            return {
                "serialized_named_tensors": [payload(slot) for slot in self.engines[number].slots],
                "load_format": WEIGHT_LOADER if self.in_runs else "flattened_bucket",
                "weight_version": str(version),
                "flush_cache": False,  # once for all buckets, by `WeightSync`
                **ONLY_THE_POLICY,
            }

        return request


# -- handles ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle:
    """A function call that opens memory in another process. Arguments may be handles themselves."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Opened:
    """Pickles as the call of a handle: unpickling opens the memory."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = tuple(Opened(x) if isinstance(x, Handle) else x for x in self._handle.arguments)
        return self._handle.function, arguments


def handle_of(buffer: torch.Tensor) -> Handle:
    """Make a handle that another process on this host can open as the same memory. The buffer must
    exist until then."""
    if buffer.is_cuda:
        function, arguments = reductions.reduce_tensor(buffer)
        # GPU numbers differ between processes (CUDA_VISIBLE_DEVICES); SGLang's reader also accepts
        # UUIDs
        uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
        return Handle(
            function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        )
    place = (buffer.storage_offset(), buffer.size(), buffer.stride(), False)
    return Handle(
        reductions.rebuild_tensor, (torch.Tensor, storage_handle(buffer, torch.uint8), place)
    )


def storage_handle(buffer: torch.Tensor, dtype: torch.dtype, readers: int = 1) -> Handle:
    """Make a handle of a buffer's host memory as a storage of ``dtype``; each of the ``readers``
    opens it once."""
    storage: Any = buffer.untyped_storage()
    manager, name, nbytes = storage._share_filename_cpu_()
    for _ in range(readers):
        storage._shared_incref()  # each reader releases one
    untyped = Handle(
        reductions.rebuild_storage_filename, (torch.UntypedStorage, manager, name, nbytes)
    )
    return Handle(reductions.rebuild_typed_storage, (untyped, dtype))


def _flattened_bucket(bucket: Bucket) -> Callable[[Opened], Any]:
    """Return a function that wraps the opened buffer for SGLang's own reader of buckets."""
    table = [_row(entry) for entry in bucket.entries]
    return lambda buffer: {"flattened_tensor": buffer, "metadata": table}


def _bucket_and_table(bucket: Bucket) -> Callable[[Opened], Any]:
    """Return a function that wraps the opened buffer for
    `slime.engines.sglang.weight_loader.load`."""
    words = json.dumps([entry.to_json() for entry in bucket.entries]).encode()
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    return lambda buffer: [("bucket", buffer), ("table", table)]


def _row(entry: TensorEntry) -> SimpleNamespace:
    """Return a row of the table, with the attributes that SGLang's reader uses."""
    return SimpleNamespace(
        name=entry.name,
        shape=torch.Size(entry.shape),
        dtype=dtype_of(entry.dtype),
        start_idx=entry.offset,
        end_idx=entry.offset + entry.nbytes,
        numel=entry.nbytes,
    )


def _check_sharing(engines: Sequence[EngineSlots], num_ranks: int) -> None:
    for engine in engines:
        beyond = [slot for slot in engine.slots if slot >= num_ranks]
        if beyond or not engine.slots:
            raise UserError(
                f"engine {engine.url} is on GPU {beyond[0] if beyond else '?'} of the run, "
                "without a trainer rank",
                why="with --colocate weights go to engines through the memory of the GPU that "
                "they share",
                fix=f"pass --rollout-num-gpus {num_ranks} (as many as the trainer has), or "
                "--update-weight-transport disk",
            )
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    if torch.cuda.is_available() and "expandable_segments:True" in settings:
        raise UserError(
            "memory in expandable segments cannot be shared with engines",
            why=f"PYTORCH_CUDA_ALLOC_CONF is {settings}",
            fix="leave expandable_segments out for runs with --colocate",
        )
