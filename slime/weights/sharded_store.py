"""Writing and reading a Megatron sharded state dict in the ``torch_dist`` layout.

megatron-core's own writer starts a manager process by ``spawn`` and writers by ``fork``. Both hang or crash in a
process that has threads of its own (gloo, OpenMP, Ray), so the same files are written here by torch's writer inside
this process. What is written is the same layout; megatron-core's reader reads it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.errors import UserError

StateDict = dict[str, Any]


def write(state: StateDict, directory: Path) -> None:
    """Write a sharded state dict into an empty directory. Collective; every rank writes its own file.

    Raises:
        UserError: on every rank, when any rank could not write; says which and why.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    sharded, common = save_preprocess(dict(state))
    with agreed(f"writing {directory}", on_disk=directory):
        if dist.get_rank() == 0:
            torch.save(common, directory / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    with agreed(f"writing {directory}", on_disk=directory):
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dcp.save(mcore_to_pyt_state_dict(keyed, False), storage_writer=writer, planner=planner)


def read(state: StateDict, directory: Path) -> StateDict:
    """Read what ``state`` asks for, from a checkpoint written at any layout. Collective.

    Raises:
        UserError: a tensor is missing or has another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # megatron-core's use of torch's older names
            return dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, dcp.api.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
        raise UserError(
            f"{directory} cannot be loaded into this model",
            why=_first_lines(error),
            fix="it must be a checkpoint of the same model; pass --load with another directory or --ckpt-step with"
            " another iteration. --no-load-optim leaves the optimizer out",
        ) from error


def read_common(directory: Path) -> StateDict:
    """The part that is the same on every rank: counters, scheduler, parameter groups.

    Raises:
        UserError: the file is damaged.
    """
    import pickle

    try:
        return torch.load(directory / "common.pt", map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        fix = "pass --ckpt-step with an earlier iteration"
        raise UserError(f"{directory / 'common.pt'} is damaged", why=_first_lines(error), fix=fix) from error


@contextmanager
def agreed(what: str, on_disk: Path | None = None) -> Iterator[None]:
    """Every rank leaves the block in the same way: when one failed to write, all raise its error.

    A full disk is met by one rank first; without this the others would wait for it in the next collective.

    Args:
        on_disk: where it is written; torch's zip writer says "unexpected pos" for a full disk, so we say what is free.
    """
    failure: BaseException | None = None
    try:
        yield
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:  # torch raises RuntimeError for a full disk
        failure = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if failure is None else _first_lines(failure) + _room(on_disk))
    first = next(((rank, text) for rank, text in enumerate(said) if text is not None), None)
    if first is not None:
        raise UserError(
            f"{what} failed on trainer rank {first[0]}",
            why=first[1],
            fix="free space (--save-retain N keeps only the last N checkpoints), or pass another --save; the previous"
            " checkpoint is untouched",
        ) from failure


def _room(directory: Path | None) -> str:
    if directory is None or not directory.is_dir():
        return ""
    return f" ({shutil.disk_usage(directory).free / 1e6:,.1f} MB are free on this disk)"


def _first_lines(error: BaseException, limit: int = 400) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, dcp.api.CheckpointException):
        text = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
    return text if len(text) <= limit else text[:limit] + " …"
