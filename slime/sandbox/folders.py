"""Temporary folders for programs, removed when the program is done, or later after a killed run.

The process that creates a folder keeps it locked (``flock``). The next process that creates a
folder removes stale ones, which are not locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from slime.files import left_behind

PROGRAM = "slime-sandbox-"
TASK = "slime-task-"

_has_looked = False


@contextlib.asynccontextmanager
async def temporary_folder(kind: str) -> AsyncIterator[str]:
    """Make an empty folder; no part of its path is a link.

    Args:
        kind: what its name begins with, `PROGRAM` or `TASK`.
    """
    global _has_looked
    if not _has_looked:
        _has_looked = True
        await asyncio.to_thread(remove_stale)
    # not in a thread: a cancelled caller would never learn the folder's name
    folder, lock = _make(kind)
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(_end, folder, lock))


def _make(kind: str) -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=kind, dir=os.path.realpath(tempfile.gettempdir()))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process removed it as stale
        # a file system without locks: other processes cannot lock it either
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)


def _end(folder: str, lock: int) -> None:
    remove(folder)
    os.close(lock)


def remove_stale() -> list[str]:
    """Remove this user's stale folders; return their names."""
    removed = []
    for path in (
        path for kind in (PROGRAM, TASK) for path in Path(tempfile.gettempdir()).glob(f"{kind}*/")
    ):
        with left_behind(path) as is_free:
            if is_free:
                remove(str(path))
                removed.append(path.name)
    return removed


def remove(folder: str) -> None:
    """Remove a folder that programs have used. They may have removed permissions, or nested folders
    deeper than a path can name, so each one is moved to the top before it is emptied."""
    waiting = [folder]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError):  # what cannot be removed stays
            for entry in list(os.scandir(one)):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                top = os.path.join(folder, uuid.uuid4().hex)
                os.rename(entry.path, top)
                waiting.append(top)
            if one != folder:
                os.rmdir(one)
    with contextlib.suppress(OSError):
        os.rmdir(folder)
