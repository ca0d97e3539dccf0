"""The part of a checkpoint that ranks of a critic's own write: it goes into the policy's checkpoint
before that is published, so that the two are never from different steps.

    critic's ranks   root/.critic/iter_0000010/      a checkpoint of its own, written meanwhile
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

#: Newest parts that stay when another is written. With --async-save the policy may still have to
#: take the one before.
KEPT_PARTS = 2


def critic_root(root: Path) -> Path:
    """The directory below --save where the critic's ranks write."""
    return root / f".{CRITIC}"


def discard_critic(root: Path, iteration: int) -> None:
    """Remove what an earlier launch has written for this iteration, so that it is not taken for
    what is about to be written."""
    shutil.rmtree(critic_root(root) / iteration_name(iteration), ignore_errors=True)


def discard_critics(root: Path) -> None:
    """Remove what no checkpoint has taken, once nobody writes any more."""
    shutil.rmtree(critic_root(root), ignore_errors=True)


def take_critic(root: Path, iteration: int, checkpoint: Path) -> None:
    """Move the critic's part into a checkpoint that is being written; wait for it with
    --async-save.

    Raises:
        UserError: it does not come.
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
    """Whether the critic's part of a checkpoint that is being written is complete."""
    final = root / iteration_name(iteration)
    # in this order, as it moves from the first to the last
    places = (critic_root(root) / final.name, partial_path(final) / CRITIC, final / CRITIC)
    return any(place.is_dir() for place in places)


def critic_records(checkpoint: Path) -> list[FileRecord]:
    """Records of the critic's part, from its own manifest; [] where there is none."""
    own = checkpoint / CRITIC
    if not own.is_dir():
        return []
    found = [
        FileRecord(f"{CRITIC}/{record.path}", record.nbytes, record.xxh3)
        for record in read_manifest(own) or []
    ]
    listed = {checkpoint / record.path for record in found}
    return found + [file_record(path, checkpoint) for path in own.iterdir() if path not in listed]
