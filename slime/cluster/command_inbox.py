"""Commands to a running run, as small files in its folder: only users who may write there can give
them.

    <run>/engines/<id>.order.json    {"verb": "add", "url": "10.0.0.7:30000"}, written by
                                     `slime engines`
    <run>/engines/<id>.answer.json   {"said": …}, {"refused": …}, …, written by the driver, which
                                     removes the command; its reader removes the answer

No port is opened for this. The driver polls during its other waits, and usually only reads the
folder's modification time. Imports no Ray.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime import deadlines
from slime.errors import RunFailed, UserError
from slime.files import read_object, write_atomically
from slime.log import get_logger
from slime.observe.run_folder import RunFolder

logger = get_logger(__name__)

_COMMAND_NAME = re.compile(r"([0-9a-f]{16})\.order\.json")
_OUR_NAMES = re.compile(r"[0-9a-f]{16}\.(order|answer)\.json")
_LARGEST = 4096
FOLDER = "engines"


@dataclass(frozen=True)
class EngineCommand:
    """A command of ``slime engines``.

    Attributes:
        id: part of its files' names.
        verb: "add", "remove", "list"; not checked yet.
    """

    id: str
    verb: str
    url: str = ""


class CommandInbox:
    """The driver's end: reads commands and writes answers.

    Args:
        run: the run's folder.
        clock: seconds since 1970, comparable with the file system's times.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = run / FOLDER
        self._clock = clock
        self._seen: int | None = None
        self._answered: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()  # removes files of an earlier launch

    def take(self) -> list[EngineCommand]:
        """Return the commands that are not answered yet. Unreadable files raise nothing."""
        try:
            changed = self._folder.stat().st_mtime_ns
            if changed == self._seen:
                return []
            read = map(self._read, sorted(self._folder.iterdir()))
            commands = [command for command in read if command is not None]
        except OSError as error:
            logger.debug("no commands: %s", error)
            return []
        settled = self._clock() - changed / 1e9 > deadlines.COMMAND_INBOX_REREAD
        self._seen = changed if settled and not commands else None
        return commands

    def answer(self, command: EngineCommand, words: Mapping[str, Any]) -> None:
        self._answered.add(command.id)
        try:
            write_atomically(self._folder / f"{command.id}.answer.json", orjson.dumps(words))
            (self._folder / f"{command.id}.order.json").unlink(missing_ok=True)
        except OSError as error:  # a full disk must not end the run
            logger.warning("a command could not be answered: %s", error)

    def close(self) -> None:
        """Remove all commands and answers."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _OUR_NAMES.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _read(self, path: Path) -> EngineCommand | None:
        found = _COMMAND_NAME.fullmatch(path.name)
        if found is None or found.group(1) in self._answered:
            return None
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST:
                words = read_object(path)
            else:
                words = {}
        except OSError:  # withdrawn or unreadable
            return None
        return EngineCommand(found.group(1), str(words.get("verb", "")), str(words.get("url", "")))


def send_command(
    run: Path,
    verb: str,
    url: str = "",
    *,
    seconds: float = deadlines.COMMAND_INBOX_ANSWER,
    poll: float = deadlines.COMMAND_INBOX_POLL,
) -> dict[str, Any]:
    """Send a command to a running run and return its answer.

    Args:
        run: its folder.
        seconds: deadline of the answer, after which the command is withdrawn.
    Raises:
        UserError: the run is not running, its folder cannot be written, or it refuses.
        RunFailed: it does not answer.
    """
    folder = run / FOLDER
    command_id = secrets.token_hex(8)
    asked = folder / f"{command_id}.order.json"
    answered = folder / f"{command_id}.answer.json"
    _check_runs(run)
    if not folder.is_dir():
        raise UserError(
            f"{run} has no engines",
            why=f"there is no {folder}: the run generates nothing, or is still starting",
        )
    try:
        write_atomically(asked, orjson.dumps({"verb": verb, "url": url}))
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to",
            why=error.strerror or str(error),
            fix="call it as the user of the run",
        ) from error
    end = time.monotonic() + seconds
    try:
        while not answered.exists():
            _check_runs(run)
            if time.monotonic() > end:
                raise RunFailed(
                    f"the run {run} gave no answer within {seconds:.0f} s, and the command was "
                    "withdrawn",
                    why="engines do not join or leave during a weight push, and a hanging driver "
                    "reads no commands",
                    fix=f"try again; {run}/logs/driver.log tells what it does",
                )
            time.sleep(poll)
        words = read_object(answered)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if refused := words.get("refused"):
        raise UserError(refused["what"], why=refused["why"], fix=refused["fix"])
    return words


def _check_runs(run: Path) -> None:
    stages = RunFolder(run).read_summary()["stages"]
    newest = max(stages.values(), key=lambda stage: stage.get("started") or 0.0, default=None)
    if newest is None:
        raise UserError(
            f"{run} is not a run folder", why="it has no run.json", fix="pass outputs/<run>"
        )
    state = newest.get("state")
    pid = newest.get("pid")
    is_here = newest.get("host") == platform.node()
    if state == "running" and is_here and not os.path.exists(f"/proc/{pid}"):
        state = "gone: its driver was killed"
    if state != "running":
        raise UserError(
            f"the run {run} does not run: it is {state}",
            fix="engines can join while it runs; for a launch, name them with "
            "--rollout-external-engine-addrs",
        )
