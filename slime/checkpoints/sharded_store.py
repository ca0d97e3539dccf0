"""Writes and reads a Megatron sharded state dict in the ``torch_dist`` layout.

    ShardedWrite(state)       collective: agrees on who writes what
      .snapshot(memory)       optional
      .write(directory)       in this thread or another one
      .finish(…)              on rank 0
    read(state, directory)

megatron-core's own writer starts a manager process by ``spawn`` and writers by ``fork``. Both hang
or crash in a process with threads of its own (gloo, OpenMP, Ray), so torch's writer writes the same
files inside this process. megatron-core's reader reads them.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from slime.checkpoints.directory import FileRecord
from slime.errors import UserError
from slime.processes.pinned_memory import HostMemory

StateDict = dict[str, Any]

#: Errors of writing: the operating system's, and torch's RuntimeError for a full disk.
WRITE_ERRORS = (OSError, RuntimeError, dcp.api.CheckpointException)


# -- writing ---------------------------------------------------------------------------------------


class ShardedWrite:
    """One rank's share of a checkpoint. Constructing it is collective; its methods are not.

    Args:
        state: sharded state dict.
    Raises:
        torch's CheckpointException: on every rank, when any rank's plan fails.
    """

    def __init__(self, state: StateDict) -> None:
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies.torch import (
            MCoreSavePlanner,
            _replace_state_dict_keys_with_sharded_keys,
            mcore_to_pyt_state_dict,
        )

        self.rank = dist.get_rank()
        with warnings.catch_warnings():
            # megatron-core uses deprecated names of torch
            warnings.simplefilter("ignore", FutureWarning)
            sharded, common = save_preprocess(dict(state))
            keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(
                sharded, keep_only_main_replica=True
            )
            tensors = mcore_to_pyt_state_dict(keyed, False)
        self._common = pickled(common) if self.rank == 0 else b""
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._metadata: Any = None
        writer = dcp.FileSystemWriter(".")

        def local_plan() -> Any:
            self._planner.set_up_planner(tensors, None, self.rank == 0)
            return self._planner.create_local_plan()

        def global_plan(plans: list[Any]) -> list[Any]:
            plans, self._metadata = self._planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        plan = _DistWrapper(None, True, 0).reduce_scatter("plan", local_plan, global_plan)
        self._plan = self._planner.finish_plan(plan)

    def snapshot(self, memory: HostMemory) -> int:
        """Copy this rank's tensors into host memory, so that training can continue; returns the
        number of bytes copied.

        Objects (random states) were serialised when the write was planned.
        """
        items = [item for item in self._plan.items if item.type != WriteItemType.BYTE_IO]
        copies = memory.copy([self._planner.resolve_data(item) for item in items])
        resolved = {item.index: copy for item, copy in zip(items, copies, strict=True)}
        for item in self._plan.items:
            if item.type == WriteItemType.BYTE_IO:
                resolved[item.index] = self._planner.resolve_data(item)
        self._planner = _Resolved(resolved)
        return sum(copy.nbytes for copy in copies)

    def write(self, directory: Path) -> tuple[list[Any], list[FileRecord]]:
        """Write this rank's file and flush it to the disk.

        Returns:
            torch's write results, for `finish` on rank 0, and the records of the files written.
        """
        files = _FingerprintedFiles()
        writer = dcp.FileSystemWriter(
            directory, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        writer.fs = files
        results = writer.write_data(self._plan, self._planner).value()
        self._planner = None  # releases the snapshot, or the tensors
        return results, files.records

    def finish(self, directory: Path, results: list[list[Any]]) -> None:
        """Write the table of contents and the state that all ranks share: on rank 0, after all have
        written.

        Args:
            results: the results of each rank's `write`, in rank order.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        dcp.FileSystemWriter(directory, sync_files=True).finish(self._metadata, results)
        (directory / "common.pt").write_bytes(self._common)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def plain_results(results: list[Any]) -> list[Any]:
    """Return torch's write results as JSON values."""
    return [
        (
            result.index.fqn,
            None if result.index.offset is None else list(result.index.offset),
            result.index.index,
            result.size_in_bytes,
            asdict(result.storage_data),
        )
        for result in results
    ]


def results_of(plain: list[Any]) -> list[Any]:
    """Restore torch's write results from `plain_results`."""
    return [
        WriteResult(MetadataIndex(name, offset, index), nbytes, _StorageInfo(**place))
        for name, offset, index, nbytes, place in plain
    ]


class _Resolved:
    """Takes the planner's place after a snapshot: it returns the copies."""

    def __init__(self, data: dict[Any, Any]) -> None:
        self._data = data

    def resolve_data(self, item: Any) -> Any:
        return self._data[item.index]


class _FingerprintedFiles(FileSystem):
    """Computes the size and xxh3-128 of each file while it is written, which avoids reading it
    again."""

    def __init__(self) -> None:
        self.records: list[FileRecord] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with FingerprintedFile(Path(path)) as stream:
            yield stream
        self.records.append(FileRecord(Path(path).name, stream.nbytes, stream.fingerprint))


class FingerprintedFile:
    """A sequentially written file, with the methods that torch's writer needs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._digest.update(data)
        self.nbytes += written
        return written

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        # requested in order to sync the file, which needs this object's buffer flushed
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FingerprintedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# -- reading ---------------------------------------------------------------------------------------


def read(state: StateDict, directory: Path) -> StateDict:
    """Read the entries of ``state`` from a checkpoint written in any layout. Collective.

    Raises:
        UserError: a tensor is missing or has another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return dist_checkpointing.load(state, str(directory))
    except (
        CheckpointingException,
        dcp.api.CheckpointException,
        RuntimeError,
        ValueError,
        KeyError,
        OSError,
    ) as error:
        raise UserError(
            f"{directory} cannot be loaded into this model",
            why=first_lines(error),
            fix="it must be a checkpoint of the same model; pass --load with another directory or "
            "--ckpt-step with another iteration. --no-load-optim leaves the optimizer out",
        ) from error


def read_common(directory: Path) -> StateDict:
    """Read the part that all ranks share: counters, scheduler, parameter groups.

    Raises:
        UserError: the file is damaged.
    """
    with _explaining_damage(directory / "common.pt") as path:
        return torch.load(path, map_location="cpu", weights_only=False)


def read_contents(directory: Path) -> Any:
    """Read torch's table of contents (``.metadata``): shape and boxes of every tensor.

    Raises:
        UserError: the file is damaged.
    """
    with _explaining_damage(directory / ".metadata"):
        return dcp.FileSystemReader(directory).read_metadata()


@contextmanager
def _explaining_damage(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        fix = "pass --ckpt-step with an earlier iteration"
        raise UserError(f"{path} is damaged", why=first_lines(error), fix=fix) from error


def first_lines(error: BaseException, limit: int = 400) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, dcp.api.CheckpointException):
        text = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
    return text if len(text) <= limit else text[:limit] + " …"
