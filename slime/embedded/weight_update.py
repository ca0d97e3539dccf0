"""Weight updates from shared memory, a broadcast, or a directory.

Other threads receive the bytes; the engine thread only copies them into place between two steps.
Each update is checked completely (names, shapes, dtypes) before anything is written, so that a
refused update changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from slime import deadlines
from slime.embedded.engine import Engine
from slime.embedded.serialized_tensors import read_named_tensors
from slime.embedded.weights import WeightError
from slime.engines.request_fields import (
    FLAG,
    LIST,
    TEXT,
    BadRequest,
    FieldKind,
    integer,
    one_of,
    optional,
    required,
)
from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import TensorEntry, dtype_of, entries_of, unpack
from slime.engines.wire.process_group import ExternalGroup
from slime.engines.wire.shared_memory import attach
from slime.errors import UserError

#: What ``/server_info`` states about weight pushes to this engine.
ABILITIES = Abilities("embedded", ("shm", "broadcast", "disk"), "tensors")

_BYTES = integer(0, 1 << 62)
_WORLD_SIZE = integer(2, 1 << 16)
_RANK = integer(1, (1 << 16) - 1)
_PORT = integer(1, (1 << 16) - 1)
_BACKEND = one_of("nccl", "gloo")
NAME = FieldKind("a text of 1 to 255 characters without a null", lambda value: _named(value, 255))
PATH = FieldKind(
    "a path of 1 to 4,096 characters without a null", lambda value: _named(value, 4096)
)


def _named(value: Any, most: int) -> str:
    text = str(TEXT.convert(value))
    if not 0 < len(text) <= most or "\0" in text:
        raise ValueError
    return text


class WeightUpdater:
    """Applies update requests to an engine. Methods block; call them off the event loop.

    All methods raise `WeightError` with the reason if nothing could be applied.
    """

    #: Route of the server → the method that answers it.
    ROUTES: ClassVar[dict[str, str]] = {
        "/update_weights_from_tensor": "from_tensor",
        "/update_weights_from_distributed": "from_distributed",
        "/update_weights_from_disk": "from_disk",
        "/init_weights_update_group": "join_group",
        "/destroy_weights_update_group": "leave_group",
    }

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[str, ExternalGroup] = {}
        self._one_at_a_time = threading.Lock()

    def from_tensor(self, body: Mapping[str, Any]) -> str:
        """``/update_weights_from_tensor``: segments of shared memory, or SGLang's serialized
        tensors."""
        load_format = body.get("load_format")
        pairs: list[tuple[str, torch.Tensor]] = []
        if load_format == "shared_memory":
            segments = required(body, "segments", LIST)
            with self._one_at_a_time:
                for segment in segments:
                    pairs += _read_segment(segment)
                return self._apply(pairs, body)
        if load_format not in (None, "flattened_bucket"):
            raise WeightError(
                f"load_format {load_format!r} is not supported by the embedded engine; use "
                "'shared_memory' with segments, or 'flattened_bucket' or none with "
                "serialized_named_tensors"
            )
        payloads = required(body, "serialized_named_tensors", LIST)
        if not payloads:
            raise WeightError(
                "serialized_named_tensors is empty; give one payload for each rank of the engine"
            )
        with self._one_at_a_time:
            # the embedded engine has only rank 0
            return self._apply(read_named_tensors(payloads[0], load_format), body)

    def from_distributed(self, body: Mapping[str, Any]) -> str:
        """``/update_weights_from_distributed``: one broadcast of the flat bucket, or one per
        tensor."""
        name = _group_name(body)
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(self._groups) or "none"
            raise WeightError(f"there is no weight update group '{name}' (joined: {known})")
        entries = _entries(body)
        load_format = body.get("load_format")
        if load_format not in (None, "flattened_bucket"):
            raise WeightError(
                f"load_format {load_format!r} is not known; use 'flattened_bucket' or leave it out"
            )
        store = self._engine.store
        with self._one_at_a_time:
            problem: WeightError | None = None
            try:
                store.check((entry.name, entry.shape) for entry in entries)
            except WeightError as error:  # raise after the broadcast, or the other ranks would hang
                problem = error
            try:
                pairs = _receive(group, entries, load_format is not None, store.device)
            except RuntimeError as error:
                self._leave(name)
                raise WeightError(
                    f"the broadcast of group '{name}' failed, the group is closed: {error}"
                ) from error
            if problem is not None:
                raise problem
            return self._apply(pairs, body)

    def from_disk(self, body: Mapping[str, Any]) -> str:
        """``/update_weights_from_disk``: a complete Hugging Face directory."""
        path = required(body, "model_path", PATH)
        version = _version(body)
        with self._one_at_a_time:
            self._abort_if_asked(body)
            try:
                count = self._engine.call(
                    lambda: self._engine.store.load_directory(path, version)
                ).result(deadlines.WEIGHT_UPDATE_COPY)
            # OSError: for example, the name is too long for the file system
            except (UserError, OSError) as error:
                raise WeightError(str(error)) from error
            self._flush_if_asked(body)
        return f"{count} tensors from {path}"

    def join_group(self, body: Mapping[str, Any]) -> str:
        """``/init_weights_update_group``: become rank ``rank_offset`` of a group that the trainer
        opened."""
        name = _group_name(body)
        backend = optional(body, "backend", _BACKEND, "nccl")
        if backend == "nccl" and self._engine.device.type != "cuda":
            raise WeightError(
                "this engine runs on CPU and cannot join a group with backend nccl; use gloo"
            )
        if name in self._groups:
            raise WeightError(f"the group '{name}' exists already; destroy it first")
        world_size = required(body, "world_size", _WORLD_SIZE)
        rank = required(body, "rank_offset", _RANK)
        if rank >= world_size:
            raise BadRequest(
                f"rank_offset must be below world_size ({world_size}), got {rank}", "rank_offset"
            )
        address = required(body, "master_address", NAME)
        port = required(body, "master_port", _PORT)
        try:
            self._groups[name] = ExternalGroup.join(
                address, port, name, backend, rank, world_size, deadlines.WEIGHT_UPDATE_JOIN
            )
        except RuntimeError as error:
            raise WeightError(
                f"rank {rank} of {world_size} could not join {address}:{port}: {error}"
            ) from error
        return f"joined '{name}' as rank {rank} of {world_size}"

    def leave_group(self, body: Mapping[str, Any]) -> str:
        """``/destroy_weights_update_group``."""
        name = _group_name(body)
        if name not in self._groups:
            raise WeightError(f"there is no weight update group '{name}'")
        self._leave(name)
        return f"left '{name}'"

    def _leave(self, name: str) -> None:
        self._groups.pop(name).close()

    def _apply(self, pairs: list[tuple[str, torch.Tensor]], body: Mapping[str, Any]) -> str:
        version = _version(body)
        store = self._engine.store
        self._abort_if_asked(body)
        count = self._engine.call(lambda: store.update(pairs, version)).result(
            deadlines.WEIGHT_UPDATE_COPY
        )
        self._flush_if_asked(body)
        return f"{count} tensors, version {store.version}"

    def _abort_if_asked(self, body: Mapping[str, Any]) -> None:
        if optional(body, "abort_all_requests", FLAG, False):
            self._engine.abort(lambda sequence: True, "Aborted by a weight update.")

    def _flush_if_asked(self, body: Mapping[str, Any]) -> None:
        if body.get("flush_cache", True):
            self._engine.call(self._engine.scheduler.flush).result(deadlines.WEIGHT_UPDATE_COPY)


def _read_segment(segment: Any) -> list[tuple[str, torch.Tensor]]:
    """Map a shared memory segment privately; return (name, tensor in the segment) pairs."""
    if not isinstance(segment, Mapping):
        raise BadRequest("segments must be a list of objects")
    name = required(segment, "shm", NAME)
    nbytes = required(segment, "nbytes", _BYTES)
    try:
        buffer = attach(name.removeprefix("/dev/shm/"), nbytes)
    except FileNotFoundError as error:
        raise WeightError(
            f"there is no segment {name} in /dev/shm; engine and trainer must be on one host"
        ) from error
    except (ValueError, OSError) as error:
        raise WeightError(str(error)) from error
    try:
        entries = [TensorEntry.from_json(item) for item in required(segment, "tensors", LIST)]
        return list(unpack(buffer, entries))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"the table of segment {name} is wrong: {error}") from error


def _entries(body: Mapping[str, Any]) -> list[TensorEntry]:
    names, dtypes, shapes = (required(body, key, LIST) for key in ("names", "dtypes", "shapes"))
    try:
        return entries_of(names, dtypes, shapes)
    except (TypeError, ValueError) as error:
        raise WeightError(f"names, dtypes and shapes do not fit together: {error}") from error


def _receive(
    group: ExternalGroup, entries: list[TensorEntry], flat: bool, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    if flat:
        total = entries[-1].offset + entries[-1].nbytes if entries else 0
        buffer = torch.empty(total, dtype=torch.uint8, device=device)
        if total:
            group.broadcast(buffer, deadlines.WEIGHT_UPDATE_RECEIVE)
        return list(unpack(buffer, entries))
    pairs = []
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
        group.broadcast(tensor, deadlines.WEIGHT_UPDATE_RECEIVE)
        pairs.append((entry.name, tensor))
    return pairs


def _group_name(body: Mapping[str, Any]) -> str:
    return optional(body, "group_name", NAME, "weight_update_group")


def _version(body: Mapping[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)
