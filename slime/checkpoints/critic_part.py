"""The part of a checkpoint that a critic on its own ranks writes. It is moved into the policy's
checkpoint before that is published, so both are always from the same step.

    critic's ranks   root/.critic/iter_0000010/      a checkpoint of the critic, written in parallel
    policy's rank 0        └─► root/.iter_0000010.partial/critic/ ─► root/iter_0000010/
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from slime import deadlines
from slime.checkpoints.directory import (
    CRITIC,
    FileRecord,
    file_record,
    iteration_name,
    partial_path,
    read_manifest,
)
from slime.errors import UserError

#: Number of parts that are kept when another is written, the newest: with --async-save, the policy
#: may not have taken the previous part yet.
KEPT_PARTS = 2


def critic_root(root: Path) -> Path:
    """Return the directory in --save where the critic's ranks write."""
    return root / f".{CRITIC}"


def discard_part(root: Path, iteration: int) -> None:
    """Remove the part that an earlier launch wrote for this iteration, which would be mistaken for
    the new one."""
    shutil.rmtree(critic_root(root) / iteration_name(iteration), ignore_errors=True)


def discard_all_parts(root: Path) -> None:
    """Remove all parts that no checkpoint has taken. Call it when all writing has ended."""
    shutil.rmtree(critic_root(root), ignore_errors=True)


def take_critic(root: Path, iteration: int, checkpoint: Path) -> None:
    """Move the critic's part into a checkpoint that is being written; with --async-save, wait for
    it first.

    Raises:
        UserError: the part is not written before the deadline.
    """
    written = critic_root(root) / iteration_name(iteration)
    end = time.monotonic() + deadlines.CHECKPOINT_WRITE
    while not written.is_dir():
        if time.monotonic() > end:
            raise UserError(
                f"the critic's part of {checkpoint} was not written",
                why=f"{written} is not there after {deadlines.CHECKPOINT_WRITE / 3600:.0f} hours",
                fix="look at the logs of the critic's ranks; --save must be on a file system that "
                "they share with the trainer",
            )
        time.sleep(deadlines.WAITING_POLL)
    written.rename(checkpoint / CRITIC)


def is_part_written(root: Path, iteration: int) -> bool:
    """Tell whether the critic's part of a checkpoint that is being written is complete."""
    final = root / iteration_name(iteration)
    # in the order in which the part moves, so that it is not missed while it moves
    places = (critic_root(root) / final.name, partial_path(final) / CRITIC, final / CRITIC)
    return any(place.is_dir() for place in places)


def critic_records(checkpoint: Path) -> list[FileRecord]:
    """Return the records of the critic's part, from its own manifest; [] if there is no such
    part."""
    part = checkpoint / CRITIC
    if not part.is_dir():
        return []
    found = [
        FileRecord(f"{CRITIC}/{record.path}", record.nbytes, record.xxh3)
        for record in read_manifest(part) or []
    ]
    listed = {checkpoint / record.path for record in found}
    # a manifest does not list itself
    return found + [file_record(path, checkpoint) for path in part.iterdir() if path not in listed]
