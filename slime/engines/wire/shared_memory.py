"""Segments in /dev/shm that the trainer fills and engines on the same host read.

    SegmentPool.take(nbytes) ─► Segment.tensor (uint8, shared)
                                ── path in the request ──► attach(path, nbytes)

A segment is a file that its owner keeps locked (``flock``). Its memory is reused for all pushes and
removed on `close` and at exit. If the owner was killed, the next trainer that starts or the end of
the run removes it: a segment whose lock is free has no owner. (The name has no pid: containers may
share /dev/shm but not pids.) Only functions that need torch import it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from slime.errors import UserError
from slime.files import left_behind

if TYPE_CHECKING:
    import torch

SHM_DIR = Path("/dev/shm")
_PREFIX = "slime-weights-"


class Segment:
    """One shared block, ``nbytes`` long, open for writing here.

    Raises:
        UserError: /dev/shm has no room.
    """

    def __init__(self, nbytes: int, directory: Path = SHM_DIR) -> None:
        import torch

        self.name = f"{_PREFIX}{secrets.token_hex(8)}"
        self.path = directory / self.name
        self.nbytes = nbytes
        # `remove_stale` must not find the file before it is locked
        unlocked = directory / f".{self.name}"
        try:
            self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _no_room(directory, nbytes, error) from error
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path)
        try:
            # reserve the pages now: an error here beats a SIGBUS in the middle of a copy
            os.posix_fallocate(self._descriptor, 0, max(1, nbytes))
            self._map = mmap.mmap(self._descriptor, max(1, nbytes))
        except OSError as error:
            self.path.unlink()
            os.close(self._descriptor)
            raise _no_room(directory, nbytes, error) from error
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the file. Existing mappings, and `tensor`, stay valid."""
        if self._descriptor < 0:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


class SegmentPool:
    """``count`` segments used in rotation: one is packed while engines still read another.

    Segments grow to the largest request and are kept between pushes.

    Attributes:
        turn: number of the segment that `take` returns next.
    """

    def __init__(self, count: int = 2, directory: Path = SHM_DIR) -> None:
        self._segments: list[Segment | None] = [None] * count
        self.turn = 0
        self._directory = directory

    def rewind(self) -> None:
        """Start again with the first segment: a model of one bucket then needs only one."""
        self.turn = 0

    def take(self, nbytes: int) -> tuple[int, Segment]:
        """Return the next segment's number and the segment; the caller ensures that nobody reads it
        any more."""
        number = self.turn
        self.turn = (number + 1) % len(self._segments)
        segment = self._segments[number]
        if segment is None or segment.nbytes < nbytes:
            if segment is not None:
                segment.close()
            segment = self._segments[number] = Segment(nbytes, self._directory)
        return number, segment

    def close(self) -> None:
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._segments = [None] * len(self._segments)


def attach(name: str, nbytes: int, directory: Path = SHM_DIR) -> torch.Tensor:
    """Return a reader's view of a segment: uint8 [nbytes], mapped read-only; do not write to it.

    Args:
        name: as in the request, relative to /dev/shm.
    Raises:
        ValueError: the name leaves the directory, or the segment is shorter than ``nbytes``.
        FileNotFoundError: no such segment (its owner is gone, or on another host).
    """
    import torch

    path = (directory / name).resolve()
    if path.parent != directory.resolve():
        raise ValueError(f"{name!r} is not a name below {directory}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < nbytes:
            raise ValueError(
                f"segment {name} has {os.fstat(descriptor).st_size} bytes, the request says "
                f"{nbytes}"
            )
        # a private mapping: torch needs a writable buffer, and a write must not reach the trainer's
        # memory
        mapped = mmap.mmap(
            descriptor,
            max(1, nbytes),
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]


def remove_stale(directory: Path = SHM_DIR) -> list[str]:
    """Remove segments whose owner died without removing them; return their names."""
    removed = []
    for path in directory.glob(f"{_PREFIX}*"):
        with left_behind(path) as is_free:
            if is_free:
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _no_room(directory: Path, nbytes: int, error: OSError) -> UserError:
    room = os.statvfs(directory) if directory.is_dir() else None
    free = "there is no such directory"
    if room:
        free = f"{room.f_bavail * room.f_frsize / 1e6:,.0f} MB are free"
    return UserError(
        f"cannot reserve {nbytes / 1e6:,.0f} MB of shared memory in {directory} for the weight "
        "update",
        why=f"{error.strerror}; {free}",
        fix="lower --update-weight-buffer-size, give the container more (docker run "
        "--shm-size=8g), or pass --update-weight-transport disk",
    )


if __name__ == "__main__":
    remove_stale()
